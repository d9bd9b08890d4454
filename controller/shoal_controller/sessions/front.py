"""Before the gRPC port: how many strangers gRPC has at a time, what each of them may bring, and for how long.

gRPC keeps what a caller sends before anybody can ask who it is, without end. So it gets no caller's bytes but through
here, unread (TLS or not is the same), and `service.py` tells when a stream has shown a right token, or where none is
needed said a good hello: from then on its connection is bounded by nothing here. Until then it is one of a few, of
all and of its address, with a deadline; those who come besides wait in line, and nothing of theirs is taken meanwhile.
One whose stream was refused gives its place to the next, is heard no more, and is left for a moment to read why.
See docs/decisions/0037-strangers-wait-before-grpc.md.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import socket
from collections import Counter
from collections.abc import Sequence
from enum import Enum, auto
from functools import partial

import structlog
from shoal_protos.addresses import join_address
from shoal_protos.channel import KEEPALIVE_TIMEOUT_SECONDS

from shoal_controller.access.callers import network_of
from shoal_controller.sessions.passage import Passage, reset
from shoal_controller.sessions.private_port import PrivatePort

MOST_BYTES = 1 << 16
"""What a stranger may bring."""
STRANGER_SECONDS = 5.0
"""How long it may take, in line and again at its place."""
FULL_SECONDS = 1.0
"""How much longer once it has brought all that it may. A large hello comes before its token was looked at."""
MOST_STRANGERS = 64
"""At a time, of all; so many may be there besides that were refused."""
MOST_OF_ADDRESS = 16
MOST_IN_LINE = 1024
REFUSED_SECONDS = 10.0
"""Until one that was refused must be gone. The answer to a wrong token may take half of it."""
ACCEPTED_AT_ONCE = 64
"""So that heartbeats come between."""
NO_DESCRIPTOR_SECONDS = 0.5
"""Between two attempts to accept where no descriptor is free."""
STOP_SECONDS = 1.0
"""How long callers may take to hang up once gRPC has stopped."""
LOG_SECONDS = 60.0
"""Strangers that were ended are told of so often at most."""

log = structlog.get_logger("shoal.front")


class Stage(Enum):
    """Where a guest is."""

    IN_LINE = auto()
    AT_A_PLACE = auto()
    """gRPC has it, and it has shown nothing yet."""
    REFUSED = auto()
    LET_IN = auto()
    GONE = auto()


class Guest:
    """One connection of a caller."""

    def __init__(self, front: Front, near: socket.socket, host: str, port: int) -> None:
        self._front = front
        self.near = near
        self.address = _plain(host)
        self.network = network_of(host)
        """What counts as one caller."""
        self.peer = join_address(self.address, port)
        self.stage = Stage.IN_LINE
        self.name = ""
        """What gRPC calls it; empty while it has not heard of it."""
        self.passage: Passage | None = None
        self.deadline: asyncio.TimerHandle | None = None

    def let_in(self) -> None:
        """It is a worker: it has shown a right token, or said a good hello."""
        self._front.on_let_in(self)

    def refuse(self) -> None:
        """It has shown that it is none."""
        self._front.on_refused(self)


class Front:
    """`listening`: where callers come. `open`, then `find` for each stream, then `close` and `stop`."""

    def __init__(self, listening: Sequence[socket.socket], grpc: PrivatePort) -> None:
        self._listening = listening
        self.port: int = listening[0].getsockname()[1]
        self._grpc = grpc
        self._guests: set[Guest] = set()
        self._by_name: dict[str, Guest] = {}
        self._line: dict[str, list[Guest]] = {}
        """By network, each as they came. The network that comes next is the first."""
        self._places: Counter[str] = Counter()
        """Those that are taken, by network."""
        self._refused: dict[Guest, None] = {}
        self._resting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._emptied = asyncio.Event()
        self._unlogged, self._logged_at = 0, float("-inf")
        self._most, self._most_in_line = _bounds(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    # ---- life

    def open(self) -> None:
        """Accept callers from now on."""
        for listening in self._listening:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def close(self) -> None:
        """Let go of the port; those who wait in line are gone."""
        loop = asyncio.get_running_loop()
        listening, self._listening = self._listening, ()
        for one in listening:
            loop.remove_reader(one)
            one.close()
        for pause in self._resting.values():
            pause.cancel()
        for guest in [guest for guest in self._guests if guest.stage is Stage.IN_LINE]:
            self._end(guest)

    async def stop(self) -> None:
        """To be called once gRPC has stopped: returns when what it has said is carried, or is late."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                while self._guests:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            for guest in list(self._guests):
                self._end(guest)
        self._grpc.close()

    # ---- for the service

    def find(self, peer: str) -> Guest | None:
        """Whose connection it is that gRPC calls so; None where that has ended."""
        return self._by_name.get(peer)

    def on_let_in(self, guest: Guest) -> None:
        """See `Guest.let_in`."""
        if guest.stage is not Stage.AT_A_PLACE or guest.passage is None:
            return
        self._leave(guest)
        guest.stage = Stage.LET_IN
        guest.passage.lift()
        self._seat()

    def on_refused(self, guest: Guest) -> None:
        """See `Guest.refuse`."""
        if guest.stage is not Stage.AT_A_PLACE or guest.passage is None:
            return
        self._leave(guest)
        guest.stage = Stage.REFUSED
        guest.passage.take_no_more()
        self._refused[guest] = None
        self._expect(guest, REFUSED_SECONDS)
        if len(self._refused) > self._most:
            self._end(next(iter(self._refused)))
        self._seat()

    # ---- the line

    def _accept(self, listening: socket.socket) -> None:
        try:
            for _ in range(ACCEPTED_AT_ONCE):
                self._take(*listening.accept())
        except (BlockingIOError, ConnectionAbortedError):
            pass
        except OSError as error:  # no descriptor is free
            loop = asyncio.get_running_loop()
            loop.remove_reader(listening)
            self._resting[listening] = loop.call_later(NO_DESCRIPTOR_SECONDS, self._go_on, listening)
            log.warning("a worker's connection cannot be accepted", error=str(error))
        self._seat()

    def _go_on(self, listening: socket.socket) -> None:
        del self._resting[listening]
        asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _take(self, near: socket.socket, place: tuple[str, int]) -> None:
        near.setblocking(False)
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEEPALIVE_TIMEOUT_SECONDS * 1000)
        guest = Guest(self, near, place[0], place[1])
        self._guests.add(guest)
        self._line.setdefault(guest.network, []).append(guest)
        self._expect(guest, STRANGER_SECONDS)
        if sum(map(len, self._line.values())) > self._most_in_line:
            self._end(max(self._line.values(), key=len)[0])

    def _seat(self) -> None:
        """Fill the places that are free."""
        while self._places.total() < self._most:
            network = next((one for one in self._line if self._places[one] < MOST_OF_ADDRESS), None)
            if network is None:
                return
            self._begin(self._line[network][-1])

    def _begin(self, guest: Guest) -> None:
        """Give it a place. Addresses come in turn, so that none keeps all others out; of an address the newest comes
        first: a worker waits for 4 s and then comes anew, so who has waited longer is gone or no worker.
        """
        self._leave(guest)
        if others := self._line.pop(guest.network, None):
            self._line[guest.network] = others
        guest.stage = Stage.AT_A_PLACE
        self._places[guest.network] += 1
        self._expect(guest, STRANGER_SECONDS)
        try:
            far, guest.name = self._grpc.connect()
        except OSError as error:
            log.warning("a worker's connection cannot be served", peer=guest.peer, error=str(error))
            return self._end(guest)
        self._by_name[guest.name] = guest
        guest.passage = Passage(guest.near, far, partial(self._on_end, guest))
        guest.passage.bound(MOST_BYTES, partial(self._on_full, guest))
        return None

    # ---- one guest

    def _expect(self, guest: Guest, seconds: float) -> None:
        """End it unless it has moved on by then."""
        guest.deadline = asyncio.get_running_loop().call_later(seconds, self._give_up, guest)

    def _on_full(self, guest: Guest) -> None:
        if guest.deadline is not None:
            guest.deadline.cancel()
        self._expect(guest, FULL_SECONDS)

    def _give_up(self, guest: Guest) -> None:
        """One line of the log stands for many: else it would be what strangers fill."""
        self._unlogged += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= LOG_SECONDS:
            why = "no right token, or where none is needed no good hello, came in time and within the bytes allowed"
            log.warning("connections of no worker were ended", connections=self._unlogged, last=guest.peer, why=why)
            self._unlogged, self._logged_at = 0, now
        self._end(guest)
        self._seat()

    def _on_end(self, guest: Guest) -> None:
        self._forget(guest)
        self._seat()

    def _end(self, guest: Guest) -> None:
        """Now, whatever it has not taken yet."""
        if guest.passage is not None:
            return guest.passage.end()
        reset(guest.near)
        guest.near.close()
        return self._forget(guest)

    def _forget(self, guest: Guest) -> None:
        """It has ended."""
        self._leave(guest)
        guest.stage = Stage.GONE
        self._guests.discard(guest)
        self._by_name.pop(guest.name, None)
        self._emptied.set()

    def _leave(self, guest: Guest) -> None:
        """It counts no more where it is."""
        if guest.deadline is not None:
            guest.deadline.cancel()
        network = guest.network
        match guest.stage:
            case Stage.IN_LINE:
                self._line[network].remove(guest)
                if not self._line[network]:
                    del self._line[network]
            case Stage.AT_A_PLACE:
                self._places[network] -= 1
                if not self._places[network]:
                    del self._places[network]
            case Stage.REFUSED:
                del self._refused[guest]


def _plain(host: str) -> str:
    """An IPv4 address as such where a port for both kinds shows it as an IPv6 one."""
    mapped = getattr(ipaddress.ip_address(host), "ipv4_mapped", None)
    return host if mapped is None else str(mapped)


def _bounds(files: int) -> tuple[int, int]:
    """Places, and those in line, of a process that may open so many files: a place takes three."""
    if files == resource.RLIM_INFINITY:
        return MOST_STRANGERS, MOST_IN_LINE
    return min(MOST_STRANGERS, files // 16), min(MOST_IN_LINE, files // 8)
