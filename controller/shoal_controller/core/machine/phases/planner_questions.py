"""Questions to the planner: what goes into them, when they are asked, and what comes of an answer.

One is out at a time, and its answer is an event, however long that takes. What happens meanwhile makes no answer wrong
by itself: its taker (`recovery.py`, `planned_changes.py`) looks whether it would be wrong now, and what has changed
since is the next question. One without an answer is asked again, and so is one whose answer is none that it can have:
another process answers, and only a sound plan is stored.

A question's inputs are who counts, what each holds and what the job wants, taken from what the workers have said. Two
rules that bits depend on live here: what an inventory is worth at the step where a recovery begins (`usable_blocks`),
and what a planned change may count on (`kept_blocks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

from shoal_protos.description import Description
from shoal_protos.errors import PeerError
from shoal_protos.messages import Inventory, Status
from shoal_protos.plan import Member, Plan, Reason, WorkerId
from shoal_protos.runs import NO_BLOCKS, Runs, every, union

from shoal_controller.core.machine.durable import Goal
from shoal_controller.core.machine.effects import AskPlanner
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.events import PlannerAnswered, PlannerBegan, PlannerFailed
from shoal_controller.core.machine.job import Attempt, Job, PlannerState
from shoal_controller.core.machine.phases import checkpoints, progress_watch
from shoal_controller.core.machine.turn import Turn
from shoal_controller.core.planning.planner import Candidate, PlanRequest, Terms
from shoal_controller.core.planning.question import (
    ChangeQuestion,
    Question,
    RecoveryQuestion,
    StartQuestion,
    check_answer,
)

FILL_SHARE = 0.1
"""The part of a step's time that fills may take."""
REPAIR_SHARE = 0.5
"""The same of fills that bring second copies, which a second loss would find missing."""
FIRST_REPAIR_BYTES = 4 << 20
"""What a source may send at the first boundary after a loss: the first step stays as short as without it."""
FILL_BYTES_PER_SECOND = 250e6
"""Assumed of a network that is not measured: the number in the plan must not depend on who measures."""
LEAST_FILL_BYTES = 1 << 20
"""What a step's fills may move at least."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 10.0
"""Seconds between two questions where the planner fails; they double."""


# ---- questions about inventories


def start_question(turn: Turn, workers: list[WorkerId], attempt: Attempt) -> StartQuestion:
    """A world whose members hold nothing: all begin from the newest checkpoint, or with the initial state."""
    candidates = tuple(_joiner_candidate(turn, worker) for worker in workers)
    reason = Reason.RESTORE if attempt.reason is Reason.RESTORE else Reason.START
    request = _plan_request(turn, candidates, attempt.generation, reason, attempt.avoided_builders)
    return StartQuestion(request, candidates, *_beginning(turn))


def begins_where_all_would(turn: Turn, question: StartQuestion) -> bool:
    """Whether no worker has told of a better checkpoint since it was asked, nor of one that cannot be read."""
    return (question.step, question.checkpoint) == _beginning(turn)


def _beginning(turn: Turn) -> tuple[int, str]:
    """The step at which a world that holds nothing begins, and its checkpoint."""
    found = checkpoints.latest(turn.durable)
    return (found.step, found.path) if found is not None else (0, "")


def recovery_question(turn: Turn, counting: Mapping[WorkerId, Inventory], attempt: Attempt) -> RecoveryQuestion | None:
    """What the inventories allow: of trusted workers, otherwise of all. None: no worker holds anything."""
    step = max((inventory.step for inventory in counting.values()), default=-1)
    if step < 0:
        return None
    of_all = _recovery_question(turn, counting, attempt, counting)
    trusted = {worker: inventory for worker, inventory in counting.items() if not turn.record(worker).quarantined}
    if len(trusted) in (0, len(counting)):
        return of_all
    return replace(_recovery_question(turn, trusted, attempt, counting), otherwise=of_all)


def _recovery_question(
    turn: Turn, members: Mapping[WorkerId, Inventory], attempt: Attempt, counting: Mapping[WorkerId, Inventory]
) -> RecoveryQuestion:
    """A world of some of those whose inventories count."""
    assert turn.world is not None
    step = max(inventory.step for inventory in counting.values())
    candidates = tuple(_stopped_candidate(turn, worker, inventory, step) for worker, inventory in members.items())
    behind = any(candidate.counted and members[candidate.member.worker].step < step for candidate in candidates)
    record = _record_of(counting, step) if behind else b""
    request = _plan_request(turn, candidates, attempt.generation, attempt.reason, attempt.avoided_builders)
    return RecoveryQuestion(request, candidates, turn.world, step, record)


def can_spare(turn: Turn, counting: Mapping[WorkerId, Inventory], worker: WorkerId) -> bool:
    """Whether the others hold every block at the step where a recovery begins."""
    assert turn.durable.description is not None
    trusted = [name for name in counting if not turn.record(name).quarantined]
    others = {name: counting[name] for name in trusted if name != worker}
    step = max((inventory.step for inventory in counting.values()), default=-1)
    held = (value[0] for inventory in others.values() if (value := usable_blocks(inventory, step)) is not None)
    return bool(others) and every(turn.durable.description.blocks) <= union(held)


def usable_blocks(inventory: Inventory, step: int) -> tuple[Runs, Runs] | None:
    """Which blocks it holds at that step, and whose parameters it has; None where it is too far behind.

    A worker that is one step behind rolls forward, but only the blocks whose gradient is in.
    """
    if inventory.step == step:
        return inventory.holds, inventory.current
    if inventory.step == step - 1:
        rolled = inventory.holds & inventory.pending
        return rolled, rolled
    return None


def _stopped_candidate(turn: Turn, worker: WorkerId, inventory: Inventory, step: int) -> Candidate:
    value = usable_blocks(inventory, step)
    holds, current = value if value is not None else (NO_BLOCKS, NO_BLOCKS)
    record = turn.record(worker)
    return Candidate(
        Member(worker, record.incarnation, record.address, record.coordinate),
        record.domain,
        record.join_order,
        holds=holds,
        current=current,
        counted=value is not None,
        leaving=bool(record.leaving),
        lane=inventory.lane if inventory.step == step else -1,
        host=record.host,
        lane_seconds=turn.durable.lane_seconds(worker),
    )


def _record_of(inventories: Mapping[WorkerId, Inventory], step: int) -> bytes:
    return next(inventory.record for inventory in inventories.values() if inventory.step == step)


# ---- planned changes


def change_question(turn: Turn, world: Plan, joiners: list[WorkerId], number: int, reason: Reason) -> ChangeQuestion:
    """What the world should be next, from what its members keep and have been filled with."""
    members = (_member_candidate(turn, world, rank) for rank in range(world.world_size))
    candidates = (*members, *(_joiner_candidate(turn, worker) for worker in joiners))
    return ChangeQuestion(_plan_request(turn, candidates, number, reason), candidates, world)


def kept_blocks(world: Plan, rank: int, status: Status) -> Runs:
    """Blocks that a planned change may count on: those that its base keeps for a member or has filled, and it holds.

    What the base releases may still be there, and be freed before the change begins.
    """
    return status.holds & world.held_by(rank, status.boundaries)


def _member_candidate(turn: Turn, world: Plan, rank: int) -> Candidate:
    worker = world.members[rank].worker
    process = turn.job.processes[worker]
    record = turn.record(worker)
    return Candidate(
        world.members[rank],
        record.domain,
        record.join_order,
        holds=kept_blocks(world, rank, process.status),
        leaving=bool(record.leaving),
        host=record.host,
        lane_seconds=turn.durable.lane_seconds(worker),
    )


def _joiner_candidate(turn: Turn, worker: WorkerId) -> Candidate:
    """A joiner: it gets all parameters where its first world begins."""
    record = turn.record(worker)
    member = Member(worker, record.incarnation, record.address, record.coordinate)
    return Candidate(
        member, record.domain, record.join_order, leaving=bool(record.leaving), host=record.host,
        lane_seconds=turn.durable.lane_seconds(worker),
    )  # fmt: skip


# ---- terms


def steps_run(turn: Turn, members: Sequence[WorkerId]) -> bool:
    """Not while the job is paused, is being saved for the last time, or has fewer members than it needs."""
    return not turn.durable.paused and not turn.durable.final_drain and turn.durable.are_enough(members)


def _plan_request(
    turn: Turn, candidates: Sequence[Candidate], number: int, reason: Reason, avoid: frozenset[WorkerId] = frozenset()
) -> PlanRequest:
    description = turn.durable.description
    assert description is not None
    terms = Terms(
        description.lanes,
        description.blocks,
        description.mirrors,
        description.mirror_partners,
        _fill_rate(turn, description, candidates, FILL_SHARE),
        _fill_rate(turn, description, candidates, REPAIR_SHARE) if description.mirrors else 0,
        FIRST_REPAIR_BYTES // max(1, description.state_bytes),
        turn.durable.trainers,
        steps_run(turn, [candidate.member.worker for candidate in candidates]),
        rounds=description.adds_by_rounds,
        sharded=description.shards_parameters,
        homes=description.homes,
        models=description.models,
        tight_parts=description.cell.tight_parts,
    )
    suspects = frozenset(c.member.worker for c in candidates if progress_watch.has_fault(turn, c.member.worker))
    return PlanRequest(terms, number, reason, avoid | suspects)


def _fill_rate(turn: Turn, description: Description, candidates: Sequence[Candidate], share: float) -> int:
    """Blocks that one source sends per step: a share of a step's time, more where a drain's clock runs."""
    step_seconds = max((process.telemetry.step_seconds for process in turn.serving()), default=0.0)
    wanted = description.fill_bytes_per_step or max(LEAST_FILL_BYTES, share * step_seconds * FILL_BYTES_PER_SECOND)
    rate = max(1, int(wanted // max(1, description.state_bytes)))
    for candidate in candidates:
        if candidate.leaving:
            grace = turn.record(candidate.member.worker).leaves_at - turn.now
            boundaries = max(1, int(grace / 2 / step_seconds)) if step_seconds else 1
            rate = max(rate, ceil(len(candidate.holds) / boundaries))
    return rate


# ---- asking


def ask(turn: Turn, question: Question, goal: Goal | None = None) -> None:
    """Ask the planner, which must not be busy."""
    assert not is_busy(turn), "one question is out at a time"
    planner = turn.job.planner
    number = planner.asked + 1
    turn.change(planner=replace(planner, asked=number, asked_at=turn.now, begun_at=None))
    turn.do(AskPlanner(number, question, goal))


def is_busy(turn: Turn) -> bool:
    """Whether a question is out, or the planner has just failed."""
    planner = turn.job.planner
    return planner.asked_at is not None or turn.now < _not_before(planner)


def _not_before(planner: PlannerState) -> float:
    if not planner.failures:
        return 0.0
    return planner.failed_at + min(FIRST_PAUSE * 2.0 ** (planner.failures - 1), LONGEST_PAUSE)


def take(turn: Turn) -> PlannerAnswered | None:
    """The answer that came, once. It may be to an earlier question than the last one."""
    answer = turn.job.planner.answer
    if answer is not None:
        turn.change(planner=replace(turn.job.planner, answer=None))
    return answer


def has_lost_a_member(turn: Turn, plan: Plan) -> bool:
    """Whether a member has gone since the plan was asked for."""
    roster = turn.durable.roster
    return any(member.worker not in roster or not roster[member.worker].serves for member in plan.members)


def sentence(job: Job) -> str:
    """The wait for the planner, for people."""
    planner = job.planner
    if planner.failures:
        return f"waiting for the planner, which has failed ({planner.why})"
    in_line = planner.asked_at is not None and planner.begun_at is None
    return "waiting for the planner, which answers other jobs first" if in_line else "waiting for the planner"


def has_failed_for(turn: Turn, seconds: float, since: float) -> bool:
    """Whether nothing but failures has come of it for so long after a time."""
    planner = turn.job.planner
    return planner.failures > 0 and turn.now - max(planner.failing_since, since) > seconds


# ---- what comes of a question


def on_begun(turn: Turn, event: PlannerBegan) -> bool:
    """From now on the question's time counts."""
    planner = turn.job.planner
    if event.number == planner.asked and planner.asked_at is not None:
        turn.change(planner=replace(planner, begun_at=turn.now))
    return False


