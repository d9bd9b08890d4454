"""Cells: which processes train lanes together, one at each coordinate.

Any choice of one process at each coordinate is a cell, and no byte moves when cells are paired anew. So there are as
many as the rarest coordinate allows, and only habit decides among them: a cell that is whole stays, survivors of one
stay together, processes of a host come together, and the oldest come first. In a shape of one process each is a cell.
Coordinates that must share a host (a tight part) are paired within hosts first, and what comes of that like processes.
Called by planner.py; workers are its indexes, oldest first. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from shoal_controller.core.planning.lanes import Lanes, Paces, share_lanes, share_rounds

Cell = tuple[int, ...]
"""Workers, by coordinate."""


def pair(
    trainers: Sequence[Sequence[int]],
    hosts: Sequence[str],
    before: Iterable[Sequence[int]],
    tight_parts: Sequence[Sequence[int]] = (),
) -> list[Cell]:
    """As many full cells as there can be: those that are whole in their order, then new ones, the oldest first.

    `trainers` is by coordinate, oldest first, `hosts` by worker. `before` has the trainers that are left of each cell,
    by coordinate. `tight_parts`: all coordinates, by those of which a new cell has processes of one host; empty where
    each is for itself.
    """
    if all(len(part) == 1 for part in tight_parts):
        return _pair(trainers, hosts, list(before), tight=False)
    place = {worker: coordinate for coordinate, line in enumerate(trainers) for worker in line}
    left = sorted(before, key=len, reverse=True)  # whole ones first, in their order
    kept: list[list[int]] = [[] for _ in left]
    groups: dict[int, Cell] = {}
    lines: list[list[int]] = []
    for part in tight_parts:
        of_part = [[worker for worker in cell if place[worker] in part] for cell in left]
        made = _pair([trainers[coordinate] for coordinate in part], hosts, of_part, tight=True)
        groups.update((min(group), group) for group in made)
        lines.append(sorted(map(min, made)))
        for mine, found in zip(kept, _those_with(of_part, made), strict=True):
            mine.extend(found)
    cells = _pair(lines, hosts, kept, tight=False)
    members = (chain.from_iterable(groups[oldest] for oldest in cell) for cell in cells)
    return [tuple(sorted(cell, key=place.__getitem__)) for cell in members]


def _those_with(survivors: Iterable[Sequence[int]], groups: Iterable[Cell]) -> Iterator[list[int]]:
    """For each former cell, the group that has all of its survivors, found by the oldest; nothing where there is none.
    Of two cells the first one gets the group.
    """
    group_of = {worker: group for group in groups for worker in group}
    given = {Cell()}
    for left in survivors:
        found = {group_of.get(worker, ()) for worker in left}
        mine = found - given if len(found) == 1 else set[Cell]()
        given |= mine
        yield list(map(min, mine))


def _pair(
    trainers: Sequence[Sequence[int]], hosts: Sequence[str], left: Sequence[Sequence[int]], *, tight: bool
) -> list[Cell]:
    """The same of coordinates that are alike. `tight`: new cells are each within one host."""
    whole = [tuple(cell) for cell in left if len(cell) == len(trainers)]
    free = _Free(trainers, hosts, tight)
    for cell in whole:
        free.take(cell)
    broken = [cell for cell in left if 1 < len(cell) < len(trainers)]
    made = chain(free.mended(broken), free.within_hosts(), free.over_hosts())
    return whole + sorted(made, key=min)


class _Free:
    """Trainers that are in no cell yet. The dicts have no values: their keys stay in order, and go at once."""

    def __init__(self, trainers: Sequence[Sequence[int]], hosts: Sequence[str], tight: bool) -> None:
        self._hosts = hosts
        self._tight = tight
        self._lines = [dict.fromkeys(line) for line in trainers]
        """By coordinate."""
        self._at: dict[str, list[dict[int, None]]] = {}
        """The same of each host."""
        self._coordinate: dict[int, int] = {}
        for coordinate, line in enumerate(trainers):
            for worker in line:
                self._coordinate[worker] = coordinate
                self._at.setdefault(hosts[worker], [{} for _ in trainers])[coordinate][worker] = None
        self._promised: set[int] = set()
        """Survivors of cells that are still to be mended."""

    def take(self, cell: Cell) -> Cell:
        for coordinate, worker in enumerate(cell):
            del self._lines[coordinate][worker], self._at[self._hosts[worker]][coordinate][worker]
        return cell

    def mended(self, broken: Sequence[Sequence[int]]) -> Iterator[Cell]:
        """One cell with all survivors of each broken one, as long as there are others for it. Those of whom most are
        left come first."""
        self._promised.update(chain.from_iterable(broken))
        for survivors in sorted(broken, key=len, reverse=True):
            self._promised.difference_update(survivors)
            if all(worker in self._lines[self._coordinate[worker]] for worker in survivors):
                yield from self._completed(survivors)

    def within_hosts(self) -> Iterator[Cell]:
        """All that the processes of one host make up by themselves."""
        for lines in self._at.values():
            while all(lines):
                yield self.take(tuple(next(iter(line)) for line in lines))

    def over_hosts(self) -> Iterator[Cell]:
        """All others, of processes of as few hosts as the oldest finds."""
        while all(self._lines) and not self._tight:
            yield from self._completed([min(next(iter(line)) for line in self._lines)])

    def _completed(self, survivors: Sequence[int]) -> Iterator[Cell]:
        """The cell of these and of others, from their hosts where that can be; or none."""
        cell = {self._coordinate[worker]: worker for worker in survivors}
        hosts = dict.fromkeys(self._hosts[worker] for worker in survivors)
        for coordinate in range(len(self._lines)):
            if coordinate not in cell and (found := self._next(coordinate, hosts)) is not None:
                cell[coordinate] = found
                hosts[self._hosts[found]] = None
        if len(cell) == len(self._lines) and not (self._tight and len(hosts) > 1):
            yield self.take(tuple(cell[coordinate] for coordinate in range(len(cell))))

    def _next(self, coordinate: int, hosts: Iterable[str]) -> int | None:
        """Somebody at a coordinate, of these hosts if it can be. No broken cell is torn while there is another way."""
        lines = [self._at[host][coordinate] for host in hosts]
        if not self._tight:
            lines.append(self._lines[coordinate])
        others = (worker for line in lines for worker in line if worker not in self._promised)
        return next(chain(others, chain.from_iterable(lines)), None)


def share_among(
    cells: Sequence[Cell], lanes: int, flights: Sequence[int], domains: Sequence[int], rounds: bool, paces: Paces = ()
) -> dict[Cell, Lanes]:
    """The lanes of each cell that gets some. `flights`, the lanes in flight, is by cell, `domains` and `paces` by
    worker; a cell is as fast as its slowest member, and with a pace of 0 among them lanes are shared evenly. No cell of
    several is without lanes for its speed.

    Cells whose members are in the same domains stand together: those add up what they send to other domains.
    """
    if not cells:
        return {}
    sites: dict[Cell, int] = {}
    of_cells = [sites.setdefault(tuple(domains[worker] for worker in cell), len(sites)) for cell in cells]
    by_speed = [max(paces[worker] for worker in cell) for cell in cells] if paces and all(paces) else ()
    share = share_rounds if rounds else share_lanes
    shares = share(lanes, flights, of_cells, by_speed, int(len(cells[0]) > 1))
    return {cell: mine for cell, mine in zip(cells, shares, strict=True) if mine}
