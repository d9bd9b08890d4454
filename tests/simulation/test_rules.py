"""Every rule is needed: switched off, a scenario goes another way or a seed breaks an invariant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matrices import further
from rule import Edit, holds, rule
from tiers import check

from .mutations import MUTATIONS, mutated
from .run import attempt
from .script import goes_otherwise

SCENARIOS = Path(__file__).with_name("scenarios")

NOTICED_BY: dict[str, str | int] = {
    "a change is true when its last part is stored": 0,
    "a claim is checked before it is believed": "one_wrong_number",
    "a worker of another run is turned away": "old_run",
    "only a step above the one of a failure forgives it": "fails_at_the_same_step",
    "all failures within one generation count once": "fails_at_the_same_step",
    "a planned generation begins when all votes name it": 0,
    "a member keeps what it voted for until that vote is over": 168,
    "a joiner keeps every planned generation": 168,
    "a worker does not get ready for a plan that needs a block it lacks": 123,
    "a planned change relies only on what its base keeps or has filled": 125,
    "a leaving worker keeps its blocks until a vote without it has passed": "leaving_worker_saves_the_day",
    "no generation opens before every world has stopped": "two_worlds",
    "an inventory counts only if no step was committed in a later generation": "stale_inventory",
    "only blocks whose gradient has arrived roll forward": 74,
    "a member that is one step behind rolls forward": "roll_forward",
    "what must be durable is stored before anyone is told": 0,
    "a second process with a living member's id is refused": "second_process",
    "silence of most evicts nobody": "controller_cut_off",
    "within reconnect_seconds nobody is evicted": "controller_started_while_one_is_frozen",
    "silence is counted in the controller's own running time": "controller_always_late",
    "the time of a cut counts as nobody's silence": "controller_cut_off",
    "a refusal proves a death only where the process was reached": "firewall",
    "a stale worker is dismissed only after a commit": "thawed_before_the_first_step",
    "a plan is void once another generation is current": 3,
    "the same pair is evicted only after two generations": "broken_connection",
    "the same pair is evicted after two generations": "link_fault",
    "a generation in which someone was lost blames no pair": "roll_forward",
    "a block is given up only when nobody may hold it": "sole_holder_thaws",
    "a lagging worker gets its message again": "controller_killed_while_training",
    "a member that is stuck in the previous world is heard": "stuck_in_the_world_before",
    "whether steps run is part of the plan": "pause",
    "a thawed worker is readmitted where no steps run": "below_min",
    "silence for stall_seconds evicts though most are silent": "most_hosts_vanish",
    "all return to the newest checkpoint that anyone knows": "damaged_checkpoint",
    "a checkpoint that cannot be read is not named again": "damaged_checkpoint",
    "a worker that was absent when all returned changes nothing any more": "thawed_after_all_went_back",
    "members' reports of differing copies count": "flipped_bit",
    "where copies differ all return to a checkpoint whose copies agreed": "flipped_bit",
    "… and to none that was saved while they differed": 252,
    "copies are compared before a planned change takes one away": "flipped_bit_drained",
    "a second return without progress pauses the job": "flipped_bits_again",
    "a worker that is part of two differences is evicted": "flipping_worker",
    "a save that was given up no longer counts": "flipped_bit_saved",
    "no two requests to save have the same number": "saves_asked",
    "every phase of a recovery has its own time limit": "checkpoint_after_a_long_wait",
    "a save is given up only when no member is writing": 44,
    "a drain's grace goes on over a controller's restart": "grace_over_a_restart",
    "a save that was accepted is made over a controller's restart": "save_over_a_restart",
    "a process that was told to end is killed over a controller's restart": 459,
    "a worker that no controller has started is started by the next": "never_started",
    "a joiner is not waited for in a recovery": "joiner_freezes_in_a_recovery",
    "one of two that cannot reach each other is evicted": "link_down",
    "only waits older than the limit count": 78,
    "a straggler is not evicted": "straggler",
    "a link that fails while a world is built is examined": "link_down_in_a_recovery",
    "a planned change whose joiner cannot be reached is void": "joiner_out_of_reach",
    "a lane of a broken cell is void": "cell_broken_in_a_round",
    "full cells are the fewest members of a coordinate": "cell_incomplete_at_the_start",
    "a process gets the coordinate that lacks it most": "cell_incomplete_at_the_start",
    "where neither can be spared nobody is evicted": "sole_holders_apart",
}
"""The scenario, or the first of the seeds, that notices."""

SEARCHED_FOR_LONG = {
    "a member keeps what it voted for until that vote is over",
    "only blocks whose gradient has arrived roll forward",
    "a joiner keeps every planned generation",
    "a save is given up only when no member is writing",
}
"""Hundreds of seeds pass before one notices."""
SEARCHED_A_WHILE = {
    "a planned change relies only on what its base keeps or has filled",
    "only waits older than the limit count",
    "a plan is void once another generation is current",
    "whether steps run is part of the plan",
}
"""A few seeds do."""
SEARCHED = 400
"""So many seeds from the first one on: what a seed draws changes with the code, the rule does not."""
SHAPE = {"stage": 1, "operators": False}
"""No rule here depends on the stage, unless all mirror everything, nor on what operators do besides."""


def notices(by: str | int) -> bool:
    if isinstance(by, str):
        return goes_otherwise((SCENARIOS / f"{by}.txt").read_text())
    return any(attempt((seed, SHAPE))[1] for seed in range(by, by + SEARCHED))


RULES = [
    ("only blocks whose gradient has arrived roll forward", "Only blocks whose next gradient"),
    ("a member keeps what it voted for until that vote is over", "A member keeps what it"),
    ("a joiner keeps every planned generation", "A joiner keeps every planned"),
    ("a planned change relies only on what its base keeps or has filled", "A planned change relies only"),
    ("a worker does not get ready for a plan that needs a block it lacks", "A worker does not report"),
    ("a leaving worker keeps its blocks until a vote without it has passed", "A leaving worker keeps its"),
    ("no generation opens before every world has stopped", "No generation opens before, in"),
    ("an inventory counts only if no step was committed in a later generation", "An inventory counts only if"),
    ("silence of most evicts nobody", "Silence of more than half"),
    ("silence is counted in the controller's own running time", "Silence is counted in the"),
    ("the time of a cut counts as nobody's silence", "… and the time during"),
    ("a refusal proves a death only where the process was reached", "A refused connection proves a"),
    ("within reconnect_seconds nobody is evicted", "Within `reconnect_seconds` of a controller's"),
    ("silence for stall_seconds evicts though most are silent", "The wait for a silent"),
    ("the same pair is evicted after two generations", "When the same pair has"),
    ("a generation in which someone was lost blames no pair", "… and a generation in"),
    ("a worker of another run is turned away", "Every run of a job has a uid; a"),
    ("a claim is checked before it is believed", "A claim is checked before"),
    ("all failures within one generation count once", "All failures within one generation"),
    ("only a step above the one of a failure forgives it", "A failure is forgiven only"),
    ("one of two that cannot reach each other is evicted", "When no vote passes although"),
    ("only waits older than the limit count", "… only waits older than"),
    ("a straggler is not evicted", "… and a chain that ends in user"),
    ("a link that fails while a world is built is examined", "… the same applies while"),
    ("a planned change whose joiner cannot be reached is void", "… the same applies while"),
    ("where neither can be spared nobody is evicted", "… and if neither can"),
    ("a second process with a living member's id is refused", "A living member keeps its"),
    ("a stale worker is dismissed only after a commit", "A process that was replaced"),
    ("a planned generation begins when all votes name it", "A planned generation begins only"),
    ("a block is given up only when nobody may hold it", "A block is given up only when nobody"),
    ("all return to the newest checkpoint that anyone knows", "When a block is lost"),
    ("a checkpoint that cannot be read is not named again", "… and a checkpoint that"),
    ("a worker that was absent when all returned changes nothing any more", "A worker that was absent"),
    ("every phase of a recovery has its own time limit", "Every phase of a recovery"),
    ("no two requests to save have the same number", "No two requests to save"),
    ("a save is given up only when no member is writing", "A failed save removes what it wrote"),
    ("a drain's grace goes on over a controller's restart", "Besides numbers, a controller's restart"),
    ("a save that was accepted is made over a controller's restart", "… a save that was accepted is made"),
    ("a process that was told to end is killed over a controller's restart", "… a process that was told to end"),
    ("a worker that no controller has started is started by the next", "… a worker that was about to be"),
    ("a change is true when its last part is stored", "A change that needs several"),
    ("a save that was given up no longer counts", "A save that was given"),
    ("a lane of a broken cell is void", "No lane in flight is kept where a lane"),
    ("full cells are the fewest members of a coordinate", "A job has as many cells as"),
    ("a process gets the coordinate that lacks it most", "A process gets the coordinate"),
    ("members' reports of differing copies count", "The copies of every block are compared within"),
    ("copies are compared before a planned change takes one away", "Before a planned change begins, copies"),
    (
        "where copies differ all return to a checkpoint whose copies agreed",
        "When copies differ, all members return to a checkpoint whose",
    ),
    (
        "… and to none that was saved while they differed",
        "When copies differ, all members return to a checkpoint whose",
    ),
    ("a second return without progress pauses the job", "A worker that is part"),
    ("a worker that is part of two differences is evicted", "A worker that is part"),
]


@rule(
    "A number, a plan or a world is stored before anyone is told of it",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.core.machine.turn",
        "return [Persist(), *others] if is_due",
        "return [*others, Persist()] if is_due",
    ),
    case="what must be durable is stored before anyone is told",
)
@holds(RULES)
@pytest.mark.timeout(600)
def in_its_tier(rule: str) -> Any:
    """The rule, for `make faults`, `make check` or `make test` by how long it is searched for."""
    long, a_while = rule in SEARCHED_FOR_LONG, rule in SEARCHED_A_WHILE
    return pytest.param(rule, marks=further if long else check("searches seeds") if a_while else ())


@pytest.mark.parametrize("rule", [in_its_tier(rule) for rule in MUTATIONS])
def test_a_rule_that_is_switched_off_is_noticed(rule: str) -> None:
    with mutated(rule):
        assert notices(NOTICED_BY[rule])
