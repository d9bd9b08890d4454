"""Sums of numbers, the same in whatever order and grouping the numbers come: kept as partial sums without error.

So the mean of an evaluation has the same bits in every world. Pure.
"""

from __future__ import annotations

import math

MOST_PARTS = 4
"""Far more than numbers of one kind need (two or three); what is wider loses its lowest bits."""


def add(parts: list[float], value: float) -> None:
    """Adds a number, in place. `parts`: what they add up to exactly; they do not overlap (Shewchuk)."""
    if not math.isfinite(value) or not all(map(math.isfinite, parts)):
        parts[:] = [sum(parts) + value]
        return
    kept = []
    for part in parts:
        large, small = (value, part) if abs(value) >= abs(part) else (part, value)
        value = large + small
        if rest := small - (value - large):
            kept.append(rest)
    parts[:] = [*kept, value][-MOST_PARTS:]


def total(parts: list[float]) -> float:
    """The sum, rounded once."""
    return math.fsum(parts) if all(map(math.isfinite, parts)) else sum(parts)