def on_answered(turn: Turn, event: PlannerAnswered) -> None:
    """Keep the answer for its asker; of two answers that come at once, the one to the later question. A plan that is
    unsound, or another one than was asked for, is a failure of the planner.
    """
    try:
        check_answer(event.asked.question, event.answer)
    except PeerError as error:
        return on_failed(turn, PlannerFailed(event.asked.number, str(error)))
    planner = turn.job.planner
    asked_at = None if event.asked.number == planner.asked else planner.asked_at
    later = planner.answer is not None and planner.answer.asked.number > event.asked.number
    answer = planner.answer if later else event
    return turn.change(planner=PlannerState(planner.asked, asked_at, planner.begun_at, answer))


def on_failed(turn: Turn, event: PlannerFailed) -> None:
    """The question is asked again after a pause, unless it was given up already."""
    if event.number == turn.job.planner.asked and turn.job.planner.asked_at is not None:
        _fail(turn, event.why)


def watch(turn: Turn) -> None:
    """An answer that does not come within `progress_seconds` is waited for no longer; it may still come. The time in
    which the question stood in line does not count: all jobs have one planner, and to ask again would make the line
    longer.
    """
    planner = turn.job.planner
    if planner.asked_at is None:
        return
    if planner.begun_at is None:
        if turn.now - planner.asked_at > turn.spec.stall_seconds:
            _fail(turn, f"it has not begun for {turn.now - planner.asked_at:.0f} s")
    elif turn.now - planner.begun_at > turn.spec.progress_seconds:
        _fail(turn, f"it has not answered for {turn.now - planner.begun_at:.0f} s")


def _fail(turn: Turn, why: str) -> None:
    """The question is asked again, after a pause that doubles."""
    planner = turn.job.planner
    failures = planner.failures + 1
    since = planner.failing_since if planner.failures else turn.now
    turn.change(
        planner=replace(planner, asked_at=None, failures=failures, failing_since=since, failed_at=turn.now, why=why),
        goal=None,
    )
    if failures & (failures - 1) == 0:
        times = f" ({failures} times in a row)" if failures > 1 else ""
        turn.note(EventKind.WAITING, f"the planner failed{times}: {why}; it is asked again")
