"""Which counts are reported: the 1st, the 10th, the 100th …, so that what happens often fills no history."""


def passes_milestone(before: int, now: int) -> bool:
    """Whether a count that grows from `before` to `now` reaches 1, 10, 100, …"""
    return now > before and (before == 0 or len(str(now)) > len(str(before)))
