"""Cells: as many as the rarest coordinate allows; who belongs together stays together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from rule import Edit, holds, rule
from shoal_controller.core.planning.cells import Cell, pair, share_among

Parts = Sequence[Sequence[int]]


@dataclass
class Trainers:
    """Those who are left of some cells, and others."""

    lines: list[list[int]]
    """By coordinate."""
    hosts: list[str]
    before: list[list[int]]

    def paired(self, tight_parts: Parts = ()) -> list[Cell]:
        return pair(self.lines, self.hosts, self.before, tight_parts)

    @property
    def whole(self) -> list[Cell]:
        return [tuple(cell) for cell in self.before if len(cell) == len(self.lines)]


@st.composite
def trainers(draw: st.DrawFn) -> Trainers:
    """Any world of 1 to 4 coordinates after any losses."""
    coordinates, cells = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    seats = [n % coordinates for n in range(coordinates * cells)]
    seats += draw(st.lists(st.integers(0, coordinates - 1), max_size=8))
    hosts = draw(st.lists(st.sampled_from("pqr"), min_size=len(seats), max_size=len(seats)))
    if draw(st.booleans()):
        hosts = [f"h{n // coordinates}" for n in range(len(seats))]
    age = draw(st.permutations(range(len(seats))))
    left = sorted(draw(st.sets(st.sampled_from(age)))) if seats else []
    lines = [[worker for worker in left if seats[age[worker]] == coordinate] for coordinate in range(coordinates)]
    by_seat = {age[worker]: worker for worker in left}
    before = [
        [by_seat[n] for n in range(cell * coordinates, (cell + 1) * coordinates) if n in by_seat]
        for cell in range(cells)
    ]
    return Trainers(lines, [hosts[age[worker]] for worker in range(len(seats))], before if coordinates > 1 else [])


@rule(
    "There are as many cells as the rarest coordinate has trainers; cells that are whole stay, and of the broken ones "
    "that of which most is left keeps its survivors together",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.planning.cells",
            "    whole = [tuple(cell) for cell in left if len(cell) == len(trainers)]\n",
            "    whole: list[Cell] = []\n",
        ),
        Edit(
            "shoal_controller.core.planning.cells",
            "        for survivors in sorted(broken, key=len, reverse=True):\n",
            "        for survivors in sorted(broken, key=len):\n",
        ),
        Edit("shoal_controller.core.planning.cells", "free.within_hosts(), free.over_hosts())", "free.within_hosts())"),
    ],
)
@settings(max_examples=examples(300), deadline=None)
@given(trainers())
def test_all_cells_that_there_can_be_are_made_and_who_trained_together_goes_on_so(world: Trainers) -> None:
    cells = world.paired()
    assert len(cells) == min(map(len, world.lines))
    assert max(Counter(worker for cell in cells for worker in cell).values(), default=1) == 1
    assert all(worker in line for cell in cells for worker, line in zip(cell, world.lines, strict=True))
    assert cells[: len(world.whole)] == world.whole
    broken = [cell for cell in world.before if 1 < len(cell) < len(world.lines)]
    if broken and len(cells) > len(world.whole):
        most = max(broken, key=len)
        assert any(set(most) <= set(cell) for cell in cells), "the survivors of a broken cell"


@settings(max_examples=examples(150), deadline=None)
@given(trainers())
def test_tight_cells_lie_within_hosts_and_each_host_makes_all_that_it_can(world: Trainers) -> None:
    cells = world.paired([range(len(world.lines))])
    assert cells[: len(world.whole)] == world.whole
    made = cells[len(world.whole) :]
    assert all(len({world.hosts[worker] for worker in cell}) == 1 for cell in made)
    taken = {worker for cell in world.whole for worker in cell}
    for host in set(world.hosts):
        free = [sum(world.hosts[w] == host and w not in taken for w in line) for line in world.lines]
        assert sum(world.hosts[cell[0]] == host for cell in made) == min(free)


@rule(
    "In a new cell the processes at coordinates of one tight part are on one host, and its parts may be on different "
    "ones; there are as many cells as the rarest part allows",
    "A change of the world",
    broken_by=[
        Edit("shoal_controller.core.planning.cells", "of_part, tight=True)", "of_part, tight=False)"),
        Edit("shoal_controller.core.planning.cells", "kept, tight=False)", "kept, tight=True)"),
        Edit("shoal_controller.core.planning.cells", "            mine.extend(found)\n", "            pass\n"),
    ],
)
@settings(max_examples=examples(300), deadline=None)
@given(trainers(), st.data())
def test_parts_that_are_tight_lie_within_hosts_and_make_all_cells_that_they_can(
    world: Trainers, data: st.DataObject
) -> None:
    coordinates = range(len(world.lines))
    of = data.draw(st.lists(st.integers(0, 2), min_size=len(coordinates), max_size=len(coordinates)))
    parts = [part for n in range(3) if (part := [c for c in coordinates if of[c] == n])]
    place = {worker: coordinate for coordinate, line in enumerate(world.lines) for worker in line}

    def lies_well(cell: Sequence[int]) -> bool:
        return all(len({world.hosts[worker] for worker in cell if place[worker] in part}) < 2 for part in parts)

    world.before = [cell for cell in world.before if lies_well(cell)]
    cells = world.paired(parts)
    assert cells[: len(world.whole)] == world.whole
    assert all(lies_well(cell) and [place[worker] for worker in cell] == list(coordinates) for cell in cells)
    assert max(Counter(worker for cell in cells for worker in cell).values(), default=1) == 1
    here = Counter((place[worker], world.hosts[worker]) for worker in place)
    groups = [sum(min(here[c, host] for c in part) for host in set(world.hosts)) for part in parts]
    assert len(cells) == min(groups)


@pytest.mark.parametrize(
    ("lines", "hosts", "before", "cells"),
    [
        ([[0, 4], [1, 5], [2, 6], [3, 7]], "aabbbbaa", [], [(0, 1, 6, 7), (4, 5, 2, 3)]),
        ([[0, 4], [5], [2, 6], [3]], "aabbccdd", [[0, 2, 3], [4, 5, 6]], [(4, 5, 2, 3)]),
        ([[0, 4], [5, 8], [2, 6], [3, 7]], "aabbccdda", [[0, 2, 3], [4, 5, 6, 7]], [(4, 5, 6, 7), (0, 8, 2, 3)]),
        ([[0, 4], [1, 5], [6, 8], [7, 9]], "aabbccddee", [[0, 1], [4, 5, 6, 7]], [(4, 5, 6, 7), (0, 1, 8, 9)]),
        ([[0, 4], [1, 5], [2, 3], [6, 7]], "aabdccbd", [[4, 5, 2, 6]], [(4, 5, 2, 6), (0, 1, 3, 7)]),
        ([[0, 4], [1, 5], [2], [6]], "aabbccb", [[0, 1, 2], [4, 5, 6]], [(0, 1, 2, 6)]),
    ],
    ids=[
        "parts of one host before the oldest",
        "what is left of two cells on four hosts",
        "a process is replaced on its host",
        "a part is replaced on another host",
        "a whole cell first",
        "a part of two cells' survivors goes to the first",
    ],
)
def test_which_tight_parts_come_together(
    lines: list[list[int]], hosts: str, before: list[list[int]], cells: list[Cell]
) -> None:
    assert pair(lines, hosts, before, [(0, 1), (2, 3)]) == cells


@holds("There are as many cells as the rarest")
@pytest.mark.parametrize(
    ("lines", "hosts", "before", "cells"),
    [
        ([[0, 2, 4], [1, 3, 5]], "abcdef", [], [(0, 1), (2, 3), (4, 5)]),
        ([[0, 3, 4], [1, 2, 5]], "aabbab", [], [(0, 1), (3, 2), (4, 5)]),
        ([[0, 2], [1, 3]], "xyyx", [], [(0, 3), (2, 1)]),
        ([[0, 2], [1]], "xyy", [], [(2, 1)]),
        ([[0, 3, 4], [1, 2]], "abcde", [[4, 2]], [(4, 2), (0, 1)]),
        ([[0, 3], [1, 4], [2, 5, 6]], "aaabbbb", [[1, 2], [3, 4, 5]], [(3, 4, 5), (0, 1, 2)]),
        ([[3], [1], [2, 5]], "abcdef", [[1, 2], [3, 5]], [(3, 1, 2)]),
        ([[3, 6], [1, 4], [2, 5]], "abcdefg", [[1, 2], [3, 5]], [(6, 1, 2), (3, 4, 5)]),
        ([[0], [1, 2], [3], [4]], "abcde", [[0, 1], [2, 3, 4]], [(0, 2, 3, 4)]),
    ],
    ids=[
        "the oldest come first",
        "of each host as many as it can",
        "hosts before age",
        "a host that is whole before the oldest",
        "a whole cell first",
        "survivors, then the rest",
        "a broken cell is torn where there is no other way",
        "and is not where there is one",
        "of two broken ones that with most survivors",
    ],
)
def test_who_comes_together(lines: list[list[int]], hosts: str, before: list[list[int]], cells: list[Cell]) -> None:
    assert pair(lines, hosts, before) == cells


def test_cells_on_the_same_hosts_get_lanes_that_are_few_subtrees_together() -> None:
    cells = [(0, 1), (2, 3), (4, 5), (6, 7)]
    domains = [0, 1, 2, 3, 0, 1, 2, 3]
    shared = share_among(cells, 8, [-1] * 4, domains, rounds=False)
    assert shared == {(0, 1): (0, 1), (4, 5): (2, 3), (2, 3): (4, 5), (6, 7): (6, 7)}


def test_cells_beyond_the_lanes_get_none_and_without_a_cell_there_are_none_to_share() -> None:
    assert share_among([(0, 1), (2, 3)], 1, [-1, -1], [0, 1, 2, 3], rounds=True) == {(0, 1): (0,)}
    assert share_among([], 4, [], [0, 1], rounds=False) == {}
