"""The open streams of the workers, by a number that is never used again: the shell sends on them.

`sessions/service.py` opens and serves them. A welcomed worker gets its session token here, and a new one in time. No
call here waits or raises: messages for a closed stream are dropped. `StreamRefusals` counts refused streams by a few
kinds for `metrics.py`; the sentences are in the log.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import grpc.aio
from shoal_protos.errors import ShoalError
from shoal_protos.messages import Alive, PlanMessage, Refusal, SessionToken, ToWorker, Welcome
from shoal_protos.plan import Plan
from shoal_protos.wire import encode_controller

from shoal_controller.access.worker_tokens import SESSION_SECONDS, WorkerTokens
from shoal_controller.core.machine.events import Connected, Disconnected, Event, Proof, SeatAsked
from shoal_controller.jobs.dialogue import Dialogue

RENEW_SECONDS = SESSION_SECONDS / 3
"""A session token is replaced by a newer one so often."""
ALONE_SECONDS = SESSION_SECONDS / 2
"""So long a worker shows it by itself: the clocks of two controllers may be as far apart as what is left."""

ALIVE = encode_controller(Alive())

Context = grpc.aio.ServicerContext[bytes, bytes]


class StreamConnection(Protocol):
    """The connection of a stream, as the port of the sessions keeps it."""

    address: str
    peer: str
    """Host and port."""

    def let_in(self) -> None:
        """The caller is a worker: it has shown a right token, or said a good hello."""

    def refuse(self) -> None:
        """The caller has shown that it is none."""


class Stream:
    """One open stream: the dialogue, gRPC's end of it, whose it is, and what wakes its writer."""

    def __init__(self, connection: int, context: Context, guest: StreamConnection) -> None:
        self.dialogue = Dialogue(connection)
        self.context = context
        self.guest = guest
        self.stirred = asyncio.Event()
        self.holder: Proof | None = None
        """Whose session token it carries; None: it was not welcomed."""
        self.renewed = 0.0
        """When it was given, by the event loop's time."""
        self.cut = asyncio.get_running_loop().create_future()
        self._hung_up = False

    def stir(self) -> None:
        """Look at the dialogue again: it has something to say, is closing, or is cut off."""
        self.stirred.set()
        if self.dialogue.overflowed:
            self.cut_off()

    def cut_off(self) -> None:
        """End it now, whatever was still to be said."""
        if not self.cut.done():
            self.cut.set_result(None)

    def hang_up(self) -> None:
        """Say nothing more: the worker has hung up."""
        self._hung_up = True
        self.stirred.set()

    async def write(self) -> None:
        """Carry out what is said until the dialogue closes or the worker has hung up."""
        while True:
            self.stirred.clear()
            while self.dialogue.outbox and not self._hung_up:
                await self.context.write(self.dialogue.outbox.popleft())
            if self.dialogue.is_over or self._hung_up:
                return
            await self.stirred.wait()


