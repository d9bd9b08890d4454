"""How figures are shown: a Markdown table with medians, spread and number of samples, ratios and a verdict.

What a benchmark has to say for README.md it notes as a `Figure` (what it is judged by) or a `Cell` (what a copy costs),
beside what it prints. bench.py reads these, so nobody reads prose.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

FIGURES = "BENCH_FIGURES"
"""The variable that names the file for what is noted. Without it nothing is."""


@dataclass(frozen=True)
class Figure:
    """A row of README.md's table: what was measured, judged by the median."""

    measured: str
    settings: str
    values: Sequence[float]
    target: float | None = None
    """The most that it may be; None: nothing is asked of it."""
    mirrors: int = 1
    """Other numbers than the default are named, below the rows of the default."""
    digits: int = 3

    @property
    def text(self) -> str:
        return spread(self.values, self.digits) if len(self.values) > 1 else f"{self.values[0]:.{self.digits}f}"

    @property
    def verdict(self) -> str:
        return "" if self.target is None else verdict(median(self.values), self.target)


@dataclass(frozen=True)
class Cell:
    """A figure of README.md's table of what a copy costs; several notes of one cell are one sample."""

    way: str
    mirrors: int | None
    """None: this way has no copies."""
    column: str
    values: Sequence[float]
    target: float | None = None
    digits: int = 3


KINDS: dict[str, type[Figure | Cell]] = {"figure": Figure, "cell": Cell}


def note(*rows: Figure | Cell) -> None:
    """Append them to the file that `FIGURES` names, a line of JSON each."""
    if place := os.environ.get(FIGURES):
        with Path(place).open("a") as file:
            file.writelines(json.dumps({"kind": type(row).__name__.lower(), **asdict(row)}) + "\n" for row in rows)


def noted(place: Path) -> list[Figure | Cell]:
    """What was noted there, in order; nothing where there is no file."""
    lines = [json.loads(line) for line in place.read_text().splitlines()] if place.exists() else []
    return [KINDS[line.pop("kind")](**line) for line in lines]


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
