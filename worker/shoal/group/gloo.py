"""A group over gloo, built directly for one generation, with an `abort` that gloo itself does not have.

Called by the session's builder thread (`build_gloo`), by the training thread (sends, receives) and by the session's
thread (`abort`). Only here are torch's process groups known, and the casts that their missing types need.

[Note: abort] A receive that no member sends to is waited on for 1 ms. The application's time-out makes gloo close all
pairs of the group, so blocked operations raise, here and at the peers. A dead peer's receive raises "closed by peer"
and closes nothing else: then the next peer is tried. For the same reason no other wait here is a timed one. A thread
that waits for an operation that is half-way through is not woken by any of it: [Note: lost wake-ups] in
wait_threads.py.

`giving_way`: gloo's loop tries a connection's lock and, where another thread holds it, asks the kernel again at once.
And each message wakes its receiver's loop, which the kernel prefers to a computing thread: on a machine without an idle
processor, to a thread that sends just then and holds such a lock. The other loop spins until its time is over, which
took a tenth of a step of stage 3. A thread of the kernel's class for batches (sched(7), SCHED_BATCH) interrupts no
other by waking; where a processor is idle it runs as soon as any other.

`watch_reach`: gloo does not say for whom it waits. When connecting takes long, a thread asks every other member's
rendezvous server, as if to see whether the process lives; the building waits for those that do not answer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from shoal_protos.addresses import split_address
from torch import Tensor

from shoal.group.build import Cancellation, GroupSpec, gather
from shoal.group.group import (
    RESERVED_TAGS,
    AnyOrder,
    Group,
    GroupProgress,
    MessageOrder,
    SoloGroup,
    Waiting,
    Work,
    WorldChanged,
)
from shoal.group.host_peers import Gloo, GlooWork, HostPeers
from shoal.group.rendezvous import RendezvousClient, reachable
from shoal.group.wait_threads import Connection, WaitThreads
from shoal.process.forks import let_go_in_children

ABORT_TAG = RESERVED_TAGS
FOREVER = timedelta(days=1)
"""A shorter one would close the group under a first step that compiles. Sockets of gloo's pairs have it too."""
TIMEVAL = struct.Struct("@ll")
A_MOMENT = timedelta(milliseconds=1)
OWN_CLOSURE = "Application timeout"
"""What gloo says of pairs that this process itself has closed."""
SERVERS_END_SECONDS = 1.0
"""All have ended in a millisecond, but for those that gloo has forgotten."""
PIECE_BYTES = 4 << 20
"""A longer message travels in pieces of this size, so that a slow connection is seen to be alive."""


def build_gloo(spec: GroupSpec, cancellation: Cancellation) -> Group:
    """A `Transport`: meets the others at the builder's server and connects to each of them.

    Cancelled while it connects (milliseconds, unless a peer dies or freezes in them), it returns only when gloo gives
    up, 30 s later: the caller does not wait for it.
    """
    if spec.size == 1:
        return SoloGroup(spec.progress)
    host_peers = HostPeers()
    try:
        group = _meet(spec, cancellation, host_peers)
    except BaseException:
        host_peers.close()
        raise
    if cancellation.is_cancelled:
        group.abort()
        group.close()
        raise WorldChanged(f"the building of the group of generation {spec.generation} was cancelled")
    return group


def _meet(spec: GroupSpec, cancellation: Cancellation, host_peers: HostPeers) -> GlooGroup:
    address = host_peers.announce(spec.size)
    client = RendezvousClient(replace(spec, announces=address + spec.announces), cancellation)
    try:
        client.wait_for_all()
        announced = client.announced()
        gloo = _connect(client, spec)
    except RuntimeError as error:
        raise WorldChanged(f"the group of generation {spec.generation} could not be built: {error}") from None
    finally:
        client.close()
    hosts = [split_address(one)[0] for one in spec.addresses]
    host_peers.meet(spec.rank, hosts, [content[: len(address)] for content in announced], spec.on_death)
    return GlooGroup(
        gloo, spec.rank, spec.size, spec.progress, tuple(content[len(address) :] for content in announced), host_peers
    )


def _connect(client: RendezvousClient, spec: GroupSpec) -> Gloo:
    host, _ = split_address(spec.addresses[spec.rank])
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    let_go_in_children(_is_of_a_pair)
    with giving_way(), watch_reach(spec):
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = FOREVER
        return cast(Gloo, gloo(client, spec.rank, spec.size, options))


def _is_of_a_pair(tcp: socket.socket) -> bool:
    """Known by the time-out of its receives, which nobody else would wait for."""
    seconds, _ = TIMEVAL.unpack(tcp.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, TIMEVAL.size))
    return bool(seconds == FOREVER.total_seconds())


