"""What the planner is told of what workers hold: the two rules that bits depend on, with plain values."""

from dataclasses import replace

from rule import Edit, holds, rule
from shoal_controller.core.machine.phases.planner_questions import kept_blocks, usable_blocks
from shoal_protos.messages import Inventory, MemberState, Status
from shoal_protos.plan import Fill, Plan
from shoal_protos.runs import NO_BLOCKS, Runs, every
from worlds import recovery

EVERYTHING = every(6)


def status(holds: Runs, boundaries: int) -> Status:
    return Status(
        sequence=1, generation=1, state=MemberState.TRAINING, promised=1, step=3, committed_in=1, boundaries=boundaries,
        holds=holds,
    )  # fmt: skip


def base() -> Plan:
    """a keeps blocks 0 to 2, b the others; a is filled with 3 and 4, one at each boundary after the first."""
    return replace(recovery(1, "ab"), fills=(Fill(1, 0, Runs.of([3, 4])),))


@rule(
    "A planned change relies only on blocks that the plan before it keeps or has filled",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.planner_questions",
        "    return status.holds & world.held_by(rank, status.boundaries)",
        "    return status.holds",
    ),
)
def test_a_planned_change_counts_on_what_its_base_keeps_or_has_filled_and_on_nothing_that_it_releases():
    keeps = base().shares[0].keeps
    assert kept_blocks(base(), 0, status(EVERYTHING, boundaries=0)) == keeps
    assert kept_blocks(base(), 0, status(EVERYTHING, boundaries=1)) == keeps
    assert kept_blocks(base(), 0, status(EVERYTHING, boundaries=2)) == keeps | Runs.of([3])
    assert kept_blocks(base(), 0, status(EVERYTHING, boundaries=9)) == keeps | Runs.of([3, 4])


def test_a_planned_change_counts_on_nothing_that_the_worker_does_not_say_it_holds():
    assert kept_blocks(base(), 0, status(Runs.of([1, 5]), boundaries=9)) == Runs.of([1])


def inventory(step: int, holds: Runs, pending: Runs) -> Inventory:
    return Inventory(2, 1, step, 1, b"record", holds, pending, current=EVERYTHING)


def test_who_stands_where_the_recovery_begins_is_worth_what_it_holds():
    assert usable_blocks(inventory(7, Runs.of([1, 2]), NO_BLOCKS), 7) == (Runs.of([1, 2]), EVERYTHING)


@holds("Only blocks whose next gradient")
def test_who_is_one_step_behind_is_worth_the_blocks_whose_gradient_is_in():
    rolled = Runs.of([2])
    assert usable_blocks(inventory(6, Runs.of([1, 2]), Runs.of([2, 3])), 7) == (rolled, rolled)


def test_who_is_further_behind_is_worth_nothing():
    assert usable_blocks(inventory(5, EVERYTHING, EVERYTHING), 7) is None
