"""Every rule that equal bits or progress depend on, switched off: by replacing the one function that embodies it.

`test_rules.py` and `python -m tests.simulation.mutants` try each: a simulation must break, or the rule is not needed or
not tested. docs/rules.md lists these rules; code marks them with ●.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from shoal.core.membership import Membership
from shoal.core.saving import SaveAct, SavePart, SaveStatus
from shoal_controller.core.machine import durable, machine
from shoal_controller.core.machine.durable import Durable, Failures, LinkFault, SaveRequest, Standing
from shoal_controller.core.machine.events import NeverStarted
from shoal_controller.core.machine.job import Listening, Process
from shoal_controller.core.machine.phases import (
    admission,
    checkpoints,
    claims,
    corruption,
    failure_detector,
    failures,
    fencing,
    lost_blocks,
    next_message,
    planned_changes,
    planner_questions,
    progress_watch,
    recovery,
    running,
    scaling,
    seating,
    silence,
)
from shoal_controller.core.machine.phases.next_message import is_member
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.turn import Turn
from shoal_controller.core.planning import planner
from shoal_controller.jobs import records
from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.messages import MemberState
from shoal_protos.plan import Plan
from shoal_protos.runs import NO_BLOCKS, Runs, every

from . import copies

Patch = tuple[Any, Any, Any]
"""Where, the name there (of a table: its key), what instead."""


def _minimum_begins(self: Membership, voted: list[int]) -> Plan | None:
    """A planned generation begins when the lowest vote reaches it, as if votes could only differ by what is old."""
    self.voting = False
    if min(voted) > self.generation or (max(voted) > self.generation and self.voted == max(voted)):
        self.begins = self.next
    return self.begins


def _takes_a_plan_in_a_vote(self: Membership, plan: Plan) -> bool:
    """A member gives up what it has voted when a newer plan comes."""
    voting, self.voting = self.voting, False
    answers = ON_PLANNED(self, plan)
    self.voting = voting
    return answers


def _keeps_only_the_newest(self: Membership, plan: Plan) -> bool:
    answers = ON_PLANNED(self, plan)
    self.kept.clear()
    return answers


def _votes_without_holding(self: Membership, holds: Runs) -> int:
    return ENTER_VOTE(self, every(1 << 20))


def _left_is_safe(turn: Turn, state: MemberState) -> bool:
    return state in (MemberState.LEFT, MemberState.STOPPED)


def _counts_all(world: Plan, rank: int, status: Any) -> Runs:
    return status.holds


def _worth_without_gradient(inventory: Any, step: int) -> tuple[Runs, Runs] | None:
    if inventory.step >= step - 1:
        return inventory.holds, inventory.current
    return None


def _worth_one_behind_is_nothing(inventory: Any, step: int) -> tuple[Runs, Runs] | None:
    return (inventory.holds, inventory.current) if inventory.step == step else None


def _sends_before_it_stores(self: Turn) -> list[Any]:
    effects = EFFECTS_IN_ORDER(self)
    return [*effects[1:], effects[0]] if len(effects) > 1 and self.job.durable is not self.before.durable else effects


def _gives_ids_twice(turn: Turn, hello: Any) -> str:
    return hello.worker or IDENTIFY(turn, hello)


def _dismisses_early(turn: Turn, world: Plan) -> None:
    """Whoever is not a member of the world is stale at once."""
    for process in tuple(turn.serving()):
        status = process.status
        behind = 0 < status.generation < world.generation and status.state is not MemberState.LEFT
        if behind and not is_member(world, process.worker):
            recovery.dismiss_stale(turn, process.worker, status.generation, world.generation)


def _keeps_void_plans(turn: Turn, generation: int) -> None:
    before = turn.durable.planned
    BEGUN_IN(turn, generation)
    if turn.durable.planned != before:
        turn.keep(planned=tuple(plan for plan in before if plan.generation != generation))


def _one_break_is_enough(turn: Turn, attempt: Any) -> None:
    for reporter, peer in attempt.reports[:1]:
        turn.mark(max(reporter, peer), quarantined=True)


def _blames_in_any_case(turn: Turn, attempt: Any) -> None:
    """As if nobody had been lost in the generation that broke."""
    for reporter, peer in attempt.reports[:1]:
        turn.keep(link_faults={"|".join(sorted((reporter, peer))): LinkFault(1, {peer: 1})})
        turn.note("blamed", f"{reporter} and {peer}")


def _counts_the_new_world_only(plan: Plan, status: Any) -> list[str]:
    speaks = status.state is MemberState.TRAINING and status.generation == plan.generation
    return [peer for peer in status.broken if speaks and is_member(plan, peer)]


def _decides_at_once(turn: Turn, attempt: Any) -> list[str]:
    return []


def _is_silent(turn: Turn, one: Any) -> None:
    """A difference is noted, and that is all."""


def _oldest(durable: Durable) -> CheckpointRef | None:
    return min(durable.checkpoints, default=None)


def _asks_by_the_number_of_a_ping(turn: Turn) -> None:
    """Which begins anew in every controller's life."""
    number = turn.job.next_ping + 1
    turn.change(next_ping=number)
    turn.keep(save=SaveRequest(number, 0))


