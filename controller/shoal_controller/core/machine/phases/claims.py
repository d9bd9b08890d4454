"""What a worker claims, checked before any of it is believed: by its token, its run, its model, its numbers.

A worker may be of another run, restored from an older state, or broken; one wrong number must not harm the job for
good. A message that claims the impossible is dropped whole and noted once; the job goes on as if it had not come.

A join token brings a process into its run, and opens no session of one that lives there already: that one was given a
session token, which names it. Nothing that a refused stream says is believed: the worker that it names does not change.

A hello names its model by a digest. Where the job does not know the model's text, one worker is asked for it, and the
others wait: a thousand that start together would tell the same megabytes. One that does not say it in time is let go,
and the next is asked. A worker that waits in vain says hello again.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.messages import (
    AskSeat,
    Describe,
    Heartbeat,
    Hello,
    Inventory,
    Ready,
    Refusal,
    Request,
    Result,
    Status,
)
from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.effects import Close, Send
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.events import Connected, SeatAsked
from shoal_controller.core.machine.phases.next_message import is_member
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.core.machine.turn import Turn, worker_of

GREATEST_STEP = 10**15
GREATEST_LEAP = 1 << 20
"""So many generations may a first hello, or a checkpoint, be ahead of the store: one that was restored from a backup
knows fewer numbers than its workers, and no claim takes the numbers to their end.
"""
MOST_MESSAGES = 1 << 16
"""Most messages of one process between two that arrive."""
REMEMBERED = 64
"""Refusals that are noted once."""
DESCRIBE_SECONDS = 10.0
"""How long a worker may take to tell its model: as long as it waits for the welcome itself."""


def turns_away(turn: Turn, event: Connected | SeatAsked) -> bool:
    """Refuse a stream of another run, or one that its token does not open. True: nothing else of it is to be read."""
    if sentence := run_mismatch(turn.spec, event.opening):
        _refuse_run(turn, event, sentence)
        return True
    if (refusal := token_refusal(turn, event)) is not None:
        _refuse_token(turn, event, refusal)
        return True
    return False


# ---- the token's proof


def token_refusal(turn: Turn, event: Connected | SeatAsked) -> Refusal | None:
    """Why a stream's token does not open what is asked for on it; None where it does."""
    proof, hello, spec = event.proof, event.opening, turn.spec
    if proof is None:
        return None
    name = hello.worker or "(new)"
    if proof.run != spec.run:
        return Refusal(
            f"worker {name} on {hello.host} shows a token of run {proof.run} of job {spec.job}, which is over or was "
            f"replaced; this is run {spec.run}. Set SHOAL_TOKEN to what `shoal token {spec.job}` prints now."
        )
    if proof.names_a_process:
        if (proof.worker, proof.incarnation) == (hello.worker, hello.incarnation):
            return None
        return Refusal(
            f"worker {name} on {hello.host} shows the session token of worker {proof.worker}, which opens no other "
            "session. Start it again."
        )
    living = _living_owner(turn, event)
    if living is None:
        return None
    return Refusal(
        f"worker {living} is in job {spec.job} already, and {hello.host} shows a join token in its name; expected "
        "the session token that it was given. Start another worker without SHOAL_WORKER_ID.", final=False,
    )  # fmt: skip


def _refuse_token(turn: Turn, event: Connected | SeatAsked, refusal: Refusal) -> None:
    """Turn it away, and note once for each sentence that it came."""
    turn.do(Send(event.connection, refusal))
    turn.do(Close(event.connection))
    if refusal.sentence not in turn.job.refused_tokens:
        turn.change(refused_tokens=(*turn.job.refused_tokens, refusal.sentence)[-REMEMBERED:])
        turn.note(EventKind.REFUSED, refusal.sentence, host=event.opening.host, pid=event.opening.pid)


def _living_owner(turn: Turn, event: Connected | SeatAsked) -> WorkerId | None:
    """The worker of this incarnation, where it surely has a session token or has its stream at this moment.

    A worker that has been sent a plan got its token before. One whose stream broke before its welcome came has none,
    and none is asked of it.
    """
    worker = worker_of(turn, event.opening.incarnation)
    if worker is None or turn.durable.roster[worker].ending is not None:
        return None
    process, attempt = turn.process(worker), turn.job.attempt
    has_stream = process is not None and process.connection not in (None, event.connection)
    was_sent_a_plan = (process is not None and process.status.promised > 0) or any(
        is_member(plan, worker) for plan in (turn.world, attempt.plan if attempt is not None else None)
    )
    return worker if has_stream or was_sent_a_plan else None


# ---- the run


def _refuse_run(turn: Turn, event: Connected | SeatAsked, sentence: str) -> None:
    """Turn a worker of another run away: nothing of what it says is read."""
    turn.do(Send(event.connection, Refusal(sentence, ends_members=bool(event.opening.run))))
    turn.do(Close(event.connection))
    turn.note(EventKind.REFUSED, sentence, host=event.opening.host, pid=event.opening.pid)


