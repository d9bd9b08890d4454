"""Plans of worlds of cells: each coordinate is planned as a job by itself, and full cells share the lanes.

A letter is a process, at the coordinate and on the host that its number says; a host has room for one cell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from planning import World, candidate, partners_of, peers_of, transfers
from rule import Edit, holds, rule
from shoal_controller.core.planning import planner
from shoal_controller.core.planning.planner import (
    BlocksLost,
    Candidate,
    PlanRequest,
    Terms,
    plan_change,
    plan_recovery,
    plan_start,
)
from shoal_controller.core.planning.question import ChangeQuestion, RecoveryQuestion, check_answer
from shoal_protos.errors import PeerError
from shoal_protos.plan import Fill, Plan, Reason, Share
from shoal_protos.runs import NO_BLOCKS, Runs, every, union
from shoal_protos.shape import Shape

LETTERS = "abcdefghijklmnopqrst"


def cells_of(count: int, homes: Sequence[Runs], terms: Terms, common: Runs = NO_BLOCKS) -> World:
    """So many cells, each on a host of its own. `common`: the blocks that all models have."""
    size = len(homes)
    return World(
        replace(terms, homes=tuple(homes), models=tuple(home | common for home in homes)),
        LETTERS[: count * size],
        domains={letter: f"host {number // size}" for number, letter in enumerate(LETTERS)},
        coordinates={letter: number % size for number, letter in enumerate(LETTERS)},
    )


TWO = (Runs(((0, 9),)), Runs(((9, 20),)))
TERMS = Terms(lanes=6, blocks=20, mirrors=1, mirror_partners=4, fill_blocks_per_step=4)


def names(plan: Plan) -> list[str]:
    """The cells, as the letters of their members."""
    return ["".join(plan.members[rank].worker for rank in cell) for cell in plan.cells]


# ---- any life

Act = tuple[str, int]
KINDS = ("join", "kill", "kill host", "drain", "drain host", "fill")
ACTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 99)), min_size=3, max_size=10)


class Life:
    """Acts upon a world of cells. What would take the last one of a coordinate is left."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.joined = len(world.here)

    def live(self, acts: Sequence[Act]) -> None:
        for act, number in acts:
            kind, _, whole = act.partition(" ")
            getattr(self, f"_{kind}")(number, bool(whole))

    def _chosen(self, number: int, whole: bool) -> list[str]:
        """One process, or all of its host."""
        letter = sorted(self.world.here)[number % len(self.world.here)]
        host = self.world.domains[letter]
        return [other for other in self.world.here if other == letter or (whole and self.world.domains[other] == host)]

    def _join(self, _: int, __: bool) -> None:
        if self.joined < len(LETTERS):
            self.world.join(LETTERS[self.joined])
            self.joined += 1

    def _kill(self, number: int, whole: bool) -> None:
        gone = self._chosen(number, whole)
        left = union(known.holds for letter, known in self.world.here.items() if letter not in gone)
        lost = every(self.world.terms.blocks) - left
        if not lost:
            lacking = dict.fromkeys(LETTERS[number % 3 :: 3], NO_BLOCKS)
            self.world.kill(*gone, lanes=dict.fromkeys(LETTERS, 0), current=lacking)
            return
        with pytest.raises(BlocksLost) as raised:
            self.world.kill(*gone)
        homes = self.world.terms.homes
        assert raised.value.blocks == lost
        assert raised.value.coordinates == tuple(c for c, home in enumerate(homes) if home & lost)

    def _drain(self, number: int, whole: bool) -> None:
        gone = self._chosen(number, whole)
        staying = {self.world.coordinates[letter] for letter in self.world.here
                   if letter not in gone and self.world.stays(letter)}  # fmt: skip
        if len(staying) == len(self.world.terms.homes):
            self.world.drain(*gone)

    def _fill(self, number: int, _: bool) -> None:
        self.world.fill(number % (self.world.plan.boundaries + 1))


def parts_of(size: int) -> list[tuple[tuple[int, ...], ...]]:
    """Which coordinates share a host: it is not said, none do, neighbours do, all do."""
    shapes = Shape(size), Shape(2, size // 2, tight=("tensor",)), Shape(size, tight=("tensor",))
    return [(), *(shape.tight_parts for shape in shapes)]


@st.composite
def lives(draw: st.DrawFn) -> Life:
    size = draw(st.sampled_from((2, 2, 4)))
    homes = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=60))
    terms = Terms(
        draw(st.integers(1, 12)), len(homes), draw(st.sampled_from((0, 1, 1, 2))), draw(st.sampled_from((1, 2, 4))),
        draw(st.integers(1, 9)), rounds=draw(st.booleans()), sharded=draw(st.booleans()),
        tight_parts=draw(st.sampled_from(parts_of(size))),
    )  # fmt: skip
    at_home = [Runs.of(block for block, home in enumerate(homes) if home == c) for c in range(size)]
    common = Runs.of(draw(st.sets(st.integers(0, len(homes) - 1))))
    life = Life(cells_of(draw(st.integers(1, 3)), at_home, terms, common))
    life.live(draw(ACTS))
    return life


