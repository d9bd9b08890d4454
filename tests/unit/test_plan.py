"""Plans: every broken invariant is named; all derive the same slices of fills, and every block is in one of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rule import Edit, holds, rule
from shoal_protos.errors import PeerError
from shoal_protos.plan import Fill, Member, Plan, Reason, Recovery, Share, check_plan
from shoal_protos.runs import NO_BLOCKS, Runs, every, union


def runs(start: int, stop: int) -> Runs:
    return Runs(((start, stop),))


ALICE, BOB, CAROL = (Member(worker, f"{worker}.1", f"10.0.0.1:{port}") for port, worker in enumerate("abc"))
PLANNED = Plan(
    generation=5,
    base=4,
    reason=Reason.JOIN,
    lanes=4,
    blocks=12,
    members=(ALICE, BOB, CAROL),
    shares=(Share((0, 1), runs(0, 6), runs(6, 9)), Share((2, 3), runs(6, 12), runs(0, 6)), Share()),
    fills=(Fill(0, 2, runs(0, 4)), Fill(1, 2, runs(8, 12))),
    fill_blocks_per_step=3,
    builder=0,
    steps=True,
)
RECOVERY = Recovery(step=7, record=b"", counted=(True, True, False), stale=(NO_BLOCKS, NO_BLOCKS, every(12)))
AFTER_A_LOSS = replace(PLANNED, base=0, reason=Reason.KILL, recovery=RECOVERY)


DAVE, ERIN, FRED = (
    Member(worker, f"{worker}.1", "10.0.0.1:4", coordinate) for worker, coordinate in (("d", 1), ("e", 0), ("f", 1))
)


def with_share(rank: int, share: Share, plan: Plan = PLANNED) -> Plan:
    return replace(plan, shares=(*plan.shares[:rank], share, *plan.shares[rank + 1 :]))


def with_fills(*fills: Fill) -> Plan:
    return replace(PLANNED, fills=fills)


CELLS = replace(
    PLANNED,
    members=(*(replace(member, coordinate=n % 2) for n, member in enumerate((ALICE, BOB, CAROL))), DAVE, ERIN),
    shares=(
        Share((0, 1), runs(0, 3), runs(3, 4)), Share((2, 3), runs(6, 9), runs(9, 12)), Share((2, 3), runs(3, 6)),
        Share((0, 1), runs(9, 12), runs(6, 9)), Share(),
    ),
    fills=(Fill(0, 2, runs(0, 2)), Fill(2, 4, runs(3, 6))),
    homes=(runs(0, 6), runs(6, 12)),
    cells=((0, 3), (2, 1)),
)  # fmt: skip
"""Two cells of two processes, and a spare one at coordinate 0."""
WITHOUT_A_FULL_CELL = replace(
    CELLS, cells=(), steps=False, shares=tuple(replace(share, lanes=()) for share in CELLS.shares)
)


def test_sound_plans_pass() -> None:
    check_plan(PLANNED)
    check_plan(AFTER_A_LOSS)
    check_plan(CELLS)
    check_plan(WITHOUT_A_FULL_CELL)


@holds("On a shard lanes are added")
@pytest.mark.parametrize(
    ("plan", "broken"),
    [
        (replace(PLANNED, members=(), shares=(), fills=()), "it has no members"),
        (replace(PLANNED, members=(ALICE, BOB, replace(ALICE, incarnation="a.2"))), "a worker is in it twice"),
        (replace(PLANNED, shares=PLANNED.shares[:2]), "it has 2 shares for 3 members"),
        (replace(PLANNED, builder=3), "its builder is rank 3 of 3"),
        (replace(PLANNED, hosts=(0, 0)), "it names 2 hosts for 3 members"),
        (replace(PLANNED, base=5), "it replaces generation 5"),
        (replace(AFTER_A_LOSS, generation=0), "it replaces generation 0"),
        (replace(PLANNED, recovery=RECOVERY), "a plan has either a base or a recovery"),
        (replace(AFTER_A_LOSS, recovery=None), "a plan has either a base or a recovery"),
        (replace(PLANNED, lanes=5), "its lanes are [0, 1, 2, 3], each of 0 to 4 must have exactly one trainer"),
        (with_share(2, Share((3,))), "its lanes are [0, 1, 2, 3, 3], each of 0 to 3 must have exactly one trainer"),
        (with_share(0, replace(PLANNED.shares[0], lanes=(1, 0))), "a member's lanes are not ascending"),
        (with_share(2, Share((), runs(3, 5))), "Runs(3-4) have two owners"),
        (with_share(0, replace(PLANNED.shares[0], mirrored=runs(5, 7))), "rank 0 mirrors its own Runs(5)"),
        (with_share(0, replace(PLANNED.shares[0], mirrored=runs(11, 13))), "rank 0 mirrors blocks beyond 11"),
        (with_share(0, replace(PLANNED.shares[0], partners=(1, 3))), "rank 0 has the partners (1, 3) of 3 members"),
        (with_share(1, replace(PLANNED.shares[1], owned=runs(7, 12))), "Runs(6) have no owner (of 12 blocks)"),
        (replace(PLANNED, fill_blocks_per_step=0), "its fills move 0 blocks a step"),
        (with_fills(Fill(0, 3, runs(0, 1))), "a fill goes from rank 0 to 3 of 3"),
        (with_fills(Fill(-1, 2, runs(0, 1))), "a fill goes from rank -1 to 2 of 3"),
        (with_fills(Fill(0, 2, runs(8, 10))), "rank 0 sends Runs(8-9) without keeping them"),
        (with_fills(Fill(0, 2, NO_BLOCKS)), "rank 0 sends Runs() without keeping them"),
        (with_fills(Fill(0, 1, runs(2, 4))), "rank 1 is sent Runs(2-3), which it keeps already"),
        (with_share(2, Share(awaited=runs(4, 7))), "rank 2 awaits Runs(4-6), which no fill brings"),
        (with_fills(Fill(0, 2, runs(0, 4)), Fill(1, 2, runs(3, 5))), "rank 2 is sent a block twice"),
        (replace(AFTER_A_LOSS, recovery=replace(RECOVERY, step=-1)), "it begins at step -1"),
        (
            replace(AFTER_A_LOSS, recovery=replace(RECOVERY, counted=(True, True))),
            "its recovery does not speak of every member",
        ),
        (
            replace(AFTER_A_LOSS, recovery=replace(RECOVERY, stale=(runs(4, 8), NO_BLOCKS, every(12)))),
            "rank 0 owns Runs(4-5), whose parameters it lacks",
        ),
        (
            replace(AFTER_A_LOSS, recovery=replace(RECOVERY, lanes_in_flight=(0, 2))),
            "its recovery names lanes in flight of some members only",
        ),
        (
            replace(AFTER_A_LOSS, recovery=replace(RECOVERY, lanes_in_flight=(0, 1, -1))),
            "rank 1 has lane 1 in flight, which it does not train",
        ),
        (
            replace(PLANNED, members=(ALICE, BOB, replace(CAROL, coordinate=1))),
            "c is at coordinate 1, its cells have 1",
        ),
        (replace(PLANNED, homes=(every(12),)), "it names a home, though its cells are of one process"),
        (replace(PLANNED, cells=((0,),)), "it has cells, though each is of one process"),
        (replace(CELLS, homes=(runs(0, 6), runs(7, 12))), "Runs(6) have no home"),
        (replace(CELLS, homes=(runs(0, 7), runs(6, 12))), "its homes have 13 blocks, the job has 12"),
        (replace(CELLS, homes=(runs(0, 6), runs(6, 13))), "its homes have 13 blocks, the job has 12"),
        (
            with_share(0, replace(CELLS.shares[0], owned=runs(0, 3) | runs(7, 8)), CELLS),
            "rank 0 keeps Runs(7), whose home is not coordinate 0",
        ),
        (
            with_share(4, Share(mirrored=runs(10, 11)), CELLS),
            "rank 4 keeps Runs(10), whose home is not coordinate 0",
        ),
        (
            with_share(3, replace(CELLS.shares[3], lanes=(0,)), CELLS),
            "its lanes at coordinate 1 are [0, 2, 3], each of 0 to 3 must have exactly one trainer",
        ),
        (replace(WITHOUT_A_FULL_CELL, steps=True), "steps run in it without a full cell"),
        (replace(CELLS, cells=((0, 3), (2, 5))), "cell 1 has the ranks (2, 5) of 5 members"),
        (replace(CELLS, cells=((0, 3), (1, 2))), "cell 1 has members at coordinates [1, 0], it takes one at each of 2"),
        (replace(CELLS, cells=((0, 3), (2,))), "cell 1 has members at coordinates [0], it takes one at each of 2"),
        (replace(CELLS, cells=((0, 1), (2, 3))), "the members of cell 0 have different lanes"),
        (
            replace(
                CELLS, cells=(*CELLS.cells, (4, 5)), members=(*CELLS.members, FRED), shares=(*CELLS.shares, Share())
            ),
            "cell 2 has no lanes",
        ),
        (replace(CELLS, cells=((0, 3), (2, 1), (0, 3))), "rank 0 is in 2 cells"),
        (replace(CELLS, cells=((0, 3),)), "rank 1 trains lanes (2, 3), and is in no cell"),
        (with_share(4, Share(partners=(2, 3)), CELLS), "rank 4 has the partners [3] at other coordinates"),
        (
            replace(CELLS, fills=(Fill(0, 3, runs(0, 1)),)),
            "a fill goes from rank 0 to 3, which is at another coordinate",
        ),
    ],
)
def test_every_broken_invariant_is_named(plan: Plan, broken: str) -> None:
    with pytest.raises(PeerError) as failure:
        check_plan(plan)
    assert f"plan {plan.generation} is unsound: {broken}." in str(failure.value)


def test_a_rank_is_that_of_the_very_process() -> None:
    assert PLANNED.rank_of("b", "b.1") == 1
    assert PLANNED.rank_of("b", "b.2") is None
    assert PLANNED.rank_of("z", "z.1") is None


# ---- slices of fills


@st.composite
def filling(draw: st.DrawFn) -> Plan:
    """Fills of any blocks from two senders to a third, in any pieces and any order."""
    blocks = draw(st.integers(1, 30))
    first = Runs.of(draw(st.frozensets(st.integers(0, blocks - 1))))
    fills: list[Fill] = []
    for source, sent in ((0, first), (1, every(blocks) - first)):
        while sent:
            piece = sent.first(draw(st.integers(1, len(sent))))
            fills.append(Fill(source, 2, piece))
            sent -= piece
    everything = Share((), NO_BLOCKS, every(blocks))
    return replace(
        PLANNED,
        blocks=blocks,
        shares=(Share((0, 1, 2, 3), every(blocks)), everything, Share()),
        fills=tuple(draw(st.permutations(fills))),
        fill_blocks_per_step=draw(st.integers(1, 7)),
    )


@given(filling())
def test_every_block_of_a_fill_is_in_exactly_one_slice(plan: Plan) -> None:
    check_plan(plan)
    sent = Counter(
        block for index in range(plan.boundaries) for fill in plan.fill_slice(index) for block in fill.blocks
    )
    assert sent == Counter(block for fill in plan.fills for block in fill.blocks)
    assert plan.fill_slice(plan.boundaries) == ()
    assert plan.boundaries == 0 or plan.fill_slice(plan.boundaries - 1)


@given(filling())
def test_a_source_sends_no_more_than_the_plan_says_and_less_only_at_its_end(plan: Plan) -> None:
    for source in (0, 1):
        counts = [
            sum(len(fill.blocks) for fill in plan.fill_slice(index) if fill.source == source)
            for index in range(plan.boundaries)
        ]
        whole = sum(len(fill.blocks) for fill in plan.fills if fill.source == source)
        full, rest = divmod(whole, plan.fill_blocks_per_step)
        wanted = [plan.fill_blocks_per_step] * full + [rest] * (rest > 0)
        assert counts == wanted + [0] * (plan.boundaries - len(wanted))


@given(filling(), st.integers(0, 35))
def test_what_is_filled_is_the_sum_of_the_slices_so_far(plan: Plan, boundaries: int) -> None:
    arrived = {block for index in range(boundaries) for fill in plan.fill_slice(index) for block in fill.blocks}
    assert set(plan.filled(2, boundaries)) == arrived
    assert plan.filled(0, boundaries) == NO_BLOCKS


@given(filling(), st.integers(0, 35))
def test_the_receiver_replays_what_travels_beside_the_vote_too(plan: Plan, boundaries: int) -> None:
    assert plan.replays(2, boundaries) == plan.filled(2, boundaries + 1)
    assert plan.replays(0, boundaries) == every(plan.blocks)


@rule(
    "At the first boundary after a loss a source sends at most what the plan says, nothing where it says nothing; all "
    "the rest follows at the rate of the others",
    "A change of the world",
    broken_by=(
        Edit(
            "shoal_protos.plan", "rate if self.recovery is None else min(rate, self.recovery.first_fill_blocks)", "rate"
        ),
        Edit(
            "shoal_protos.plan",
            "            return 0\n        return max(0, self._first_slice",
            "            return 0\n        return max(0, 0",
        ),
    ),
)
@given(filling(), st.integers(0, 9))
def test_the_first_slice_after_a_loss_is_what_the_plan_says_and_all_the_rest_follows(plan: Plan, first: int) -> None:
    recovered = replace(plan, base=0, recovery=Recovery(7, b"", (True,) * 3, (NO_BLOCKS,) * 3, first_fill_blocks=first))
    check_plan(recovered)
    sent = [Counter(f.source for f in recovered.fill_slice(0) for _ in f.blocks)]
    whole = Counter(f.source for f in plan.fills for _ in f.blocks)
    assert sent[0] == Counter({s: min(first, plan.fill_blocks_per_step, n) for s, n in whole.items()})
    assert recovered.replays(2, 0) == recovered.filled(2, 1) == union(f.blocks for f in recovered.fill_slice(0))
    for index in range(1, recovered.boundaries):
        sent.append(Counter(f.source for f in recovered.fill_slice(index) for _ in f.blocks))
        left = whole - sum(sent[:-1], Counter())
        assert sent[-1] == Counter({s: min(plan.fill_blocks_per_step, n) for s, n in left.items()})
    assert sum(sent, Counter()) == whole and recovered.fill_slice(recovered.boundaries) == ()
    assert recovered.filled(2, recovered.boundaries) == plan.filled(2, plan.boundaries)


def test_second_copies_are_filled_blocks_that_nobody_mirrors() -> None:
    assert PLANNED.second_copies == NO_BLOCKS | runs(9, 12)
    assert with_fills(Fill(0, 2, runs(0, 4))).second_copies == NO_BLOCKS == with_fills().second_copies


def test_each_lane_has_the_trainer_whose_lanes_name_it_and_a_standby_has_none() -> None:
    assert PLANNED.lanes_by_worker == {"a": (0, 1), "b": (2, 3), "c": ()}
    assert PLANNED.trainers == (0, 1) and [PLANNED.trainer_of(lane) for lane in range(4)] == [0, 0, 1, 1]


def test_a_lane_has_a_trainer_at_each_coordinate_and_none_without_a_full_cell() -> None:
    assert [CELLS.trainers_of(lane) for lane in range(4)] == [(0, 3), (0, 3), (2, 1), (2, 1)]
    assert CELLS.trainer_of(2, coordinate=1) == 1 and CELLS.trainers == (0, 1, 2, 3)
    assert WITHOUT_A_FULL_CELL.trainers_of(0) == WITHOUT_A_FULL_CELL.trainers == ()
    assert PLANNED.trainers_of(3) == (1,)


def test_a_share_keeps_what_it_owns_and_mirrors() -> None:
    assert PLANNED.shares[0].keeps == runs(0, 9)
    assert PLANNED.world_size == 3