def run_mismatch(spec: JobSpec, hello: Hello | AskSeat) -> str:
    """Why a worker does not belong to this run; empty where it does, or has been in no run yet."""
    name = hello.worker or "(new)"
    if hello.run == spec.run:
        return ""
    if hello.run:
        return (
            f"worker {name} on {hello.host} belongs to run {hello.run} of job {spec.job}, which is over or was "
            f"replaced; this is run {spec.run}. Start it again."
        )
    if isinstance(hello, Hello) and hello.status.generation:
        return (
            f"worker {name} on {hello.host} says that it is in generation {hello.status.generation} of job {spec.job} "
            "and names no run; expected the run that it was welcomed to. Start it again."
        )
    return ""


# ---- the model's text


def is_model_unknown(turn: Turn, hello: Hello) -> bool:
    """Whether it names a model of which the job does not have the text."""
    jobs, theirs = turn.durable.description, hello.description
    return theirs.is_brief and (jobs is None or jobs.parameters_digest != theirs.parameters_digest)


def wait_for_model(turn: Turn, event: Connected) -> None:
    """It is answered when the text is known."""
    turn.put("greeting", event.connection, event)
    ask_for_model(turn, [event.connection])


def stop_waiting(turn: Turn, connection: int) -> None:
    """It waits no longer. Where it was asked, `ask` is to follow."""
    turn.drop("greeting", connection)
    turn.drop("asked_to_describe", connection)


def on_disconnected(turn: Turn, connection: int) -> None:
    """It will not tell: the next one is asked."""
    was_asked = connection in turn.job.asked_to_describe
    stop_waiting(turn, connection)
    if was_asked:
        ask_for_model(turn, turn.job.greeting)


def answerable(turn: Turn) -> list[Connected]:
    """The hellos that wait without need, in the order in which they came."""
    return [event for event in turn.job.greeting.values() if not is_model_unknown(turn, event.hello)]


def ask_for_model(turn: Turn, numbers: Iterable[int]) -> None:
    """Of those who wait on these connections, ask one of each model of which no worker has been asked: the one that
    came last. Of those before it many may be gone, unseen, where one does not answer.
    """
    greeting = turn.job.greeting
    asked = {greeting[number].hello.description.parameters_digest for number in turn.job.asked_to_describe}
    for number in reversed(list(numbers)):
        digest = greeting[number].hello.description.parameters_digest
        if digest not in asked:
            asked.add(digest)
            turn.put("asked_to_describe", number, turn.now)
            turn.do(Send(number, Describe()))


def on_tick(turn: Turn) -> None:
    """Let go of workers that were asked and do not answer."""
    late = [number for number, at in turn.job.asked_to_describe.items() if turn.now - at > DESCRIBE_SECONDS]
    for number in late:
        stop_waiting(turn, number)
        turn.do(Close(number))
    if late:
        ask_for_model(turn, turn.job.greeting)


# ---- numbers


def false_hello(turn: Turn, hello: Hello) -> str:
    """Why a hello cannot be true; empty where it can."""
    known = worker_of(turn, hello.incarnation) in turn.job.processes
    highest = turn.durable.last_generation + (0 if known or turn.world is None else GREATEST_LEAP)
    if hello.next_generation > turn.durable.last_generation + GREATEST_LEAP:
        return f"knows a checkpoint or a plan of generation {hello.next_generation}; expected at most {highest}"
    return _false_status(turn, hello.status, highest) or _false_world(turn, hello.worker, hello.status.generation)


def false_claim(turn: Turn, worker: WorkerId, message: Heartbeat | Ready | Inventory | Request | Result) -> str:
    """Why a message of an accepted worker cannot be true; empty where it can."""
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
    return (
        _false_order(status, status.promised, highest)
        or _false_step(turn, status.step)
        or _false_step(turn, status.last_step)
    )


def _false_inventory(turn: Turn, inventory: Inventory) -> str:
    description = turn.durable.description
    if description is not None and inventory.lane >= description.lanes:
        return f"is in lane {inventory.lane}; the job has {description.lanes}"
    return _false_order(inventory, turn.durable.last_generation, turn.durable.last_generation) or _false_step(
        turn, inventory.step
    )


def _false_order(claim: Status | Inventory, promised: int, highest: int) -> str:
    """committed_in ≤ generation ≤ promised ≤ the highest number given."""
    if claim.committed_in <= claim.generation <= promised <= highest:
        return ""
    return (
        f"has committed in generation {claim.committed_in}, is in {claim.generation} and has promised {promised}; "
        f"expected numbers that do not decrease, and at most {highest}"
    )


def _false_world(turn: Turn, worker: WorkerId, generation: int) -> str:
    """No worker is in a world whose plan does not have it: a stranger's word would begin a change that is planned."""
    current = turn.durable.current
    if current is not None and current.generation == generation and is_member(current, worker):
        return ""  # as nearly all
    plans = [current, *turn.durable.planned, turn.job.attempt.plan if turn.job.attempt else None]
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
    """Whether what a worker says of its end says something of the job: only of a member of the world or of the one
    that is being made, or of one that a launcher has started while there is no world yet.
    """
    attempt = turn.job.attempt
    if is_member(turn.world, worker) or is_member(attempt.plan if attempt is not None else None, worker):
        return True
    return turn.world is None and turn.record(worker).launched


def false_checkpoint(turn: Turn, worker: WorkerId, ref: CheckpointRef) -> str:
    """Why a checkpoint cannot be one of the job's; empty where it may: where its config or `resume` says that they
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