def alone(plan: Plan, coordinate: int) -> Plan:
    """A coordinate's part of a plan, as the plan of a job by itself: its ranks and blocks are numbered anew."""
    home = plan.homes[coordinate]
    ranks = [rank for rank, member in enumerate(plan.members) if member.coordinate == coordinate]
    number = {rank: at for at, rank in enumerate(ranks)}
    return replace(
        plan,
        lanes=0,
        blocks=len(home),
        members=tuple(replace(plan.members[rank], coordinate=0) for rank in ranks),
        shares=tuple(
            Share(
                (),
                at_home(plan.shares[rank].owned, home),
                at_home(plan.shares[rank].mirrored, home),
                tuple(number[partner] for partner in plan.shares[rank].partners),
                at_home(plan.shares[rank].awaited, home),
            )
            for rank in ranks
        ),
        fills=tuple(
            Fill(number[fill.source], number[fill.target], at_home(fill.blocks, home))
            for fill in plan.fills
            if fill.source in number
        ),
        recovery=plan.recovery
        and replace(
            plan.recovery,
            counted=tuple(plan.recovery.counted[rank] for rank in ranks),
            stale=tuple(at_home(plan.recovery.stale[rank] & home, home) for rank in ranks),
            lanes_in_flight=(),
        ),
        homes=(),
        cells=(),
    )


def at_home(blocks: Runs, home: Runs) -> Runs:
    assert blocks <= home
    return Runs.of(number for number, block in enumerate(home) if block in blocks)


def planned_alone(before: Plan | None, plan: Plan, asked: Sequence[Candidate], terms: Terms, coordinate: int) -> Plan:
    """What the planner says of a job with the candidates and blocks of a coordinate only."""
    home = plan.homes[coordinate]
    one = replace(terms, lanes=16, blocks=len(home), homes=(), models=(), tight_parts=(), rounds=False)
    request = PlanRequest(one, plan.generation, plan.reason)
    candidates = [
        replace(
            known,
            member=replace(known.member, coordinate=0),
            holds=at_home(known.holds & home, home),
            current=at_home(known.current & home, home),
        )
        for known in asked
        if known.member.coordinate == coordinate
    ]
    if before is None:
        return plan_start(request, candidates)
    if plan.recovery is not None:
        return plan_recovery(request, candidates, alone(before, coordinate), plan.recovery.step, b"")
    return plan_change(request, candidates, alone(before, coordinate))


@rule(
    "Each coordinate's blocks are planned as those of a job with its processes only: so a process owns, mirrors and is "
    "filled with blocks of its home only, and no other coordinate's losses move any of them",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.planning.planner",
        "holds=c.holds & terms.homes[c.member.coordinate], lane",
        "holds=c.holds, lane",
    ),
)
@settings(max_examples=examples(60), deadline=None)
@given(lives())
def test_each_coordinate_is_planned_as_a_job_by_itself(life: Life) -> None:
    world = life.world
    for before, plan, asked in zip([None, *world.plans], world.plans, world.asked, strict=False):
        for coordinate, home in enumerate(world.terms.homes):
            if home:
                one = planned_alone(before, plan, asked, world.terms, coordinate)
                found = alone(plan, coordinate)
                assert [replace(share, lanes=()) for share in one.shares] == list(found.shares)
                assert (one.members, one.fills) == (found.members, found.fills)
                assert one.recovery is None or replace(one.recovery, lanes_in_flight=()) == found.recovery


@rule(
    "A recovery hands out all that a process's model lacks, and no more: also blocks that it has in common with other "
    "coordinates, and that are at home there",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.planning.planner",
            "    return terms.models[coordinate] if terms.models else",
            "    return terms.homes[coordinate] if terms.homes else",
        ),
        Edit(
            "shoal_controller.core.planning.planner",
            "    return terms.models[coordinate] if terms.models else every(terms.blocks)\n",
            "    return every(terms.blocks)\n",
        ),
    ],
)
@settings(max_examples=examples(60), deadline=None)
@given(lives())
def test_a_recovery_hands_out_all_that_a_model_lacks_wherever_it_is_at_home(life: Life) -> None:
    world = life.world
    for plan, asked in zip(world.plans[1:], world.asked[1:], strict=True):
        if plan.recovery is None:
            continue
        of = {known.member: known for known in asked}
        for member, share, stale in zip(plan.members, plan.shares, plan.recovery.stale, strict=True):
            lacking = world.terms.models[member.coordinate] - of[member].current - share.keeps
            assert stale == (NO_BLOCKS if world.terms.sharded else lacking)


