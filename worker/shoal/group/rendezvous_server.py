"""The meeting place that each process opens at its start: boards on which members of a generation leave addresses.

Not torch's TCPStore: that one asks the name service about every connection it makes or takes (seconds, where names are
served badly), and its client cannot be called off. Here a guest says which meeting it comes to and how many are
expected; what a guest posts goes to all guests, what was posted before to whoever comes later, and a last entry, ALL,
when everybody is here. A board goes when its last guest has left. Whoever connects is told first which process this is:
so the controller knows that it has reached it, and may take a later refusal for its death.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable

from shoal_protos.rendezvous import HEAD, INCARNATION, MOST_KEY_BYTES, MOST_VALUE_BYTES, entry

from shoal.group.forks import bound_as, keep_in_children, let_go_in_children

ALL = "all"
"""Posted by the place itself once as many guests are here as are expected."""

MOST_GUESTS = 1 << 14
HELLO_SECONDS = 10.0
"""For a guest to say why it has come."""
BACKLOG = 1024
CLOSE_SECONDS = 5.0
TURNS = 4
"""Of the loop, until a connection that was just taken is a visit that can be ended. (asyncio forgets one that is taken
while its server closes.)"""


def split_address(address: str) -> tuple[str, int]:
    """`HOST:PORT`, or `[HOST]:PORT` where the host has colons."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def reachable(address: str, seconds: float = 1.0) -> bool:
    """Whether the process that opened this place can be connected to from here."""
    try:
        socket.create_connection(split_address(address), timeout=seconds).close()
    except OSError:
        return False
    return True


class _Board:
    """One meeting."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._posted = bytearray()
        self.guests: set[asyncio.StreamWriter] = set()

    async def entertain(self, reader: asyncio.StreamReader, guest: asyncio.StreamWriter) -> None:
        """Until the guest leaves."""
        guest.write(bytes(self._posted))
        self.guests.add(guest)
        if len(self.guests) == self._size:
            self._post(entry(ALL, b""))
        while True:
            self._post(entry(*await _read(reader)))

    def _post(self, news: bytes) -> None:
        if len(self._posted) > (2 * self._size + 1) * MOST_VALUE_BYTES:
            raise ValueError("a board is full")
        self._posted += news
        for guest in self.guests:
            guest.write(news)


class MeetingPlace:
    """This process's own, served by a thread of its own."""

    def __init__(self, host: str, incarnation: Callable[[], str] = str) -> None:
        """Raises `OSError` where the host is not this one. `incarnation` says which process this is."""
        self._incarnation = incarnation
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._sockets = bound_as(self._listener)
        let_go_in_children(self._sockets)
        self._boards: dict[str, _Board] = {}
        self._visits: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-meeting-place", daemon=True)
        self._thread.start()
        self._running.wait()

    def close(self) -> None:
        """Ends the thread and frees the port. Idempotent."""
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(CLOSE_SECONDS)
        keep_in_children(self._sockets)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._receive, sock=self._listener, backlog=BACKLOG)
        self._running.set()
        await self._over.wait()
        self._loop.remove_reader(self._listener)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        server.close()
        for guest in self._visits.values():
            guest.transport.abort()
        if self._visits:
            await asyncio.wait(self._visits, timeout=CLOSE_SECONDS)

    def _receive(self, reader: asyncio.StreamReader, guest: asyncio.StreamWriter) -> None:
        guest.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        visit = asyncio.create_task(self._entertain(reader, guest), name="a guest")
        self._visits[visit] = guest
        visit.add_done_callback(self._visits.pop)

    async def _entertain(self, reader: asyncio.StreamReader, guest: asyncio.StreamWriter) -> None:
        """One connection: a guest, somebody who looks whether we live, or somebody with no business here."""
        board, meeting = None, ""
        guest.write(entry(INCARNATION, self._incarnation().encode()))
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                meeting, size = await _read(reader)
            board = self._boards.setdefault(meeting, _Board(min(int(size), MOST_GUESTS)))
            await board.entertain(reader, guest)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, ValueError):
            return  # it has left, or what it says is no entry
        finally:
            if board is not None:
                board.guests.discard(guest)
                if not board.guests:
                    self._boards.pop(meeting, None)
            guest.transport.abort()  # one that is frozen would never take what is left for it
            with contextlib.suppress(OSError):
                await guest.wait_closed()


async def _read(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """The next entry. Raises `ValueError` (also for bytes that are no text) where it cannot be one."""
    name, size = HEAD.unpack(await reader.readexactly(HEAD.size))
    if name > MOST_KEY_BYTES or size > MOST_VALUE_BYTES:
        raise ValueError("an entry is too long")
    return (await reader.readexactly(name)).decode(), await reader.readexactly(size)
