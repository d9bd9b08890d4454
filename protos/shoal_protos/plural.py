"""Numbers of things in sentences, for both sides."""


def plural(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def at_step(step: int) -> str:
    """Where something ended that counts the steps that it has committed."""
    return f"at step {step}" if step > 0 else "before its first step"