@holds("There are as many cells as the rarest")
@settings(max_examples=examples(60), deadline=None)
@given(lives())
def test_after_any_life_the_world_comes_to_rest_with_all_cells_that_there_can_be(life: Life) -> None:
    world = life.world
    plan = world.settle()
    world.check_at_rest()
    stay = Counter[tuple[int, str]]()
    for coordinate in range(len(world.terms.homes)):
        here = [letter for letter in world.here if world.coordinates[letter] == coordinate]
        keep = [letter for letter in here if world.stays(letter)] or here[:1]  # of leavers the oldest is the last
        stay.update((coordinate, world.domains[letter]) for letter in keep)
    hosts = {host for _, host in stay}
    parts = world.terms.tight_parts or parts_of(plan.coordinates)[1]
    groups = [sum(min(stay[c, host] for c in part) for host in hosts) for part in parts]
    assert len(plan.cells) == min(world.terms.lanes, *groups)
    assert plan.steps == bool(plan.cells)
    for cell in names(plan):
        assert all(len({world.domains[cell[c]] for c in part}) == 1 for part in parts)


@settings(max_examples=examples(40), deadline=None)
@given(lives())
def test_what_is_kept_at_a_coordinate_at_rest_is_what_would_be_planned_there(life: Life) -> None:
    """As in a large world, which looks for the cheapest place of nothing that is at rest; also where owners are uneven
    and mirrors no partners.
    """
    world = life.world
    rest = world.settle()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "is_small", lambda _: False)
        for before in (*world.plans[-2:], with_another_owner(rest), with_other_partners(rest)):
            request = PlanRequest(world.terms, before.generation + 1, Reason.BALANCE)
            asked = request, list(world.here.values()), before
            patch.setattr(planner, "_as_kept", KEPT)
            kept = plan_change(*asked)
            patch.setattr(planner, "_as_kept", lambda *_: None)
            assert kept == plan_change(*asked)


KEPT = planner._as_kept


def with_another_owner(plan: Plan) -> Plan:
    """The first owner's blocks are owned by their mirror."""
    shares = list(plan.shares)
    given = shares[0].owned
    for rank, share in enumerate(shares[1:], 1):
        taken = given & share.mirrored
        shares[rank] = replace(share, owned=share.owned | taken, mirrored=share.mirrored - taken)
        shares[0] = replace(shares[0], owned=shares[0].owned - taken, mirrored=shares[0].mirrored | taken)
        given -= taken
    return replace(plan, shares=tuple(shares))


def with_other_partners(plan: Plan) -> Plan:
    """Each has the others at its coordinate that are no partners of it, where there are some."""
    shares = list(plan.shares)
    for rank, share in enumerate(shares):
        others = set(peers_of(plan, rank)) - {rank, *partners_of(plan, rank)}
        shares[rank] = replace(share, partners=tuple(sorted(others)) or share.partners)
    return replace(plan, shares=tuple(shares))


# ---- single losses


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(2, 4), st.sampled_from((2, 4)), st.integers(0, 99), st.booleans())
def test_a_host_that_is_a_cell_costs_no_block_and_leaves_the_other_cells_as_they_are(
    cells: int, size: int, number: int, drains: bool
) -> None:
    homes = [Runs(((c * 10, c * 10 + 10),)) for c in range(size)]
    world = cells_of(cells, homes, replace(TERMS, blocks=10 * size))
    before, gone = names(world.plan), number % cells
    host = LETTERS[gone * size : (gone + 1) * size]
    plan = world.drain(*host) if drains else world.kill(*host)
    assert names(plan) == [cell for cell in before if cell != host]
    assert bool(transfers(plan)) == (cells > 2), "the copies that are missing, where there can be some"
    world.settle()
    world.check_at_rest()


def test_two_cells_that_break_at_different_coordinates_become_one_and_two_joiners_make_it_two_again() -> None:
    world = cells_of(3, TWO, TERMS)
    assert names(world.plan) == ["ab", "cd", "ef"]
    assert names(world.kill("b", "c")) == ["ef", "ad"]
    world.settle()
    assert names(world.join("h")) == ["ef", "ad"], "a spare one"
    assert names(world.join("g")) == ["ef", "ad", "gh"]


def test_the_cell_of_a_process_that_drains_takes_a_spare_one_in_its_place() -> None:
    world = cells_of(2, TWO, TERMS)
    world.join("f")
    assert names(world.settle()) == ["ab", "cd"]
    plan = world.drain("b")
    assert names(plan) == ["cd", "af"]
    assert "b" in plan.workers and "b" not in world.settle().workers


