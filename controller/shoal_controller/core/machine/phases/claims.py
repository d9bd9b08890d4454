"""What a worker claims, checked before any of it is believed.

A worker may be of another run, restored from an older state, or broken; one wrong number must not harm the job for
good. A message that claims the impossible is dropped whole and noted once; the job goes on as if it had not come.
Called with everything that workers say; changes nothing of the job but what has been noted.
"""

from __future__ import annotations

from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.messages import Heartbeat, Hello, Inventory, Ready, Refusal, Request, Result, Status
from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.effects import Close, Send
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.events import Connected
from shoal_controller.core.machine.phases.next_message import is_member
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.core.machine.turn import Turn, worker_of

GREATEST_STEP = 10**15
GREATEST_LEAP = 1 << 20
"""● So many generations may a first hello, or a checkpoint, be ahead of the store: one that was restored from a backup
knows fewer numbers than its workers, and no claim takes the numbers to their end.
"""
MOST_MESSAGES = 1 << 16
"""Most messages of one process between two that arrive."""


# ---- the run


def refuse_run(turn: Turn, event: Connected, sentence: str) -> None:
    """Turn a worker of another run away: nothing of what it says is read."""
    turn.do(Send(event.connection, Refusal(sentence, ends_members=bool(event.hello.run))))
    turn.do(Close(event.connection))
    turn.note(EventKind.REFUSED, sentence, host=event.hello.host, pid=event.hello.pid)


def run_mismatch(spec: JobSpec, hello: Hello) -> str:
    """● Why a worker does not belong to this run; empty where it does, or has been in no run yet."""
    name = hello.worker or "(new)"
    if hello.run == spec.run:
        return ""
    if hello.run:
        return (
            f"worker {name} on {hello.host} belongs to run {hello.run} of job {spec.job}, which is over or was "
            f"replaced; this is run {spec.run}. Start it again."
        )
    if hello.status.generation:
        return (
            f"worker {name} on {hello.host} says that it is in generation {hello.status.generation} of job {spec.job} "
            "and names no run; expected the run that it was welcomed to. Start it again."
        )
    return ""


# ---- numbers


def false_hello(turn: Turn, hello: Hello) -> str:
    """Why a hello cannot be true; empty where it can."""
    known = worker_of(turn, hello.incarnation) in turn.job.processes
    highest = turn.durable.last_generation + (0 if known or turn.world is None else GREATEST_LEAP)
    if hello.next_generation > turn.durable.last_generation + GREATEST_LEAP:
        return f"knows a checkpoint or a plan of generation {hello.next_generation}; expected at most {highest}"
    return _false_status(turn, hello.status, highest) or _false_world(turn, hello.worker, hello.status.generation)


def false_claim(turn: Turn, worker: WorkerId, message: Heartbeat | Ready | Inventory | Request | Result) -> str:
    """● Why a message of an accepted worker cannot be true; empty where it can."""
    match message:
        case Heartbeat(status) | Ready(status=status):
            return _false_standing(turn, worker, status)
        case Inventory(status=status):
            return (
                _false_inventory(turn, message)
                or _false_world(turn, worker, message.generation)
                or (_false_standing(turn, worker, status) if status is not None else "")
            )
        case Result():
            return _false_step(turn, message.step)
        case Request():
            return ""


def _false_standing(turn: Turn, worker: WorkerId, status: Status) -> str:
    return (
        _false_sequence(turn, worker, status)
        or _false_status(turn, status, turn.durable.last_generation)
        or _false_world(turn, worker, status.generation)
    )


def _false_sequence(turn: Turn, worker: WorkerId, status: Status) -> str:
    highest = turn.job.processes[worker].status.sequence + MOST_MESSAGES
    return f"has sent {status.sequence} messages; expected at most {highest}" if status.sequence > highest else ""


def refuse_claim(turn: Turn, worker: WorkerId, why: str, ignored: str = "messages") -> None:
    """What cannot be true is dropped whole, and noted once."""
    if worker not in turn.job.distrusted:
        turn.change(distrusted=turn.job.distrusted | {worker})
        turn.note(EventKind.CLAIM_REFUSED, f"worker {worker} says that it {why}. Such {ignored} are ignored.", worker)


