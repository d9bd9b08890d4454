"""A watch: all changes of a range of keys, revision by revision, through any number of broken connections.

What etcd sends of one revision is handed over together, also where it comes in fragments, and a new stream begins after
the last revision that was complete: nothing is missed, nothing comes twice. While no server answers it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby

from shoal_controller.etcd import etcd_pb2 as pb
from shoal_controller.etcd.cluster import ATTEMPT_SECONDS, PAUSE_SECONDS, REQUEST_SECONDS, CallStream, Cluster
from shoal_controller.etcd.endpoint import TOKEN_IS_OLD, TRANSIENT, Method, NotSent, TokenRefused, Unanswered
from shoal_controller.etcd.errors import Compacted, Denied, Rejected, Unavailable
from shoal_controller.process.tasks import Endable

RANGE = Method("/etcdserverpb.KV/Range", pb.RangeResponse)
WATCH = Method("/etcdserverpb.Watch/Watch", pb.WatchResponse)

REFUSALS = ("permission denied", *TOKEN_IS_OLD)
"""Why etcd ends a watch at once: before 3.5.10 it says the first of a token, too, that it has forgotten."""

QUIET_SECONDS = 3.0
"""After so long without a message the server is asked for a sign of life."""

SIGN_OF_LIFE = pb.WatchRequest(progress_request=pb.WatchProgressRequest())

OF_NO_WATCH = -1
"""The id in its answer. Before etcd 3.5.8 its revision may be ahead of changes that are still to come."""


@dataclass(frozen=True, slots=True)
class Revision:
    """The changes that one transaction made to the watched keys."""

    revision: int
    events: tuple[pb.Event, ...]


@asynccontextmanager
async def watch(cluster: Cluster, key: bytes, end: bytes, after: int) -> AsyncIterator[AsyncIterator[Revision]]:
    """The changes after a revision. Entered, the watch is established: what is written from then on is seen. Entering
    raises `Unavailable`, `Denied`; iterating `Denied`, `Compacted`, `Closed`.
    """
    request = pb.WatchCreateRequest(key=key, range_end=end, progress_notify=True, fragment=True)
    watching = _Watch(cluster, request, after)
    async with aclosing(watching.responses()) as responses:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await anext(responses)
        except TimeoutError:
            raise Unavailable(watching.why) from None
        revisions = Endable(one async for found in responses for one in found)
        try:
            yield revisions
        finally:
            await revisions.end()


@dataclass
class _Watch:
    _cluster: Cluster
    _request: pb.WatchCreateRequest
    _after: int
    _parts: list[pb.Event] = field(default_factory=list)
    """Of a response that is not whole yet."""
    _has_new_login: bool = False
    why: str = "no server of etcd confirms a watch in time"
    stream: CallStream[pb.WatchResponse] = field(init=False)
    """The last one."""

    async def responses(self) -> AsyncGenerator[list[Revision]]:
        """What is complete with each response of etcd. Nothing is when it has confirmed the watch, the first of each
        stream; where that one fails there is another. `why` says what was in the way of the last one.
        """
        while True:
            try:
                async with self._cluster.stream(WATCH) as self.stream:
                    async with asyncio.timeout(ATTEMPT_SECONDS):
                        await self._create()
                    yield []
                    while True:
                        yield self._complete(await self._next())
            except TRANSIENT as error:
                self.why = str(error) or f"{self.stream.endpoint} does not confirm a watch in time"
                await asyncio.sleep(PAUSE_SECONDS)

    async def _create(self) -> None:
        self._parts = []
        self._request.start_revision = self._after + 1
        response = await self.stream.ask(pb.WatchRequest(create_request=self._request))
        if response.canceled and any(reason in response.cancel_reason for reason in REFUSALS):
            sentence = f"{self.stream.endpoint} answers: {response.cancel_reason}"
            if self._has_new_login:
                raise Denied(sentence)
            self._has_new_login = True
            raise TokenRefused(sentence)
        self._has_new_login = False
        self._complete(response)
        if response.header.revision < self._after:
            await self._check_revision()

    async def _check_revision(self) -> None:
        """This server lags behind, or all of them were restored from a backup: then revisions up to the last one that
        was handed over come again, with other changes, and etcd would hold them back. Raises `Compacted` for that.
        """
        try:
            now = (await self._cluster.call(RANGE, pb.RangeRequest(key=self._request.key, limit=1))).header.revision
        except Unavailable as error:
            raise NotSent(str(error)) from None
        if now < self._after:
            sentence = f"{self.stream.endpoint} is at revision {now}, before revision {self._after}, which it had"
            raise Compacted(sentence, now)

    async def _next(self) -> pb.WatchResponse:
        """The next message. A server that sends none is asked for a sign of life: one that is frozen keeps its
        connections, and gRPC's own pings have missed it. Raises `Unanswered` where it gives none, or what reading does.
        """
        reading = asyncio.create_task(self.stream.read(), name="etcd-watch")
        try:
            while not (await asyncio.wait([reading], timeout=QUIET_SECONDS))[0]:
                async with asyncio.timeout(ATTEMPT_SECONDS):
                    await self.stream.write(SIGN_OF_LIFE)
                if not (await asyncio.wait([reading], timeout=ATTEMPT_SECONDS))[0]:
                    raise Unanswered(f"{self.stream.endpoint} gives no sign of life on a watch")
            return reading.result()
        finally:
            reading.cancel()
            await asyncio.wait([reading])

    def _complete(self, response: pb.WatchResponse) -> list[Revision]:
        """The revisions that are complete with this response."""
        if response.compact_revision:
            sentence = f"{self.stream.endpoint} no longer has the changes after revision {self._after}"
            raise Compacted(sentence, response.compact_revision)
        if response.canceled:
            raise Rejected(f"{self.stream.endpoint} has ended a watch: {response.cancel_reason}")
        self._parts += response.events
        if response.fragment or response.created or response.watch_id == OF_NO_WATCH:
            return []
        by_revision = groupby(self._parts, lambda event: event.kv.mod_revision)
        found = [Revision(number, tuple(events)) for number, events in by_revision]
        self._parts = []
        # without events it says that nothing has changed up to there
        self._after = found[-1].revision if found else max(self._after, response.header.revision)
        return found
