"""What the controller says, on the wire: describe, welcome, ping, prepare, plan, open, request and others."""

from __future__ import annotations

import json

from google.protobuf.message import DecodeError

from shoal_protos import session_pb2 as pb
from shoal_protos.errors import UserError
from shoal_protos.messages import (
    Alive,
    Ask,
    AskKind,
    Describe,
    Drain,
    Ending,
    Open,
    Ping,
    PlanMessage,
    Prepare,
    Refusal,
    Seat,
    SessionToken,
    Shutdown,
    ToWorker,
    Welcome,
)
from shoal_protos.shape import MOST_PROCESSES
from shoal_protos.wire import bounds
from shoal_protos.wire.plan import read_plan, write_plan

KINDS = {pb.ASK_KIND_SAVE: AskKind.SAVE, pb.ASK_KIND_STOP: AskKind.STOP, pb.ASK_KIND_END: AskKind.END}
KIND_NUMBERS = {kind: number for number, kind in KINDS.items()}
ENDINGS = {
    pb.ENDING_DONE: Ending.DONE,
    pb.ENDING_DRAINED: Ending.DRAINED,
    pb.ENDING_FAILED: Ending.FAILED,
    pb.ENDING_START_OVER: Ending.START_OVER,
    pb.ENDING_REPLACED: Ending.REPLACED,
}
ENDING_NUMBERS = {ending: number for number, ending in ENDINGS.items()}


def encode_controller(message: ToWorker) -> bytes:
    """What the controller puts on a worker's stream."""
    return _write(message).SerializeToString()


def _write(message: ToWorker) -> pb.ControllerMessage:
    match message:
        case Describe():
            return pb.ControllerMessage(describe=pb.Describe())
        case Seat(worker, coordinate):
            return pb.ControllerMessage(seat=pb.Seat(worker=worker, coordinate=coordinate))
        case Welcome():
            return pb.ControllerMessage(welcome=_write_welcome(message))
        case Alive():
            return pb.ControllerMessage(alive=pb.Alive())
        case SessionToken(token, seconds):
            return pb.ControllerMessage(session_token=pb.SessionToken(token=token, seconds=seconds))
        case Ping():
            return pb.ControllerMessage(ping=pb.Ping(number=message.number, generation=message.generation))
        case Prepare():
            return pb.ControllerMessage(prepare=pb.Prepare(generation=message.generation))
        case PlanMessage():
            return pb.ControllerMessage(plan=write_plan(message.plan))
        case Open():
            return pb.ControllerMessage(open=pb.Open(generation=message.generation))
        case Ask(kind, number, generation):
            return pb.ControllerMessage(request=pb.Ask(kind=KIND_NUMBERS[kind], number=number, generation=generation))
        case Drain(grace_seconds, generation):
            return pb.ControllerMessage(drain=pb.Drain(grace_seconds=grace_seconds, generation=generation))
        case Shutdown(ending, reason, generation):
            shutdown = pb.Shutdown(ending=ENDING_NUMBERS[ending], reason=bounds.readable(reason), generation=generation)
            return pb.ControllerMessage(shutdown=shutdown)
        case Refusal():
            return pb.ControllerMessage(error=_write_refusal(message))


def decode_controller(data: bytes) -> ToWorker:
    """What a worker reads from its stream. Raises `UserError` for whatever is not a message within bounds."""
    try:
        message = pb.ControllerMessage.FromString(data)
    except DecodeError:
        raise UserError(f"{len(data)} bytes are not a controller's message of this version of Shoal") from None
    match message.WhichOneof("body"):
        case "describe":
            return Describe()
        case "seat":
            coordinate = bounds.whole("seat.coordinate", message.seat.coordinate, most=MOST_PROCESSES - 1)
            return Seat(bounds.name("seat.worker", message.seat.worker), coordinate)
        case "welcome":
            return _read_welcome(message.welcome)
        case "alive":
            return Alive()
        case "session_token":
            return _read_session_token(message.session_token)
        case "ping":
            ping = message.ping
            return Ping(bounds.whole("ping.number", ping.number), bounds.whole("ping.generation", ping.generation))
        case "prepare":
            return Prepare(bounds.whole("prepare.generation", message.prepare.generation, least=1))
        case "plan":
            return PlanMessage(read_plan(message.plan))
        case "open":
            return Open(bounds.whole("open.generation", message.open.generation, least=1))
        case "request":
            return _read_ask(message.request)
        case "drain":
            return _read_drain(message.drain)
        case "shutdown":
            return _read_shutdown(message.shutdown)
        case "error":
            return _read_refusal(message.error)
        case _:
            raise UserError("a controller's message is empty, or of a kind that this version of Shoal does not know")


