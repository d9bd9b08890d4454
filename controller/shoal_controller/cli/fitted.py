"""Tables and lines that fit the terminal: the least needed columns are left out, sentences move below the table.

Used by tables.py and display.py, which make the rows. From texts to rich; nothing here knows jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table

LEAST_SENTENCE = 40
"""Least width of a column of sentences; with less room the sentences move below the table."""
UNBOUNDED = 1 << 16
"""A width that no row reaches."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; its cells are rich markup."""

    name: str
    cells: Sequence[str]
    spare: int = 0
    """Rank by which columns are left out, the highest first; 0: never."""
    is_number: bool = False


class Fitted:
    """A table whose first column names its rows, and sentences about the rows."""

    def __init__(self, columns: Sequence[Column], sentences: Sequence[Column] = ()) -> None:
        self._columns, self._sentences = list(columns), list(sentences)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        whole, room = [*self._columns, *self._sentences], options.max_width
        longest = [max((_width(cell, console) for cell in column.cells), default=0) for column in self._sentences]
        beside = sum(min(length, LEAST_SENTENCE) + 2 for length in longest)
        if _natural(self._columns, console, options) + beside <= room:
            yield _table(whole, folded=self._sentences)
            return
        kept = list(self._columns)
        while _natural(kept, console, options) > room and (spare := max(kept, key=lambda one: one.spare)).spare:
            kept.remove(spare)
        yield _table(kept)
        for row, name in enumerate(self._columns[0].cells):
            for sentence in filter(None, (column.cells[row] for column in self._sentences)):
                yield console.render_str(f"{name}: {sentence}")


class OneLine:
    """Parts of a line, each with its rank as in `Column.spare`."""

    def __init__(self, *parts: tuple[int, str]) -> None:
        self._parts = [(spare, text) for spare, text in parts if text]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        kept = list(self._parts)
        while _width(_joined(kept), console) > options.max_width and len(kept) > 1:
            kept.remove(max(kept, key=lambda one: one[0]))
        line = console.render_str(_joined(kept), overflow="ellipsis")
        line.no_wrap = True
        yield line


def _table(columns: Sequence[Column], folded: Sequence[Column] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(
            column.name,
            justify="right" if column.is_number else "left",
            no_wrap=bool(folded) and column not in folded,
            overflow="fold",
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table


def _natural(columns: Sequence[Column], console: Console, options: ConsoleOptions) -> int:
    """Return the width at which no cell of the table is cut."""
    return Measurement.get(console, options.update_width(UNBOUNDED), _table(columns)).maximum


def _joined(parts: Sequence[tuple[int, str]]) -> str:
    return "   ".join(text for _, text in parts)


def _width(markup: str, console: Console) -> int:
    return cell_len(console.render_str(markup).plain)
