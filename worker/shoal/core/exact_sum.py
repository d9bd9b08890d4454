"""Sums of numbers, the same in whatever order and grouping the numbers come: kept as partial sums without error.

So the mean of an evaluation has the same bits in every world. Pure.
"""

from __future__ import annotations

import math

MOST_PARTS = 4
"""As many as 212 bits from the highest to the lowest: numbers of one kind need two or three."""


def add(parts: list[float], value: float) -> None:
    """Adds a number, in place. `parts`: what they add up to exactly, the largest first: the sum rounded, what that
    leaves rounded, and so on. So one sum has one form, and as few parts as hold it (Shewchuk's sums, by `math.fsum`).
    """
    rest = [*parts, value]
    if not math.isfinite(rounded := sum(rest)):
        parts[:] = [rounded]
        return
    parts.clear()
    while len(parts) < MOST_PARTS and (largest := math.fsum(rest)):
        parts.append(largest)
        rest.append(-largest)


def total(parts: list[float]) -> float:
    """The sum, rounded once."""
    return parts[0] if parts else 0.0