def test_the_last_process_of_a_coordinate_that_drains_trains_on_until_there_is_another() -> None:
    world = cells_of(1, TWO, TERMS)
    assert names(world.drain("b")) == ["ab"]
    assert names(world.join("d")) == ["ad"]
    world.fill()
    assert world.promote().workers == {"a", "d"}


@rule(
    "Where no cell is full no step runs: all members are standbys, which keep their blocks until there is a cell again",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.planning.planner",
        "        steps=terms.steps and bool(world.cells),\n",
        "        steps=terms.steps,\n",
    ),
)
def test_without_a_full_cell_all_are_standbys_and_no_step_runs() -> None:
    world = cells_of(2, TWO, replace(TERMS, tight_parts=((0, 1),)))
    plan = world.kill("a", "d")
    assert (plan.cells, plan.trainers, plan.steps) == ((), (), False)
    assert union(share.owned for share in plan.shares) == every(20)
    world.domains = {**world.domains, "e": world.domains["b"]}
    plan = world.join("e")
    assert names(plan) == ["eb"] and plan.steps


def test_spare_processes_keep_blocks_and_get_no_lanes() -> None:
    world = cells_of(2, TWO, TERMS)
    world.join("e")
    plan = world.settle()
    spare = plan.shares[plan.world_size - 1]
    assert spare.lanes == () and len(spare.owned) == 3 and spare.mirrored


@rule(
    "No lane in flight is kept where a lane has several processes: its members may be at different places in it",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.planning.planner", "c.member.coordinate], lane=NONE_IN_FLIGHT)", "c.member.coordinate])"
    ),
)
@pytest.mark.parametrize("rounds", [False, True])
def test_no_lane_in_flight_is_kept_in_a_cell(rounds: bool) -> None:
    worlds = [cells_of(3, TWO, replace(TERMS, rounds=rounds)) for _ in range(2)]
    in_flight = worlds[0].kill("b", lanes={"a": 0, "c": 3, "d": 1, "e": 4, "f": 5})
    assert in_flight == worlds[1].kill("b")
    assert in_flight.recovery is not None
    assert set(in_flight.recovery.lanes_in_flight) == ({-1} if rounds else set())


@holds("Each coordinate's blocks")
@holds("A recovery hands out all")
@settings(max_examples=examples(30), deadline=None)
@given(lives())
def test_a_start_from_a_checkpoint_reads_each_block_at_its_home(life: Life) -> None:
    world = life.world
    candidates = [replace(known, leaving=False) for known in world.here.values()]
    plan = plan_start(PlanRequest(world.terms, 99, Reason.RESTORE), candidates, 7, "checkpoint-7")
    assert plan.recovery is not None
    for member, share, stale in zip(plan.members, plan.shares, plan.recovery.stale, strict=True):
        assert share.owned <= plan.homes[member.coordinate]
        model = world.terms.models[member.coordinate]
        assert stale == (NO_BLOCKS if world.terms.sharded else model - share.owned)


# ---- answers


def change() -> ChangeQuestion:
    world = cells_of(2, TWO, TERMS)
    here = tuple(world.here.values())
    return ChangeQuestion(PlanRequest(world.terms, 2, Reason.BALANCE), here, world.plan)


@holds("One question to the planner is out")
def test_an_answer_with_other_homes_or_a_cell_too_few_is_refused() -> None:
    question = change()
    plan = plan_change(question.request, question.candidates, question.before)
    check_answer(question, plan)
    others = replace(
        question, request=replace(question.request, terms=replace(question.request.terms, homes=TWO[::-1]))
    )
    with pytest.raises(PeerError, match="its homes are not those of the job"):
        check_answer(others, plan)
    lanes = [(0, 1, 2, 3, 4, 5)] * 2 + [()] * 2
    shares = tuple(replace(share, lanes=mine) for share, mine in zip(plan.shares, lanes, strict=True))
    with pytest.raises(PeerError, match="it leaves c, d without lanes, which are a cell"):
        check_answer(question, replace(plan, shares=shares, cells=plan.cells[:1]))


def test_blocks_are_lost_only_where_nobody_holds_them_at_their_home() -> None:
    world = cells_of(1, TWO, TERMS)
    left = (candidate("a", holds=every(20)),)
    question = RecoveryQuestion(PlanRequest(world.terms, 2, Reason.KILL), left, world.plan, 7, b"")
    check_answer(question, TWO[1])
    with pytest.raises(PeerError, match="the planner says that nobody holds"):
        check_answer(question, TWO[0])
    with pytest.raises(BlocksLost, match=r"11 of 20 blocks have no live copy, at home at coordinate 1: Runs\(9-19\)\."):
        plan_recovery(question.request, left, world.plan, 7, b"")