def _gives_up_at_once(self: SavePart, statuses: Mapping[str, str], planned: bool, sound: bool | None) -> SaveAct | None:
    """A save as soon as one could not write, though others still do."""
    if SaveStatus.FAILED in statuses.values():
        statuses = {who: status for who, status in statuses.items() if status != SaveStatus.WRITING}
    return LEAD(self, statuses, planned, sound)


def _forgives_by_any_step(turn: Turn, status: Any) -> None:
    """Also by one that an earlier life has committed before."""
    if turn.durable.failures.times and status.committed_in == status.generation > 0:
        turn.keep(failures=Failures())


def _has_one_time_for_all_phases(turn: Turn, since: float) -> bool:
    attempt = turn.job.attempt
    return attempt is not None and turn.now - attempt.since > turn.spec.stall_seconds


def _forgets(**fields: Any) -> Any:
    """A life of the controller that begins without these fields of the durable state."""

    def restarted(turn: Turn) -> None:
        turn.keep(**fields)
        POPULATION_RESTARTED(turn)

    return restarted


def _waits_for_no_end(turn: Turn) -> None:
    """A life of the controller that knows of nobody who was told to end."""
    for worker in turn.durable.roster:
        turn.mark(worker, ending_since=None)
    POPULATION_RESTARTED(turn)


def _gives_no_grace(turn: Turn) -> None:
    """A drain's grace is over when a controller is started again."""
    POPULATION_RESTARTED(turn)
    for record in tuple(turn.durable.roster.values()):
        turn.mark(record.worker, leaves_at=turn.now)


POPULATION_RESTARTED = scaling.on_restart


def _heeds_no_age(activities: Any, limit_seconds: float) -> Any:
    return BROKEN_LINKS(activities, -1.0)


ON_PLANNED = Membership.on_planned
BROKEN_LINKS = progress_watch.broken_links
ENTER_VOTE = Membership.enter_vote
LEAD = SavePart._lead
COUNT = silence.count_tick
EFFECTS_IN_ORDER = Turn.effects_in_order
IDENTIFY = admission._identify
AT_HOME = planner._at_home
BEGUN_IN = planned_changes.on_generation_seen


def _counts_by_the_clock(turn: Turn) -> None:
    job = turn.job
    passed = turn.now - (job.started_at if job.ticked_at is None else job.ticked_at)
    running, uncut = job.listening
    turn.change(
        ticked_at=turn.now, listening=Listening(running + passed, uncut if silence.is_cut_off(job) else uncut + passed)
    )


def _keeps_lanes_of_cells(terms: Any, here: Any) -> Any:
    """What a process had begun it begins with again, wherever its mates are."""
    kept = [candidate.lane for candidate in here]
    return [replace(one, lane=lane) for one, lane in zip(AT_HOME(terms, here), kept, strict=True)]


def _counts_anybody(coordinates: Any, processes: int) -> int:
    return len(list(coordinates)) // processes