class Streams:
    """All open streams by number."""

    def __init__(self, tokens: WorkerTokens | None = None, clock: Callable[[], float] = time.time) -> None:
        """`tokens`: None where sessions need none."""
        self.tokens = tokens
        self.refusals = StreamRefusals()
        self._clock = clock
        self._numbers = itertools.count(1)
        self._open: dict[int, Stream] = {}
        self._last_plan: tuple[Plan, bytes] | None = None

    def open(self, context: Context, guest: StreamConnection) -> Stream:
        """A new stream."""
        stream = Stream(next(self._numbers), context, guest)
        self._open[stream.dialogue.connection] = stream
        return stream

    def forget(self, stream: Stream) -> None:
        """The stream has ended."""
        del self._open[stream.dialogue.connection]

    def send(self, connection: int, message: ToWorker) -> None:
        """Put a message on a stream; one whose bounded outbox is full is ended."""
        stream = self._open.get(connection)
        if stream is not None:
            stream.dialogue.say(self._encoded(message))
            if isinstance(message, Welcome) and (hello := stream.dialogue.hello) is not None:
                stream.holder = Proof(hello.job, message.run, message.worker, hello.incarnation)
                self._give_token(stream)
            if isinstance(message, Refusal):
                self.refusals.count_of_job()
            stream.stir()

    def show_life(self, part: int, parts: int) -> None:
        """Say on every stream of a part of them that is read that this controller is there, and renew what ends soon. A
        thousand at once would hold up everything else.
        """
        due = asyncio.get_running_loop().time() - RENEW_SECONDS
        for connection, stream in self._open.items():
            if connection % parts == part and stream.dialogue.hello is not None and not stream.dialogue.outbox:
                stream.dialogue.say(ALIVE)
                if stream.renewed <= due:
                    self._give_token(stream)
                stream.stir()

    def close(self, connection: int) -> None:
        """End a stream after what was sent on it."""
        stream = self._open.get(connection)
        if stream is not None:
            stream.dialogue.close()
            stream.stir()

    def cut(self) -> None:
        """End all streams at once and without a word: their workers look for whoever leads now."""
        for stream in self._open.values():
            stream.cut_off()

    def states(self) -> dict[str, int]:
        """How many streams there are, by state."""
        dialogues = [stream.dialogue for stream in self._open.values()]
        greeting = sum(not dialogue.job and not dialogue.is_over for dialogue in dialogues)
        ending = sum(dialogue.is_over for dialogue in dialogues)
        return {"greeting": greeting, "open": len(dialogues) - greeting - ending, "ending": ending}

    def _give_token(self, stream: Stream) -> None:
        if self.tokens is None or stream.holder is None:
            return
        token = self.tokens.session(stream.holder, self._clock() + SESSION_SECONDS)
        stream.dialogue.say(encode_controller(SessionToken(token, ALONE_SECONDS)))
        stream.renewed = asyncio.get_running_loop().time()

    def _encoded(self, message: ToWorker) -> bytes:
        """One plan goes to all its members: it is written once."""
        if not isinstance(message, PlanMessage):
            return encode_controller(message)
        if self._last_plan is None or self._last_plan[0] is not message.plan:
            self._last_plan = (message.plan, encode_controller(message))
        return self._last_plan[1]


OF_ITS_JOB = "job"
"""The job has turned the worker away: another config, another run, a second process."""
OTHER = "other"
BY_STATUS: Mapping[str, str] = {
    "PERMISSION_DENIED": "token",
    "UNAUTHENTICATED": "expired_token",
    "RESOURCE_EXHAUSTED": "too_many",
    "NOT_FOUND": "unknown_job",
    "INVALID_ARGUMENT": "unreadable",
    "UNAVAILABLE": "not_leading",
}
"""Kinds by gRPC's status of the error; every other one is `other`."""


class StreamRefusals:
    """Counts of refused streams. Every kind exists as 0 from the start."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys((*BY_STATUS.values(), OF_ITS_JOB, OTHER), 0))

    def count(self, error: ShoalError) -> None:
        """The stream itself was refused."""
        self.counts[BY_STATUS.get(error.grpc_status, OTHER)] += 1

    def count_of_job(self) -> None:
        """Its job has refused the worker."""
        self.counts[OF_ITS_JOB] += 1


# ---- the streams of one job


class JobStreams:
    """The streams of one job's workers, for its runner: which there are, and what the shell adds to a message.

    `controllers`: where workers reach the controllers of this store, the one that leads first.
    """

    def __init__(self, streams: Streams, controllers: Callable[[], tuple[str, ...]], cluster: str) -> None:
        self._streams, self._controllers, self._cluster = streams, controllers, cluster
        self._connections: set[int] = set()

    def on_event(self, event: Event) -> None:
        """A stream comes or goes."""
        if isinstance(event, Connected | SeatAsked):
            self._connections.add(event.connection)
        elif isinstance(event, Disconnected):
            self._connections.discard(event.connection)

    def send(self, connection: int, message: ToWorker) -> None:
        """A welcome and a refusal say which store this is; a welcome also where all its controllers are."""
        if isinstance(message, Welcome):
            message = replace(message, cluster=self._cluster, controllers=self._controllers())
        elif isinstance(message, Refusal):
            message = replace(message, cluster=self._cluster)
        self._streams.send(connection, message)

    def close(self, connection: int) -> None:
        self._streams.close(connection)

    def send_last(self, connection: int, message: ToWorker) -> None:
        """Nothing comes after it, and nothing depends on which store this is."""
        self._streams.send(connection, message)
        self.close(connection)

    def send_last_to_all(self, message: ToWorker) -> None:
        for connection in sorted(self._connections):
            self.send_last(connection, message)

    def close_all(self) -> None:
        for connection in sorted(self._connections):
            self.close(connection)