class _Posted:
    """A posted message. Keeps its tensor alive until it is done or the group is closed."""

    __slots__ = ("_group", "_tensor", "peer", "works")

    def __init__(self, group: GlooGroup, works: Sequence[GlooWork], tensor: Tensor, peer: int) -> None:
        self._group, self.peer = group, peer
        self.works = works
        self._tensor: Tensor | None = tensor

    def wait(self) -> None:
        self._group.wait([self])

    def forget(self) -> None:
        """Let go of gloo's works and of the tensor."""
        self.works, self._tensor = (), None


class _Waiting:
    """Messages that are waited for in one go: by one thread, one after the other."""

    def __init__(self, group: GlooGroup, posted: Sequence[_Posted]) -> None:
        self._group, self._posted = group, posted
        self._at = 0
        self._is_awaited = False
        """Whether the training thread waits for it; else it does something else, and that is what counts."""
        self._answers = group.wait_threads.begin(self) if posted else None

    def __iter__(self) -> Iterator[GlooWork]:
        """On the thread that waits. Only one peer is named: what the later ones sent may have come long ago."""
        progress = self._group.progress
        for at, one in enumerate(self._posted):
            self._at = at
            if self._is_awaited:
                progress.wait_for(one.peer)
            for work in one.works:
                yield work
                if self._is_awaited:
                    progress.on_piece()

    @property
    def peer(self) -> int:
        """Who is waited for at the moment."""
        return self._posted[self._at].peer

    @property
    def is_over(self) -> bool:
        return self._answers is None or not self._answers.empty()

    def wait(self) -> None:
        if self._answers is None:
            return
        self._mark_awaited()
        group, (answers, self._answers) = self._group, (self._answers, None)
        with group.progress.waiting():
            failure = group.wait_threads.end(answers, lambda: group.connection(self.peer))
        if failure is not None:
            raise group.on_failure(self.peer, failure)
        group.progress.go_on()
        for one in self._posted:
            group.in_flight.discard(one)
            one.forget()

    def _mark_awaited(self) -> None:
        """From now on the training thread waits: for whoever is waited for, who may be another in this moment."""
        self._is_awaited, named = True, -1
        while named != self._at:
            named = self._at
            self._group.progress.wait_for(self._posted[named].peer)


