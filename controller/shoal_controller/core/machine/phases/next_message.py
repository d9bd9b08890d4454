"""What is current for one worker: the answer to every hello, and to every heartbeat that shows that its worker lags.

No message is an event, so nothing here remembers what was delivered: the worker's status says what it knows, and what
it lacks is sent again at most once a heartbeat interval.
"""

from __future__ import annotations

from shoal_protos.messages import (
    Ask,
    AskKind,
    Ending,
    Inventory,
    MemberState,
    Open,
    PlanMessage,
    Prepare,
    Shutdown,
    ToWorker,
)
from shoal_protos.plan import Plan, WorkerId

from shoal_controller.core.machine.durable import Durable
from shoal_controller.core.machine.effects import Close, Send
from shoal_controller.core.machine.job import Attempt, AttemptPhase, Job, Process
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.turn import Turn

STOP_REQUEST = 1
"""The number of the one request to stop that a job makes."""


def send_if_due(turn: Turn, worker: WorkerId) -> None:
    """Say what is current, unless the same was said less than a heartbeat interval ago."""
    process = turn.process(worker)
    if process is None or process.connection is None:
        return
    message = next_message(turn.job, process)
    if message is None:
        return
    kind, number, at = process.last_sent
    key = type(message).__name__, _number(message)
    if key == (kind, number) and turn.now - at < turn.spec.heartbeat_seconds:
        return
    turn.see(worker, last_sent=(*key, turn.now))
    turn.do(Send(process.connection, message))
    if isinstance(message, Shutdown):
        turn.do(Close(process.connection))


def send_all_if_due(turn: Turn) -> None:
    for worker in tuple(turn.job.processes):
        send_if_due(turn, worker)


def next_message(job: Job, process: Process) -> ToWorker | None:
    """The one message that this worker needs now."""
    ending = shutdown_of(job.durable, process.worker)
    if ending is not None:
        return ending
    if job.attempt is not None:
        return _of_attempt(job.durable, job.attempt, process)
    return _of_world(job, process)


def shutdown_of(durable: Durable, worker: WorkerId) -> Shutdown | None:
    """How a worker is to end, if it is."""
    if durable.phase.is_over:
        return shutdown_of_all(durable)
    record = durable.roster[worker]
    return Shutdown(record.ending, record.why, durable.last_generation) if record.ending is not None else None


def shutdown_of_all(durable: Durable) -> Shutdown:
    """How every worker of a job that is over is to end."""
    ending = Ending.DONE if durable.phase is Phase.SUCCEEDED else Ending.FAILED
    return Shutdown(ending, durable.reason, durable.last_generation)


def _number(message: ToWorker) -> int:
    if isinstance(message, PlanMessage):
        return message.plan.generation
    return getattr(message, "generation", 0)


def is_member(plan: Plan | None, worker: WorkerId) -> bool:
    return plan is not None and worker in plan.workers


def inventory_for(process: Process | None, number: int) -> Inventory | None:
    """The inventory that answers PREPARE(number)."""
    inventory = process.inventory if process is not None else None
    return inventory if inventory is not None and inventory.answers == number else None


def may_hold(durable: Durable, process: Process) -> bool:
    """Whether a process is, or may come to be, in a world: then a recovery asks it."""
    if process.status.generation:
        return process.status.generation >= durable.first_valid_generation
    worlds = (durable.current, *durable.planned)
    return any(is_member(plan, process.worker) for plan in worlds)


def _of_attempt(durable: Durable, attempt: Attempt, process: Process) -> ToWorker | None:
    status = process.status
    if attempt.phase is AttemptPhase.PREPARE:
        asked = process.worker in attempt.starters if attempt.start else may_hold(durable, process)
        if asked and inventory_for(process, attempt.generation) is None:
            return Prepare(attempt.generation)
        return None
    knows = status.promised == attempt.generation and status.state in (MemberState.BUILDING, MemberState.READY)
    if attempt.plan is not None and is_member(attempt.plan, process.worker) and not knows:
        return PlanMessage(attempt.plan)
    return None


def _of_world(job: Job, process: Process) -> ToWorker | None:
    durable, status, world = job.durable, process.status, job.durable.current
    if world is None or status.state is MemberState.WARMING_UP:
        return None
    member = is_member(world, process.worker)
    if (
        not status.generation
        and status.state in (MemberState.BUILDING, MemberState.READY)
        and status.promised < world.generation
    ):
        return Prepare(durable.last_generation)  # a joiner of a start that was given up
    ends = Ask(AskKind.END, durable.ends_at, world.generation) if durable.ends_at and member else None
    if member and status.state is MemberState.READY and status.promised == world.generation:
        return ends if ends and not status.last_step else Open(world.generation)  # else it would begin another step
    if ends and not status.done:
        return ends  # before a plan, which begins by a vote of all
    if durable.planned:
        plan = durable.planned[-1]
        takes_part = member or is_member(plan, process.worker)
        if takes_part and status.promised < plan.generation and status.state is not MemberState.LEFT:
            return PlanMessage(plan)
    if durable.stopping and member and not status.done:
        return Ask(AskKind.STOP, STOP_REQUEST, world.generation)
    if durable.save is not None and process.worker == _first_member(job, world):
        return Ask(AskKind.SAVE, durable.save.number, world.generation)
    return None


def _first_member(job: Job, world: Plan) -> WorkerId | None:
    """The member of a world to ask for something that all carry out."""
    processes = (job.processes.get(member.worker) for member in world.members)
    roster = job.durable.roster
    return next((p.worker for p in processes if p and p.connection is not None and roster[p.worker].serves), None)