def _any_refusal_proves(turn: Turn, process: Process) -> float | None:
    here = process.connection is not None or turn.record(process.worker).standing is Standing.DEAD
    return None if here else process.refused_since


def _counts_cuts(turn: Turn) -> None:
    COUNT(turn)
    turn.change(listening=Listening(turn.job.listening.running, turn.job.listening.running))


RECORDS_OF = records.records_of


def _believes_every_part(job: str, entries: Mapping[str, bytes], number: int, since: int) -> Any:
    return RECORDS_OF(job, entries, 1 << 60, since)


MUTATIONS: dict[str, list[Patch]] = {
    "a change is true when its last part is stored": [(records, "records_of", _believes_every_part)],
    "only a step above the one of a failure forgives it": [(failures, "forgive", _forgives_by_any_step)],
    "all failures within one generation count once": [(failures, "_is_new", lambda turn, record: True)],
    "a claim is checked before it is believed": [(claims, "false_claim", lambda turn, worker, message: "")],
    "a worker of another run is turned away": [(claims, "run_mismatch", lambda spec, hello: "")],
    "a planned generation begins when all votes name it": [(Membership, "leave_vote", _minimum_begins)],
    "a member keeps what it voted for until that vote is over": [(Membership, "on_planned", _takes_a_plan_in_a_vote)],
    "a joiner keeps every planned generation": [(Membership, "on_planned", _keeps_only_the_newest)],
    "a worker does not get ready for a plan that needs a block it lacks": [
        (Membership, "enter_vote", _votes_without_holding),
        (planner_questions, "kept_blocks", _counts_all),
    ],
    "a planned change relies only on what its base keeps or has filled": [
        (planner_questions, "kept_blocks", _counts_all)
    ],
    "a leaving worker keeps its blocks until a vote without it has passed": [
        (scaling, "_left_and_safe", _left_is_safe)
    ],
    "no generation opens before every world has stopped": [(recovery, "may_still_train", lambda turn: None)],
    "an inventory counts only if no step was committed in a later generation": [
        (recovery, "counts", lambda inventory, committed_in, floor: True)
    ],
    "only blocks whose gradient has arrived roll forward": [
        (planner_questions, "usable_blocks", _worth_without_gradient)
    ],
    "a member that is one step behind rolls forward": [
        (planner_questions, "usable_blocks", _worth_one_behind_is_nothing)
    ],
    "what must be durable is stored before anyone is told": [(Turn, "effects_in_order", _sends_before_it_stores)],
    "a second process with a living member's id is refused": [(admission, "_identify", _gives_ids_twice)],
    "silence of most evicts nobody": [(silence, "is_cut_off", lambda job: False)],
    "within reconnect_seconds nobody is evicted": [(silence, "may_be_reconnecting", lambda turn: False)],
    "silence is counted in the controller's own running time": [(silence, "count_tick", _counts_by_the_clock)],
    "the time of a cut counts as nobody's silence": [(silence, "count_tick", _counts_cuts)],
    "a refusal proves a death only where the process was reached": [
        (failure_detector, "_refused_since", _any_refusal_proves)
    ],
    "a stale worker is dismissed only after a commit": [(running, "_dismiss_the_stale", _dismisses_early)],
    "a plan is void once another generation is current": [(planned_changes, "on_generation_seen", _keeps_void_plans)],
    "the same pair is evicted only after two generations": [(progress_watch, "judge_reports", _one_break_is_enough)],
    "the same pair is evicted after two generations": [(progress_watch, "judge_reports", lambda turn, attempt: None)],
    "a block is given up only when nobody may hold it": [(lost_blocks, "_possible_holders", _decides_at_once)],
    "a lagging worker gets its message again": [(next_message, "next_message", lambda job, process: None)],
    "a generation in which someone was lost blames no pair": [(progress_watch, "judge_reports", _blames_in_any_case)],
    "a joiner is not waited for in a recovery": [(fencing, "_holds_nothing", lambda turn, worker: False)],
    "a member that is stuck in the previous world is heard": [
        (progress_watch, "_broken_in_training", _counts_the_new_world_only)
    ],
    "whether steps run is part of the plan": [(planner_questions, "steps_run", lambda turn, members: True)],
    "silence for stall_seconds evicts though most are silent": [(failure_detector, "_gone_for_good", lambda turn: [])],
    "members' reports of differing copies count": [(corruption, "on_status", lambda turn, worker, status: None)],
    "where copies differ all return to a checkpoint whose copies agreed": [(corruption, "_conclude", _is_silent)],
    "… and to none that was saved while they differed": [
        (checkpoints, "latest", lambda durable: max(durable.checkpoints, default=None))
    ],
    "copies are compared before a planned change takes one away": [
        (copies, "losing_a_copy", lambda old, new, boundaries: NO_BLOCKS)
    ],
    "a second return without progress pauses the job": [(corruption, "_is_beyond", lambda turn: True)],
    "a worker that is part of two differences is evicted": [
        (corruption, "_quarantine", lambda turn, worker, times: None)
    ],
    "a save that was given up no longer counts": [(checkpoints, "_is_given_up", lambda durable, reference: False)],
    "all return to the newest checkpoint that anyone knows": [(checkpoints, "latest", _oldest)],
    "a checkpoint that cannot be read is not named again": [(checkpoints, "unreadable", lambda turn, attempt: None)],
    "a worker that was absent when all returned changes nothing any more": [
        (recovery, "_goes_back", lambda turn, plan, step: False)
    ],
    "no two requests to save have the same number": [(checkpoints, "request_save", _asks_by_the_number_of_a_ping)],
    "a save is given up only when no member is writing": [(SavePart, "_lead", _gives_up_at_once)],
    "a drain's grace goes on over a controller's restart": [(scaling, "on_restart", _gives_no_grace)],
    "a save that was accepted is made over a controller's restart": [(scaling, "on_restart", _forgets(save=None))],
    "a process that was told to end is killed over a controller's restart": [
        (scaling, "on_restart", _waits_for_no_end)
    ],
    "a worker that no controller has started is started by the next": [
        (machine.TABLE, (Phase.WAITING, NeverStarted), lambda turn, event: None),
        (machine.TABLE, (Phase.RUNNING, NeverStarted), lambda turn, event: None),
    ],
    "every phase of a recovery has its own time limit": [(recovery, "_overdue", _has_one_time_for_all_phases)],
    "a thawed worker is readmitted where no steps run": [
        (running, "_could_rejoin", lambda turn, world, process: False)
    ],
    "one of two that cannot reach each other is evicted": [(progress_watch, "judge_training", lambda turn, world: ())],
    "only waits older than the limit count": [(progress_watch, "broken_links", _heeds_no_age)],
    "a straggler is not evicted": [(progress_watch, "_last_progress_at", lambda job, process: float("-inf"))],
    "a link that fails while a world is built is examined": [
        (progress_watch, "broken_links_in_building", lambda turn, plan, since: ())
    ],
    "a planned change whose joiner cannot be reached is void": [
        (planned_changes, "judge_building", lambda turn, world: ())
    ],
    "a lane of a broken cell is void": [(planner, "_at_home", _keeps_lanes_of_cells)],
    "full cells are the fewest members of a coordinate": [(durable, "full_cells", _counts_anybody)],
    "a process gets the coordinate that lacks it most": [(seating, "best_seat", lambda *_: 0)],
    "where neither can be spared nobody is evicted": [
        (planner_questions, "can_spare", lambda turn, counting, worker: True)
    ],
}
"""By the rule, as a sentence that is false while it is switched off."""


@contextmanager
def mutated(rule: str) -> Iterator[None]:
    """Switch a rule off."""
    kept = [(where, name, _put(where, name, instead)) for where, name, instead in MUTATIONS[rule]]
    try:
        yield
    finally:
        for where, name, before in kept:
            _put(where, name, before)


def _put(where: Any, name: Any, value: Any) -> Any:
    """Into a table, or an attribute. Gives back what was there."""
    if isinstance(where, dict):
        before, where[name] = where[name], value
        return before
    before = getattr(where, name)
    setattr(where, name, value)
    return before
