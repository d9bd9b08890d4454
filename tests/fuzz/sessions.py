"""Streams that no worker of Shoal opens, over real gRPC to a real controller whose job trains on.

Each session is one manner of misbehaving, drawn from its own seed `BEGIN/NUMBER`, so that one can be played alone.
Genuine messages come from a real worker (`genuine`), which the manners cut, turn, repeat and falsify. A session ends
when the controller ends it, or has nothing more to say. `run.py` and `integration/test_fuzz.py` call it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from integration.cluster import TRAIN, ended, fork, send_signal, until
from integration.small_controller import SmallController
from lies import lies
from shoal_controller.access.worker_tokens import WorkerTokens
from shoal_protos import session_pb2 as pb
from shoal_protos.channel import MAX_MESSAGE_BYTES, METHOD
from shoal_protos.messages import (
    Heartbeat,
    Hello,
    Inventory,
    Ready,
    Refusal,
    Request,
    RequestKind,
    Result,
    Telemetry,
    ToController,
)
from shoal_protos.runs import every
from shoal_protos.wire import decode_controller, encode_worker

AT_ONCE = 8
ANSWER_SECONDS = 0.3
"""After so long without a word from the controller a session hangs up."""
SESSION_SECONDS = 20.0
"""No session takes longer."""
MOST_LIES = 400
"""Of one message, from which one is drawn."""


@dataclass(frozen=True, slots=True)
class Session:
    """What is sent, and as whom. `raw`: to the socket, beneath gRPC."""

    messages: Sequence[bytes] = ()
    token: str = ""
    raw: bytes = b""


@dataclass(frozen=True, slots=True)
class Target:
    """The controller and its job, as a stranger sees them."""

    port: int
    token: str
    """Of the job's workers."""
    secret: str
    """Which the controller derives tokens from."""
    hello: Hello
    """A genuine one, of a worker that the job does not know."""
    members: Sequence[str]
    """Ids of workers that train."""


@dataclass(slots=True)
class Ends:
    """How many sessions of each manner ended in which way."""

    by_manner: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def note(self, manner: str, end: str) -> None:
        self.by_manner.setdefault(manner, Counter())[end] += 1

    def story(self) -> str:
        lines = [
            f"{manner}: {', '.join(f'{end} {count}' for end, count in sorted(ends.items()))}"
            for manner, ends in sorted(self.by_manner.items())
        ]
        return "\n".join([*lines, *self.failures[:5]])


def genuine(options: Mapping[str, Any], folder: Path) -> Hello:
    """What a worker with these options says first."""
    with SmallController() as controller:
        env = {"SHOAL_CONTROLLER": controller.address, "SHOAL_JOB": "job", "SHOAL_WORKER_ID": "stranger"}
        pid = fork(TRAIN, {**options, "result": str(folder / "stranger.result")}, env, folder / "stranger.log")
        try:
            return controller.receives(Hello)
        finally:
            send_signal(pid, 9)
            until("the stranger to be gone", lambda: pid in ended())


def fuzz_sessions(target: Target, begin: int, numbers: Sequence[int]) -> Ends:
    """Play these sessions, several at a time."""
    ends = Ends()
    asyncio.run(_play_all(target, begin, numbers, ends))
    return ends


# ---- manners: what each sends