def _false_status(turn: Turn, status: Status, highest: int) -> str:
    false_steps = (_false_step(turn, step) for step in (status.step, status.last_step))
    return _false_order(status, status.promised, highest) or next(filter(None, false_steps), "")


def _false_inventory(turn: Turn, inventory: Inventory) -> str:
    description = turn.durable.description
    if description is not None and inventory.lane >= description.lanes:
        return f"is in lane {inventory.lane}; the job has {description.lanes}"
    return _false_order(inventory, turn.durable.last_generation, turn.durable.last_generation) or _false_step(
        turn, inventory.step
    )


def _false_order(claim: Status | Inventory, promised: int, highest: int) -> str:
    """● committed_in ≤ generation ≤ promised ≤ the highest number given."""
    if claim.committed_in <= claim.generation <= promised <= highest:
        return ""
    return (
        f"has committed in generation {claim.committed_in}, is in {claim.generation} and has promised {promised}; "
        f"expected numbers that do not decrease, and at most {highest}"
    )


def _false_world(turn: Turn, worker: WorkerId, generation: int) -> str:
    """● Nobody is in a world whose plan does not have it: a stranger's word would begin a change that is planned."""
    plans = [turn.durable.current, *turn.durable.planned, turn.job.attempt.plan if turn.job.attempt else None]
    if all(plan is None or plan.generation != generation or is_member(plan, worker) for plan in plans):
        return ""
    return f"is in generation {generation}, of which it is not a member"


def _false_step(turn: Turn, step: int) -> str:
    """No step lies beyond the job's last one, or beyond that of the checkpoint that it began from. Of a job that its
    scripts end, none beyond what a config could say.
    """
    durable = turn.durable
    last = durable.last_step or (GREATEST_STEP if durable.description is not None else 0)
    if step <= last:
        return ""
    highest = max([last, durable.step, *(one.step for one in durable.checkpoints)])
    return f"is at step {step}; the job's last one is {highest}" if step > highest else ""


# ---- results and checkpoints


def counts_for_all(turn: Turn, worker: WorkerId) -> bool:
    """● Whether what a worker says of its end says something of the job: only of a member of the world or of the one
    that is being made, or of one that a launcher has started while there is no world yet.
    """
    attempt = turn.job.attempt
    if is_member(turn.world, worker) or is_member(attempt.plan if attempt is not None else None, worker):
        return True
    return turn.world is None and turn.record(worker).launched


def false_checkpoint(turn: Turn, worker: WorkerId, ref: CheckpointRef) -> str:
    """● Why a checkpoint cannot be one of the job's; empty where it may: where its config or `resume` says that they
    lie.
    """
    why = _false_place(turn, ref.path)
    if turn.job.processes[worker].status.generation and not why:
        why = _false_step(turn, ref.step)
    if not why and ref.generation > turn.durable.last_generation + GREATEST_LEAP:
        given = turn.durable.last_generation
        why = f"knows a checkpoint of generation {ref.generation}; the latest is {given}"
    return why


def _false_place(turn: Turn, path: str) -> str:
    description, resume = turn.durable.description, turn.spec.resume
    assert description is not None, "the first hello comes before any status"
    named = (resume,) if isinstance(resume, str) and resume != "latest" else ()
    places = (*description.checkpoint_places, *named)
    if any(_lies_in(place, path) for place in places) or (description.can_checkpoint and not places):
        return ""
    return f"knows a checkpoint at {path}; expected one in {', '.join(places) or 'no folder: the job has none'}"


def _lies_in(place: str, path: str) -> bool:
    """A relative place is one of the worker's own folders: the end of its name is all that is known of it."""
    place = place.removeprefix("file://").rstrip("/")
    if place.startswith("/") or "://" in place:
        return path == place or path.startswith(f"{place}/")
    return f"/{place.removeprefix('./').removeprefix('~/')}/" in f"{path}/"
