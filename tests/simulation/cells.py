"""Jobs whose lanes are trained by several processes together: their shapes, sizes, homes and models, as a seed has
them.

Drawn apart from the rest, and only where a simulation is asked for cells: a job of one process a cell goes as it did
before there were others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from random import Random

from shoal_protos.runs import Runs
from shoal_protos.shape import ONE, Shape

SHAPES = {
    "": ONE,
    "2": Shape(tensor=2),
    "2x2": Shape(tensor=2, pipeline=2),
    "2x2 tight": Shape(tensor=2, pipeline=2, tight=("tensor",)),
}
DRAWN = "drawn"
MOST_CELLS = 3


def shape_of(seed: int, name: str) -> Shape:
    """Of a name in `SHAPES`, or drawn."""
    return SHAPES[Random(f"{seed} cell").choice(("2", "2x2")) if name == DRAWN else name]


def full_cells_of(members: Iterable[tuple[int, str]], cell: Shape) -> int:
    """How many cells these make, each a coordinate and a host."""
    here = Counter(members)
    hosts = {host for _, host in here} if cell.tight else {""}
    here = here if cell.tight else Counter((coordinate, "") for coordinate, _ in here.elements())
    return min(sum(min(here[place, host] for place in part) for host in hosts) for part in cell.tight_parts)


class Hosts:
    """The machine of every process: so many are on one, a cell's processes at least. If dimensions are tight, those
    that must share one do, and no others; a launcher that starts processes has one for all.
    """

    def __init__(self, cell: Shape, launcher: str, on_a_host: int) -> None:
        self._cell, self._launcher, self._on_a_host = cell, launcher, max(cell.processes, on_a_host)
        self._taken: dict[int, int] = {}
        """By pid, where dimensions are tight."""

    def take(self, pid: int, here: Iterable[int]) -> None:
        """A process starts beside these: on the first host that has room."""
        if self._cell.tight:
            taken, room = Counter(self._taken[other] for other in here), len(self._cell.tight_parts[0])
            found = next(host for host in count() if taken[host] < room)
            self._taken[pid] = found if self._launcher == "none" else 0

    def number(self, pid: int) -> int:
        """The first host is 1."""
        return self._taken.get(pid, (pid - 1) // self._on_a_host) + 1

    def port(self, pid: int) -> int:
        """No other process of the host has it."""
        return pid if pid in self._taken else (pid - 1) % self._on_a_host + 1


@dataclass(frozen=True)
class Sizes:
    """How many processes a job wants, needs and may have, and how many lanes it has."""

    wanted: int
    least: int
    most: int
    lanes: int


def sizes_of(drawn: Sizes, seed: int, cell: Shape) -> Sizes:
    """What was drawn; where a cell has several processes, whole cells, now and then with a spare process."""
    if cell == ONE:
        return drawn
    chance, processes = Random(f"{seed} cells"), cell.processes
    cells = chance.randint(1, MOST_CELLS)
    spare = chance.choice((0, 0, 1)) if cells < MOST_CELLS else 0
    least = min(chance.choice((1, 1, 2)), cells)
    lanes = chance.randint(MOST_CELLS, 2 * MOST_CELLS)
    return Sizes(cells * processes + spare, least * processes, MOST_CELLS * processes, lanes)


def homes_of(blocks: int, cell: Shape) -> tuple[Runs, ...]:
    """Most blocks are a coordinate's own; the last quarter is what all coordinates have, dealt to them by number."""
    if cell == ONE:
        return ()
    common = _common(blocks)
    home = [block % cell.processes if block in common else block * cell.processes // blocks for block in range(blocks)]
    return tuple(Runs.of(b for b in range(blocks) if home[b] == coordinate) for coordinate in cell.coordinates)


def models_of(blocks: int, homes: tuple[Runs, ...]) -> tuple[Runs, ...]:
    """The model of each coordinate: its home, and all that they have in common."""
    common = Runs.of(_common(blocks))
    return tuple(home | common for home in homes)


def homes_and_models_of(blocks: int, cell: Shape) -> tuple[tuple[Runs, ...], tuple[Runs, ...]]:
    """Both, by coordinate."""
    homes = homes_of(blocks, cell)
    return homes, models_of(blocks, homes)


def _common(blocks: int) -> range:
    return range(blocks - blocks // 4, blocks)
