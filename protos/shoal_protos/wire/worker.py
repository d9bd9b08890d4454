"""What a worker says, on the wire: hello, heartbeat, ready, inventory, request, result."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from google.protobuf.message import DecodeError

from shoal_protos import session_pb2 as pb
from shoal_protos.corruption import CorruptBlock
from shoal_protos.description import Description
from shoal_protos.errors import UserError
from shoal_protos.messages import (
    PROTOCOL_VERSION,
    AskSeat,
    Fault,
    Heartbeat,
    Hello,
    Inventory,
    MemberState,
    Ready,
    Request,
    RequestKind,
    Result,
    Status,
    ToController,
)
from shoal_protos.runs import Runs
from shoal_protos.shape import MOST_PROCESSES
from shoal_protos.wire import bounds
from shoal_protos.wire.telemetry import read_telemetry, write_telemetry
from shoal_protos.wire.worker_parts import (
    read_activity,
    read_checkpoint_ref,
    read_description,
    read_shape,
    read_unreadable,
    write_activity,
    write_checkpoint_ref,
    write_description,
    write_shape,
    write_unreadable,
)

STATES = {
    pb.MEMBER_STATE_WARMING_UP: MemberState.WARMING_UP,
    pb.MEMBER_STATE_WAITING: MemberState.WAITING,
    pb.MEMBER_STATE_JOINING: MemberState.JOINING,
    pb.MEMBER_STATE_TRAINING: MemberState.TRAINING,
    pb.MEMBER_STATE_STOPPED: MemberState.STOPPED,
    pb.MEMBER_STATE_BUILDING: MemberState.BUILDING,
    pb.MEMBER_STATE_READY: MemberState.READY,
    pb.MEMBER_STATE_LEFT: MemberState.LEFT,
}
STATE_NUMBERS = {point: number for number, point in STATES.items()}
FEW_LENGTHS = 64
"""Holdings of so many run lengths are remembered as read: what anybody may send is bounded."""
KINDS = {pb.REQUEST_KIND_DRAIN: RequestKind.DRAIN}
KIND_NUMBERS = {kind: number for number, kind in KINDS.items()}
UNREAD_DESCRIPTION = Description(0, 0, 0, 0, 0, 0, 0, (), "", {}, {}, False, False)
UNREAD_STATUS = Status(0, 0, MemberState.WARMING_UP, 0, step=-1, committed_in=0)
"""In place of what a hello of another protocol says of them."""


def encode_worker(message: ToController) -> bytes:
    """What a worker puts on its stream."""
    match message:
        case AskSeat():
            body = pb.WorkerMessage(ask_seat=_write_ask_seat(message))
        case Hello():
            body = pb.WorkerMessage(hello=_write_hello(message))
        case Heartbeat():
            body = pb.WorkerMessage(heartbeat=_write_heartbeat(message))
        case Ready():
            ready = pb.Ready(generation=message.generation, status=_write_status(message.status))
            body = pb.WorkerMessage(ready=ready)
        case Inventory():
            body = pb.WorkerMessage(inventory=_write_inventory(message))
        case Request():
            body = pb.WorkerMessage(request=_write_request(message))
        case Result():
            body = pb.WorkerMessage(result=_write_result(message))
    return body.SerializeToString()


def decode_worker(data: bytes, blocks: int = bounds.MAX_BLOCKS) -> ToController:
    """What the controller reads from a stream; `blocks` is the job's count, from the stream's hello.

    Raises `UserError` with one sentence for whatever is not a message within bounds.
    """
    message = _parsed(data)
    match message.WhichOneof("body"):
        case "ask_seat":
            return _read_ask_seat(message.ask_seat)
        case "hello":
            return _read_hello(message.hello)
        case "heartbeat":
            return _read_heartbeat(message.heartbeat, blocks)
        case "ready":
            return _read_ready(message.ready, blocks)
        case "inventory":
            return _read_inventory(message.inventory, blocks)
        case "request":
            return _read_request(message.request)
        case "result":
            return _read_result(message.result)
        case _:
            raise UserError("a worker's message is empty, or of a kind that this version of Shoal does not know")


def job_of_hello(data: bytes) -> str | None:
    """The job that a hello, or a question for a seat, names, before the rest of it is read; None for any other message.

    Raises `UserError` where that alone cannot be right.
    """
    message = _parsed(data)
    match message.WhichOneof("body"):
        case "hello":
            return _read_job(message.hello)
        case "ask_seat":
            return _read_job(message.ask_seat)
        case _:
            return None


def _parsed(data: bytes) -> pb.WorkerMessage:
    try:
        return pb.WorkerMessage.FromString(data)
    except DecodeError:
        raise UserError(f"{len(data)} bytes are not a worker's message of this version of Shoal") from None


# ---- hello


def _write_hello(hello: Hello) -> pb.Hello:
    return pb.Hello(
        version=hello.version,
        job=hello.job,
        worker=hello.worker,
        incarnation=hello.incarnation,
        address=hello.address,
        host=hello.host,
        pid=hello.pid,
        domain=hello.domain,
        description=write_description(hello.description),
        status=_write_status(hello.status),
        next_generation=hello.next_generation,
        run=hello.run,
        release=hello.release,
        coordinate=hello.coordinate,
    )


def _write_ask_seat(ask: AskSeat) -> pb.AskSeat:
    return pb.AskSeat(
        job=ask.job,
        worker=ask.worker,
        incarnation=ask.incarnation,
        host=ask.host,
        pid=ask.pid,
        cell=write_shape(ask.cell),
        run=ask.run,
        wish=ask.wish,
    )


def _read_ask_seat(message: pb.AskSeat) -> AskSeat:
    return AskSeat(
        job=_read_job(message),
        worker=message.worker and bounds.name("ask_seat.worker", message.worker),
        incarnation=bounds.name("ask_seat.incarnation", message.incarnation),
        host=bounds.label("ask_seat.host", message.host),
        pid=bounds.whole("ask_seat.pid", message.pid, least=1),
        cell=read_shape(message.cell),
        run=message.run and bounds.name("ask_seat.run", message.run),
        wish=bounds.whole("ask_seat.wish", message.wish, least=-1, most=MOST_PROCESSES - 1),
    )


def _read_job(message: pb.Hello | pb.AskSeat) -> str:
    if not message.job:
        raise UserError("hello.job is empty; set SHOAL_JOB to the name of a job of this controller")
    return bounds.name("hello.job", message.job)


def _read_hello(message: pb.Hello) -> Hello:
    opening = _read_opening(message)
    if opening.version != PROTOCOL_VERSION:
        return opening
    description = read_description(message.description)
    return replace(
        opening,
        address=bounds.address("hello.address", message.address),
        domain=bounds.label("hello.domain", message.domain),
        description=description,
        status=_read_status(message.status, description.blocks),
        next_generation=bounds.whole("hello.next_generation", message.next_generation),
        coordinate=_read_coordinate(message, description),
    )


def _read_coordinate(message: pb.Hello, description: Description) -> int:
    return bounds.whole("hello.coordinate", message.coordinate, most=description.cell.processes - 1)


def _read_opening(message: pb.Hello) -> Hello:
    """Read what means the same in every version of the protocol, so that a worker of another one can be named."""
    return Hello(
        version=message.version,
        job=_read_job(message),
        worker=message.worker and bounds.name("hello.worker", message.worker),
        incarnation=bounds.name("hello.incarnation", message.incarnation),
        address="",
        host=bounds.label("hello.host", message.host),
        pid=bounds.whole("hello.pid", message.pid, least=1),
        domain="",
        description=UNREAD_DESCRIPTION,
        status=UNREAD_STATUS,
        run=message.run and bounds.name("hello.run", message.run),
        release=bounds.label("hello.release", message.release),
    )


# ---- status and heartbeat


def _write_status(status: Status) -> pb.Status:
    return pb.Status(
        sequence=status.sequence,
        generation=status.generation,
        state=STATE_NUMBERS[status.state],
        promised=status.promised,
        step=status.step,
        committed_in=status.committed_in,
        boundaries=status.boundaries,
        holds=status.holds.encode(),
        broken=status.broken,
        dead=status.dead,
        done=status.done,
        ended=status.ended,
        drain=status.drain,
        grace_seconds=status.grace_seconds,
        checkpoint=write_checkpoint_ref(status.checkpoint) if status.checkpoint is not None else None,
        unreadable_checkpoint=write_unreadable(status.unreadable_checkpoint)
        if status.unreadable_checkpoint is not None
        else None,
        highest_saved=status.highest_saved,
        last_step=status.last_step,
        corrupt=[
            pb.CorruptBlock(block=one.block, first_step=one.first_step, step=one.step, workers=one.workers)
            for one in status.corrupt[-bounds.MAX_CORRUPT :]
        ],
    )


def _read_status(message: pb.Status, blocks: int) -> Status:
    broken = bounds.few("status.broken", message.broken, bounds.MAX_MEMBERS)
    dead = bounds.few("status.dead", message.dead, bounds.MAX_MEMBERS)
    return Status(
        sequence=bounds.whole("status.sequence", message.sequence),
        generation=bounds.whole("status.generation", message.generation),
        state=bounds.word("status.state", STATES, message.state),
        promised=bounds.whole("status.promised", message.promised),
        step=bounds.whole("status.step", message.step, least=-1),
        committed_in=bounds.whole("status.committed_in", message.committed_in),
        boundaries=bounds.whole("status.boundaries", message.boundaries),
        holds=_read_holds(tuple(message.holds), blocks),
        broken=tuple(bounds.name("status.broken", worker) for worker in broken),
        dead=tuple(bounds.name("status.dead", incarnation) for incarnation in dead),
        done=message.done,
        ended=message.ended,
        drain=message.drain,
        grace_seconds=bounds.seconds("status.grace_seconds", message.grace_seconds),
        checkpoint=read_checkpoint_ref(message.checkpoint) if message.HasField("checkpoint") else None,
        unreadable_checkpoint=read_unreadable(message.unreadable_checkpoint)
        if message.HasField("unreadable_checkpoint")
        else None,
        highest_saved=bounds.whole("status.highest_saved", message.highest_saved),
        last_step=bounds.whole("status.last_step", message.last_step),
        corrupt=tuple(
            _read_corrupt(block, blocks) for block in bounds.few("status.corrupt", message.corrupt, bounds.MAX_CORRUPT)
        ),
    )


def _read_holds(lengths: tuple[int, ...], blocks: int) -> Runs:
    """Every heartbeat says them again, and they seldom change."""
    return (_read_few if len(lengths) <= FEW_LENGTHS else _read_many)(lengths, blocks)


def _read_many(lengths: tuple[int, ...], blocks: int) -> Runs:
    return bounds.runs("status.holds", lengths, blocks)


_read_few = lru_cache(maxsize=1 << 12)(_read_many)


def _read_corrupt(message: pb.CorruptBlock, blocks: int) -> CorruptBlock:
    workers = bounds.few("corrupt.workers", message.workers, bounds.MAX_MEMBERS)
    return CorruptBlock(
        block=bounds.whole("corrupt.block", message.block, most=blocks - 1),
        first_step=bounds.whole("corrupt.first_step", message.first_step),
        step=bounds.whole("corrupt.step", message.step),
        workers=tuple(bounds.name("corrupt.workers", worker) for worker in workers),
    )


def _write_heartbeat(heartbeat: Heartbeat) -> pb.Heartbeat:
    return pb.Heartbeat(
        status=_write_status(heartbeat.status),
        telemetry=write_telemetry(heartbeat.telemetry),
        echo=heartbeat.echo,
        activity=write_activity(heartbeat.activity),
        builds=map(write_activity, heartbeat.builds[-bounds.MAX_BUILDS :]),
    )


def _read_heartbeat(message: pb.Heartbeat, blocks: int) -> Heartbeat:
    return Heartbeat(
        _read_status(message.status, blocks),
        read_telemetry(message.telemetry),
        bounds.whole("heartbeat.echo", message.echo),
        read_activity(message.activity),
        tuple(map(read_activity, bounds.few("heartbeat.builds", message.builds, bounds.MAX_BUILDS))),
    )


# ---- the rest


def _read_ready(message: pb.Ready, blocks: int) -> Ready:
    return Ready(bounds.whole("ready.generation", message.generation, least=1), _read_status(message.status, blocks))


def _write_inventory(inventory: Inventory) -> pb.Inventory:
    return pb.Inventory(
        answers=inventory.answers,
        generation=inventory.generation,
        step=inventory.step,
        committed_in=inventory.committed_in,
        record=inventory.record,
        holds=inventory.holds.encode(),
        pending=inventory.pending.encode(),
        current=inventory.current.encode(),
        lane=inventory.lane,
        status=_write_status(inventory.status) if inventory.status is not None else None,
    )


def _read_inventory(message: pb.Inventory, blocks: int) -> Inventory:
    return Inventory(
        answers=bounds.whole("inventory.answers", message.answers, least=1),
        generation=bounds.whole("inventory.generation", message.generation),
        step=bounds.whole("inventory.step", message.step, least=-1),
        committed_in=bounds.whole("inventory.committed_in", message.committed_in),
        record=bounds.raw("inventory.record", message.record),
        holds=bounds.runs("inventory.holds", message.holds, blocks),
        pending=bounds.runs("inventory.pending", message.pending, blocks),
        current=bounds.runs("inventory.current", message.current, blocks),
        lane=bounds.whole("inventory.lane", message.lane, least=-1, most=bounds.MAX_LANES - 1),
        status=_read_status(message.status, blocks) if message.HasField("status") else None,
    )


def _write_request(request: Request) -> pb.Request:
    return pb.Request(
        kind=KIND_NUMBERS[request.kind], grace_seconds=request.grace_seconds, generation=request.generation
    )


def _read_request(message: pb.Request) -> Request:
    return Request(
        kind=bounds.word("request.kind", KINDS, message.kind),
        grace_seconds=bounds.seconds("request.grace_seconds", message.grace_seconds),
        generation=bounds.whole("request.generation", message.generation),
    )


def _write_result(result: Result) -> pb.Result:
    return pb.Result(
        step=result.step,
        fingerprint=result.fingerprint,
        loss=result.loss,
        failure=bounds.readable(result.failure),
        everyone=result.everyone,
        generation=result.generation,
        fault=_write_fault(result.fault) if result.fault is not None else None,
    )


def _read_result(message: pb.Result) -> Result:
    return Result(
        step=bounds.whole("result.step", message.step, least=-1),
        fingerprint=message.fingerprint and bounds.name("result.fingerprint", message.fingerprint),
        loss=message.loss if message.HasField("loss") else None,
        failure=bounds.text("result.failure", message.failure),
        everyone=message.everyone,
        generation=bounds.whole("result.generation", message.generation),
        fault=_read_fault(message.fault) if message.HasField("fault") else None,
    )


def _write_fault(fault: Fault) -> pb.Fault:
    texts = (bounds.readable(text) for text in (fault.exception, fault.message, fault.frame))
    exception, message, frame = texts
    return pb.Fault(exception=exception, message=message, frame=frame, outage=fault.outage)


def _read_fault(message: pb.Fault) -> Fault:
    return Fault(
        exception=bounds.text("fault.exception", message.exception),
        message=bounds.text("fault.message", message.message),
        frame=bounds.text("fault.frame", message.frame),
        outage=message.outage,
    )