class GlooGroup:
    """A `Group` of two or more over gloo."""

    order: MessageOrder = AnyOrder()

    def __init__(
        self,
        gloo: Gloo,
        rank: int,
        size: int,
        progress: GroupProgress,
        announced: tuple[bytes, ...] = (),
        host_peers: HostPeers | None = None,
    ) -> None:
        """`announced`: by rank, what members have said of themselves where they met. `host_peers`: closed with it."""
        self.rank, self.size, self.progress, self.announced = rank, size, progress, announced
        self.in_flight: set[_Posted] = set()
        self._gloo: Gloo | None = gloo
        self._host_peers = host_peers or HostPeers()
        self._order = [(rank + distance) % size for distance in range(1, size)]
        self._closing = threading.Lock()
        self.wait_threads = WaitThreads()
        self._looks: dict[int, Connection] = {}
        self._aborted = False
        self._servers: list[threading.Thread] = []
        self._broken: set[int] = set()

    @property
    def broken_peers(self) -> tuple[int, ...]:
        return tuple(sorted(self._broken))

    # ---- on the training thread

    def send(self, tensor: Tensor, to: int, tag: int) -> _Posted:
        return self._post("send", tensor, to, tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> _Posted:
        return self._post("recv", tensor, source, tag)

    def all_gather(self, row: Tensor) -> Tensor:
        return gather(self, row)

    def serve(self, tag: int, elements: int, on_request: Callable[[int, Tensor], None]) -> None:
        """A thread for each peer: gloo waits for one message at a time."""
        for peer in self._order:
            given, name = (peer, tag, elements, on_request), f"shoal-group-serves-{peer}"
            self._servers.append(threading.Thread(target=self._serve, args=given, name=name, daemon=True))
            self._servers[-1].start()

    def _serve(self, peer: int, tag: int, elements: int, on_request: Callable[[int, Tensor], None]) -> None:
        with contextlib.suppress(RuntimeError, WorldChanged):  # the connection is closed
            while (gloo := self._gloo) is not None:
                message = torch.zeros(elements, dtype=torch.int64)
                work = gloo.recv([message], peer, tag)
                del gloo
                work.wait()
                on_request(peer, message)

    def _post(self, kind: str, tensor: Tensor, peer: int, tag: int) -> _Posted:
        gloo = self._gloo
        if gloo is None:
            raise WorldChanged("the group is closed")
        try:
            begin = self._host_peers.send if kind == "send" else self._host_peers.receive
            works = [begin(gloo, piece, peer, tag) for piece in _pieces(tensor)]
        except RuntimeError as error:
            failure = str(error)
        else:
            posted = _Posted(self, works, tensor, peer)
            self.in_flight.add(posted)
            return posted
        raise self.on_failure(peer, failure)

    def deliver(self, messages: Sequence[tuple[Tensor, int, int]]) -> None:
        """Sends small messages (with peer and tag) that are taken at once, from a thread that nobody watches: says
        nothing of progress. Raises `WorldChanged`.
        """
        posted = [self._post("send", *message) for message in messages]
        try:
            for one in posted:
                for work in one.works:
                    work.wait()
                self.in_flight.discard(one)
        except RuntimeError as error:
            raise WorldChanged(str(error)) from None

    def wait(self, works: Sequence[Work]) -> None:
        self.begin_wait(works).wait()

    def begin_wait(self, works: Sequence[Work]) -> Waiting:
        posted = cast(Sequence[_Posted], works)
        over = next((one for one in posted if not one.works), None)
        if over is not None:
            raise self.on_failure(over.peer, "the operation is over")
        return _Waiting(self, posted)

    def connection(self, peer: int) -> Connection:
        """To look at while a peer is waited for."""
        if peer not in self._looks:
            self._looks[peer] = Connection(lambda tensor: self._never_receive(tensor, peer))
        return self._looks[peer]

    def _never_receive(self, tensor: Tensor, peer: int) -> dist.Work | None:
        return self._gloo.recv([tensor], peer, ABORT_TAG) if self._gloo is not None else None

    def on_failure(self, peer: int, failure: str) -> WorldChanged:
        """Remembers whose connection broke, and says so."""
        if not self._aborted and OWN_CLOSURE not in failure:
            self._broken.add(peer)
        return WorldChanged(f"the exchange with rank {peer} of {self.size} failed: {failure}")

    # ---- from any thread

    def abort(self) -> None:
        """See [Note: abort]."""
        with self._closing:
            if self._aborted or self._gloo is None:
                return
            self._aborted = True
            any(_times_out(self._gloo, peer) for peer in self._order)
            self.wait_threads.free("the group was aborted")

    def close(self) -> None:
        if self.in_flight or self._servers:
            self.abort()
        with self._closing:
            self._gloo = None
            self.wait_threads.close()
            self._looks.clear()
            self._host_peers.close()
            for posted in tuple(self.in_flight):
                posted.forget()
            self.in_flight.clear()
        self._end_servers()

    def _end_servers(self) -> None:
        """Python ends a daemon's thread that comes back from gloo while the process ends, and C++ aborts the process
        for that.
        """
        end = time.monotonic() + SERVERS_END_SECONDS
        for thread in self._servers:
            thread.join(max(0.0, end - time.monotonic()))


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.nbytes <= PIECE_BYTES:
        return (tensor,)
    return cast(Sequence[Tensor], tensor.view(-1).split(PIECE_BYTES // tensor.element_size()))


def _times_out(gloo: Gloo, peer: int) -> bool:
    try:
        gloo.recv([torch.zeros(1)], peer, ABORT_TAG).wait(A_MOMENT)
    except RuntimeError as error:
        return "Timed out" in str(error)
    return False


THREADS = Path("/proc/self/task")
NAME = b"gloo_tcp_loop\n"


@contextlib.contextmanager
def giving_way() -> Iterator[None]:
    """A context in which gloo makes a loop and uses it. Where the system does not allow it all stays as it is."""
    before = _threads()
    yield
    for thread in _threads() - before:
        with contextlib.suppress(OSError):
            if (thread / "comm").read_bytes() == NAME and _is_usual(int(thread.name)):
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


def _is_usual(thread: int) -> bool:
    """Whether it runs as threads do of which nobody has said how: a process's class for real time, or for what is to
    wait for all others, is its loop's too.
    """
    return os.sched_getscheduler(thread) == os.SCHED_OTHER


def _threads() -> set[Path]:
    """Empty on a system that does not tell."""
    with contextlib.suppress(OSError):
        return set(THREADS.iterdir())
    return set()


LONG_SECONDS = 1.0
"""Connecting takes milliseconds."""
ANSWER_SECONDS = 1.0
MOST_NAMED = 8
"""So many that do not answer are enough."""


@contextmanager
def watch_reach(spec: GroupSpec) -> Iterator[None]:
    """Until the block ends the progress tells for whom the building waits: at first for everybody."""
    done = threading.Event()
    spec.progress.wait_for(*_others(spec))
    threading.Thread(target=_look, args=(spec, done), name="shoal-group-reach", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _others(spec: GroupSpec) -> list[int]:
    return [rank for rank in range(spec.size) if rank != spec.rank]


def _look(spec: GroupSpec, done: threading.Event) -> None:
    while not done.wait(LONG_SECONDS):
        away: list[int] = []
        for rank in _others(spec):
            if done.is_set() or len(away) == MOST_NAMED:
                break
            if not reachable(spec.addresses[rank], spec.incarnation(rank), ANSWER_SECONDS):
                away.append(rank)
        if away and not done.is_set():
            spec.progress.keep_waiting_for(away)
