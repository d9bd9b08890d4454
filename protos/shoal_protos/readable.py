"""Numbers and times as people write them, for both sides. Pure."""

from __future__ import annotations

LEAST_PLAIN, MOST_PLAIN = 1e-4, 1e9
"""Range of the numbers that are written without an exponent."""
EXACT = 10
"""From 10 days, hours or minutes on, the smaller unit is left out."""


def number(value: float | None, digits: int = 4) -> str:
    """Return a value with `digits` significant digits: 28.93, 1760, 0.00012."""
    if value is None:
        return "–"
    rounded = float(f"{value:.{digits}g}")
    if not LEAST_PLAIN <= abs(rounded) < MOST_PLAIN:  # also for zero and nan
        return f"{rounded:.{digits}g}"
    return f"{rounded:.{digits + 4}f}".rstrip("0").rstrip(".")


def duration(seconds: float) -> str:
    """Return rounded seconds: "42 s", "3 min 20 s", "19 min", "2 h 5 min", "3 d 4 h"."""
    whole = round(seconds)
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = f" {whole % size // part} {smaller}" if whole < EXACT * size else ""
            return f"{whole // size} {unit}{rest}"
    return f"{whole} s"
