"""Parts of a cell that must share a host: who is admitted to complete one, and who gives way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from cells_driver import OF_PAIRS, PAIR, SQUARE, Pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from rule import Edit, holds, rule
from shoal_controller.core.planning.seats import Seated, first_to_give_way, with_room
from shoal_protos.messages import MemberState

TIGHT = replace(PAIR, tight=("tensor",))


@rule(
    "Where a tight part lacks a process on its host and one is ready to join, it is admitted before others; where its "
    "coordinate has no room, a member there that is in no such part is drained for it",
    "Cells",
    broken_by=[
        Edit("shoal_controller.core.planning.seats", "key=lambda one: one not in chosen", "key=lambda one: False"),
        Edit(
            "shoal_controller.core.planning.seats",
            "if one in chosen and counts[one.coordinate] >= each)",
            "if counts[one.coordinate] >= each)",
        ),
        Edit("shoal_controller.core.planning.seats", "in reversed(members) if one not in chosen)", "in members)"),
        Edit("shoal_controller.core.planning.seats", "key=lambda group: len(new.intersection(group))", "key=len"),
        Edit(
            "shoal_controller.core.machine.phases.planned_changes",
            "    _make_room(turn, world)\n    joiners =",
            "    joiners =",
        ),
    ],
)
def test_a_member_without_a_partner_on_its_host_gives_way_to_one_that_has_one() -> None:
    job = Pairs(wanted=2, made_of=replace(OF_PAIRS, cell=TIGHT, lanes=1))
    for number, (coordinate, host) in enumerate(((0, "a"), (1, "b"))):
        job.hello(f"w{number}", coordinate=coordinate, host=host)
    job.recover()
    assert job.job.durable.current is not None and not job.job.durable.current.cells
    for worker, host in (("w2", "c"), ("w3", "a")):
        job.hello(worker, coordinate=1, host=host)
        job.beat(worker, state=MemberState.WAITING)
        assert job.leaving == ([] if worker == "w2" else ["w1"])
    assert job.job.durable.roster["w1"].leaving_because == (
        "worker w3 completes a part of a cell on a, and needs its place"
    )
    job.joins("w3")
    assert job.job.durable.current.workers_of_cells == [("w0", "w3")]


@holds("Where a tight part lacks a process on its host")
def test_nobody_gives_way_for_a_part_of_which_there_is_one_for_each_cell() -> None:
    """A second pair of the first stage is of no use while there is one of the other stage."""
    cell = replace(SQUARE, tight=("tensor",))
    line = [(0, "a"), (0, "b"), (1, "b"), (1, "c"), (2, "b"), (3, "b")]
    members = [Seated(f"w{age}", *one) for age, one in enumerate(line)]
    assert first_to_give_way(cell, [Seated("w6", 1, "a")], members, each=2) is None
    both = [Seated("w6", 1, "a"), Seated("w7", 2, "c"), Seated("w8", 3, "c")]
    assert first_to_give_way(cell, both, members, each=2) == (both[0], members[3])


@holds("Where a tight part lacks a process on its host")
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.booleans()), max_size=24), st.integers(1, 3))
@settings(max_examples=examples(200), deadline=None, derandomize=True, database=None)
def test_members_give_way_until_there_are_as_many_cells_as_those_present_can_make(
    drawn: list[tuple[int, str, bool]], each: int
) -> None:
    cell = replace(SQUARE, tight=("tensor",))
    everybody = [Seated(f"w{age}", coordinate, host) for age, (coordinate, host, _) in enumerate(drawn)]
    members: list[Seated] = []
    for one, (coordinate, _, is_member) in zip(everybody, drawn, strict=True):
        if is_member and sum(other.coordinate == coordinate for other in members) < each:
            members.append(one)
    left: list[Seated] = []
    before = cells_of(members)
    for _ in drawn:
        joiners = [one for one in everybody if one not in members and one not in left]
        if (found := first_to_give_way(cell, joiners, members, each)) is not None:
            members.remove(found[1])
            left.append(found[1])
            assert cells_of(members) == before, "nobody gives way who is in a cell"
        admitted = with_room(cell, joiners, members, each)
        members += [one for one in joiners if one.worker in admitted]
        before = cells_of(members)
    assert before == min(each, cells_of(everybody))
    assert all(sum(one.coordinate == coordinate for one in members) <= each for coordinate in range(4))


def cells_of(line: Sequence[Seated]) -> int:
    """How many cells of a square these make whose pairs are each on one host."""
    counts = Counter((one.coordinate, one.host) for one in line)
    return min(sum(min(counts[place, host] for place in part) for host in "abc") for part in ((0, 1), (2, 3)))
