"""How figures are shown: a Markdown table with medians, spread and number of samples, ratios and a verdict."""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import median


def spread(values: Sequence[float], digits: int = 3) -> str:
    """`median (min–max, n)`."""
    if not values:
        return "–"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f}, n {len(values)})"


def verdict(value: float, target: float) -> str:
    """Whether a figure is within its target, and by how much where it is not."""
    return f"within {target:g}" if value <= target else f"**misses {target:g}** by {value - target:.3f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table under its title, with how busy the machine is: a figure of a loaded machine is not a figure."""
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"\n### {title}\n\n{table(head, rows)}\n\nload 1, 5, 15 min: {load} on {os.cpu_count()} cores", flush=True)