def _write_welcome(welcome: Welcome) -> pb.Welcome:
    return pb.Welcome(
        worker=welcome.worker,
        heartbeat_seconds=welcome.heartbeat_seconds,
        reconnect_seconds=welcome.reconnect_seconds,
        stall_seconds=welcome.stall_seconds,
        generation=welcome.generation,
        resume=welcome.resume,
        opened_generations=welcome.opened_generations.encode(),
        run=welcome.run,
        cluster=welcome.cluster,
        step=welcome.step,
        loss=welcome.loss,
        controllers=welcome.controllers,
        checkpoint=welcome.checkpoint,
        checkpoint_marks=welcome.checkpoint_marks,
    )


def _read_welcome(message: pb.Welcome) -> Welcome:
    return Welcome(
        worker=bounds.name("welcome.worker", message.worker),
        heartbeat_seconds=bounds.seconds(
            "welcome.heartbeat_seconds", message.heartbeat_seconds, bounds.LEAST_HEARTBEAT_SECONDS
        ),
        reconnect_seconds=bounds.seconds("welcome.reconnect_seconds", message.reconnect_seconds),
        stall_seconds=bounds.seconds("welcome.stall_seconds", message.stall_seconds),
        generation=bounds.whole("welcome.generation", message.generation),
        resume=_read_resume(message.resume),
        opened_generations=bounds.runs(
            "welcome.opened_generations",
            bounds.few("welcome.opened_generations", message.opened_generations, bounds.MAX_ENTRIES),
            bounds.MAX_NUMBER,
        ),
        run=message.run and bounds.name("welcome.run", message.run),
        cluster=message.cluster and bounds.name("welcome.cluster", message.cluster),
        step=bounds.whole("welcome.step", message.step),
        loss=message.loss if message.HasField("loss") else None,
        controllers=tuple(
            bounds.address("welcome.controllers", one)
            for one in bounds.few("welcome.controllers", message.controllers, bounds.MAX_CONTROLLERS)
        ),
        checkpoint=bounds.label("welcome.checkpoint", message.checkpoint),
        checkpoint_marks=bounds.labels("welcome.checkpoint_marks", message.checkpoint_marks, bounds.MAX_MARKS),
    )


def _read_resume(text: str) -> str:
    """A job's `resume` as JSON: a path, a step, or whether to resume at all."""
    bounds.label("welcome.resume", text)
    try:
        is_one = not text or isinstance(json.loads(text), str | int | bool)
    except ValueError:
        is_one = False
    if not is_one:
        raise UserError(f"welcome.resume is {text[:60]!r}; expected a text, a step, true or false as JSON, or nothing")
    return text


def _read_session_token(message: pb.SessionToken) -> SessionToken:
    return SessionToken(
        token=bounds.credential("session_token.token", message.token),
        seconds=bounds.seconds("session_token.seconds", message.seconds),
    )


def _read_ask(message: pb.Ask) -> Ask:
    return Ask(
        kind=bounds.word("request.kind", KINDS, message.kind),
        number=bounds.whole("request.number", message.number),
        generation=bounds.whole("request.generation", message.generation),
    )


def _read_drain(message: pb.Drain) -> Drain:
    return Drain(
        grace_seconds=bounds.seconds("drain.grace_seconds", message.grace_seconds),
        generation=bounds.whole("drain.generation", message.generation),
    )


def _read_shutdown(message: pb.Shutdown) -> Shutdown:
    return Shutdown(
        ending=bounds.word("shutdown.ending", ENDINGS, message.ending),
        reason=bounds.text("shutdown.reason", message.reason),
        generation=bounds.whole("shutdown.generation", message.generation),
    )


def _write_refusal(refusal: Refusal) -> pb.Refusal:
    return pb.Refusal(
        sentence=bounds.readable(refusal.sentence),
        final=refusal.final,
        ends_members=refusal.ends_members,
        cluster=refusal.cluster,
        unknown_job=refusal.unknown_job,
        generation=refusal.generation,
        leader=refusal.leader,
    )


def _read_refusal(message: pb.Refusal) -> Refusal:
    return Refusal(
        sentence=bounds.text("error.sentence", message.sentence),
        final=message.final,
        ends_members=message.ends_members,
        cluster=message.cluster and bounds.name("error.cluster", message.cluster),
        unknown_job=message.unknown_job,
        generation=bounds.whole("error.generation", message.generation),
        leader=message.leader and bounds.address("error.leader", message.leader),
    )
