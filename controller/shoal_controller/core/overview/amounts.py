"""Numbers with their units, as sentences for people have them. Pure."""

from __future__ import annotations

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0


def duration(seconds: float) -> str:
    """`63 ms`, `1.5 s`, `12 s`, `3 min`, `2 h 5 min`, `4 d`: what people say of so long a time."""
    if seconds < 1:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 2 * MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR:
        return f"{seconds / MINUTE:.0f} min"
    if seconds < 2 * DAY:
        hours, minutes = divmod(round(seconds / MINUTE), 60)
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{seconds / DAY:.0f} d"


def size(count: int) -> str:
    """Bytes: `0 B`, `5.6 MB`."""
    if count < 1000:
        return f"{count} B"
    power = min(4, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.1f} {' kMGT'[power]}B"


def listed(names: list[str], most: int = 8) -> str:
    """`w0`, `w0 and w1`, `w0, w1 and w2`; of more than `most` the first ones, and how many more."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