def noise(chance: random.Random, target: Target) -> Session:
    """Bytes that are no gRPC."""
    begins = (b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01")
    return Session(raw=chance.choice(begins) + chance.randbytes(chance.randrange(1, 5000)))


def random_bytes(chance: random.Random, target: Target) -> Session:
    """Messages of chance, perhaps after a hello."""
    begin = [encode_worker(_stranger(chance, target))] if chance.random() < 0.5 else []
    return Session([*begin, *(chance.randbytes(chance.randrange(300)) for _ in range(3))], target.token)


def truncated(chance: random.Random, target: Target) -> Session:
    """Genuine messages that end early."""
    messages = [encode_worker(one) for one in _messages_of(chance, target)]
    place = chance.randrange(len(messages))
    messages[place] = messages[place][: chance.randrange(len(messages[place]))]
    return Session(messages, target.token)


def turned_bits(chance: random.Random, target: Target) -> Session:
    """Genuine messages, some bytes of which are others."""
    messages = [bytearray(encode_worker(one)) for one in _messages_of(chance, target)]
    for _ in range(chance.randrange(1, 6)):
        message = chance.choice(messages)
        message[chance.randrange(len(message))] = chance.randrange(256)
    return Session([bytes(one) for one in messages], target.token)


def out_of_order(chance: random.Random, target: Target) -> Session:
    """Everything that a worker may say, in any order, the hello where chance has it."""
    messages = _messages_of(chance, target)
    chance.shuffle(messages)
    return Session([encode_worker(one) for one in messages], target.token)


def replayed(chance: random.Random, target: Target) -> Session:
    """The same again and again: hellos, heartbeats with the numbers of old ones."""
    messages = [encode_worker(one) for one in _messages_of(chance, target)]
    return Session([messages[0], *chance.choices(messages, k=20)], target.token)


def oversized(chance: random.Random, target: Target) -> Session:
    """A message beyond the bound, or one within it that is mostly one text."""
    hello = _stranger(chance, target)
    if chance.random() < 0.5:
        return Session([encode_worker(hello), bytes(MAX_MESSAGE_BYTES + chance.randrange(1, 99))], target.token)
    message = pb.WorkerMessage.FromString(encode_worker(hello))
    message.hello.host = "x" * chance.randrange(1 << 16, MAX_MESSAGE_BYTES - (1 << 16))
    return Session([message.SerializeToString()], target.token)


def lying(chance: random.Random, target: Target) -> Session:
    """One field of one message is at the end of its numbers, of a bad kind, too long or not there."""
    messages = [encode_worker(one) for one in _messages_of(chance, target)]
    place = chance.randrange(len(messages))
    false = list(islice(lies(pb.WorkerMessage.FromString(messages[place])), MOST_LIES))
    messages[place] = chance.choice(false)[1].SerializeToString()
    return Session(messages, target.token)


def wrong_types(chance: random.Random, target: Target) -> Session:
    """Fields with the numbers of the protocol and contents of any type, within one another."""
    return Session([_fields(chance, depth=4) for _ in range(3)], target.token)


def of_another_job(chance: random.Random, target: Target) -> Session:
    """A hello to a job that its token does not open, or that there is not."""
    hello = replace(_stranger(chance, target), job=chance.choice(["other", "job2", "jo", "JOB", "..", "victim-0"]))
    tokens = (target.token, WorkerTokens(target.secret).join("other", "r1"), "", "guess", f"{target.token}x")
    return Session([encode_worker(hello), encode_worker(_beat(hello))], chance.choice(tokens))


def without_a_right_token(chance: random.Random, target: Target) -> Session:
    """A hello to the job with a token of another one, or none."""
    hello = _stranger(chance, target)
    tokens = (
        WorkerTokens(target.secret).join("other", "r1"),
        "",
        "guess",
        target.token[:-1],
        WorkerTokens("guess").join(hello.job, "r1"),
    )
    return Session([encode_worker(hello)], chance.choice(tokens))


def as_another_worker(chance: random.Random, target: Target) -> Session:
    """A hello with the id of a worker that trains, or of another run; then all that it may say, for that one."""
    hello = replace(_stranger(chance, target), worker=chance.choice(target.members))
    if chance.random() < 0.3:
        hello = replace(hello, run="another-run", worker=f"w{chance.randrange(9)}")
    messages = [hello, *_messages_of(chance, target)[1:]]
    return Session([encode_worker(one) for one in messages], target.token)


def of_another_config(chance: random.Random, target: Target) -> Session:
    """A well-formed hello of a job with other lanes, blocks, steps or protocol."""
    hello = _stranger(chance, target)
    which, number = chance.choice(["lanes", "blocks", "max_steps", "mirrors", "state_bytes"]), chance.randrange(1, 99)
    other = replace(hello, description=replace(hello.description, **{which: number}))
    return Session([encode_worker(chance.choice([other, replace(hello, version=number)]))], target.token)


MANNERS: Sequence[Callable[[random.Random, Target], Session]] = (
    noise, random_bytes, truncated, turned_bits, out_of_order, replayed, oversized, lying, wrong_types,
    of_another_job, without_a_right_token, as_another_worker, of_another_config,
)  # fmt: skip


# ---- what a worker says


def _stranger(chance: random.Random, target: Target) -> Hello:
    """A genuine hello of a worker that nobody knows."""
    number = chance.randrange(1 << 30)
    return replace(target.hello, worker=f"stranger-{number}", incarnation=f"i{number}")


def _beat(hello: Hello) -> Heartbeat:
    return Heartbeat(replace(hello.status, sequence=hello.status.sequence + 1), Telemetry())


def _messages_of(chance: random.Random, target: Target) -> list[ToController]:
    """A hello, and then all that a worker may say, with small numbers that may be those of the job."""
    hello = _stranger(chance, target)
    generation, step = chance.randrange(1, 4), chance.randrange(30)
    status = replace(
        hello.status, sequence=chance.randrange(9), generation=generation, promised=generation, step=step,
        committed_in=generation, broken=tuple(target.members), done=chance.random() < 0.5, ended=chance.random() < 0.5,
        drain=chance.random() < 0.2,
    )  # fmt: skip
    blocks = every(hello.description.blocks)
    return [
        hello,
        _beat(hello),
        Heartbeat(status, Telemetry(loss=1.0)),
        Ready(generation, status),
        Inventory(generation, generation, step, generation, b"r", blocks, blocks, blocks, 0),
        Request(RequestKind.DRAIN, 1.0, generation),
        Result(step, fingerprint="f" * 64, loss=1.0, generation=generation),
        Result(step, failure="it failed", everyone=chance.random() < 0.5, generation=generation),
    ]


def _fields(chance: random.Random, depth: int) -> bytes:
    """Protobuf of some fields whose types are those of chance."""
    found = b""
    for _ in range(chance.randrange(1, 6)):
        number, kind = chance.randrange(1, 19), chance.choice([0, 1, 2, 2, 2, 5])
        found += _varint(number << 3 | kind)
        if kind == 0:
            found += _varint(chance.choice([0, 1, 1 << 31, (1 << 64) - 1]))
        elif kind == 2:
            inner = _fields(chance, depth - 1) if depth and chance.random() < 0.7 else chance.randbytes(9)
            found += _varint(len(inner)) + inner
        else:
            found += chance.randbytes(8 if kind == 1 else 4)
    return found


def _varint(number: int) -> bytes:
    found = b""
    while number > 127:
        found += bytes([number & 127 | 128])
        number >>= 7
    return found + bytes([number])


# ---- how they are played


async def _play_all(target: Target, begin: int, numbers: Sequence[int], ends: Ends) -> None:
    left = iter(numbers)
    await asyncio.gather(*(_play_some(target, begin, left, ends) for _ in range(AT_ONCE)))


async def _play_some(target: Target, begin: int, left: Any, ends: Ends) -> None:
    for number in left:
        chance = random.Random(f"{begin}/{number}")
        manner = MANNERS[number % len(MANNERS)]
        session = manner(chance, target)
        try:
            async with asyncio.timeout(SESSION_SECONDS):
                play = _play_raw if session.raw else _play
                ends.note(manner.__name__, await play(target.port, session))
        except TimeoutError:
            ends.failures.append(f"session {number} ({manner.__name__}) did not end within {SESSION_SECONDS:g} s")


async def _play(port: int, session: Session) -> str:
    """Send all, then hear until nothing more comes; how it ended."""
    metadata = (("authorization", f"Bearer {session.token}"),) if session.token else ()
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call = channel.stream_stream(METHOD)(metadata=metadata)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for message in session.messages:
                await call.write(message)
        try:
            while True:
                async with asyncio.timeout(ANSWER_SECONDS):
                    answer = await call.read()
                if not isinstance(answer, bytes):
                    break
                if isinstance(decode_controller(answer), Refusal):
                    return "refused"
        except TimeoutError:
            return "stayed"
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return (await call.code()).name


async def _play_raw(port: int, session: Session) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(session.raw)
        async with asyncio.timeout(ANSWER_SECONDS):
            while await reader.read(4096):
                continue
    except TimeoutError:
        return "stayed"
    except ConnectionError:
        return "reset"
    finally:
        writer.close()
    return "closed"
