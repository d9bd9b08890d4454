"""The rendezvous server that each process opens at its start: rooms in which members of a generation leave addresses.

Not torch's TCPStore: that one asks the name service about every connection it makes or takes (seconds, where names are
served badly), and its client cannot be cancelled. Here a client says which room it enters and how many are
expected; what a client posts goes to all clients, what was posted before to whoever comes later, and a last entry, ALL,
when everybody is here. A room goes when its last client has left. Whoever connects is told first which process this is:
so the controller knows that it has reached it, and may take a later refusal for its death.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
from collections.abc import Callable

from shoal_protos.addresses import join_address, split_address
from shoal_protos.rendezvous import HEAD, INCARNATION, MOST_KEY_BYTES, MOST_VALUE_BYTES, entry

from shoal.group.forks import bound_as, keep_in_children, let_go_in_children

ALL = "all"
"""Posted by the server itself once as many clients are here as are expected."""

MOST_CLIENTS = 1 << 14
MOST_CONNECTIONS = 1 << 12
"""At once; fewer where the process may not have twice as many descriptors, which training needs too."""
HELLO_SECONDS = 10.0
"""Time for a client to say which room it enters."""
BACKLOG = 1024
CLOSE_SECONDS = 5.0
TURNS = 4
"""Turns of the loop until a connection that was just accepted can be ended. (asyncio forgets one that is accepted
while its server closes.)"""


def reachable(address: str, incarnation: str, seconds: float = 1.0) -> bool:
    """Whether the process that serves this address can be connected to from here. One that is too busy to say who it is
    can be; another process that has got its port is not the one that was looked for.
    """
    try:
        connection = socket.create_connection(split_address(address), timeout=seconds)
    except OSError:
        return False
    with connection, connection.makefile("rb") as stream:
        try:
            return is_greeted(stream.read, incarnation)
        except TimeoutError:
            return True
        except OSError:
            return False


def is_greeted(read: Callable[[int], bytes], incarnation: str) -> bool:
    """Whether the first that a connection says is that the process of this incarnation answers."""
    greeting = entry(INCARNATION, incarnation.encode())
    head, rest = greeting[: HEAD.size], greeting[HEAD.size :]
    return read(len(head)) == head and read(len(rest)) == rest


class _Room:
    """Where the members of one generation meet."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._posted = bytearray()
        self.clients: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        """Until the client leaves."""
        client.write(bytes(self._posted))
        self.clients.add(client)
        if len(self.clients) == self._size:
            self._post(entry(ALL, b""))
        while True:
            self._post(entry(*await _read(reader)))

    def _post(self, message: bytes) -> None:
        if len(self._posted) > (2 * self._size + 1) * MOST_VALUE_BYTES:
            raise ValueError("a room is full")
        self._posted += message
        for client in self.clients:
            client.write(message)


class RendezvousServer:
    """This process's own, served by a thread of its own."""

    def __init__(self, host: str, incarnation: Callable[[], str] = str) -> None:
        """Raises `OSError` where the host is not this one. `incarnation` says which process this is."""
        self._incarnation = incarnation
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        port = self._listener.getsockname()[1]
        self.address = join_address(host, port)
        self._sockets = bound_as(self._listener)
        let_go_in_children(self._sockets)
        self._rooms: dict[str, _Room] = {}
        self._most = min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._waiting: dict[asyncio.StreamWriter, None] = {}
        """Who has entered no room yet, oldest first."""
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-rendezvous", daemon=True)
        self._thread.start()
        self._running.wait()

    def close(self) -> None:
        """Ends the thread and frees the port. Idempotent."""
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(CLOSE_SECONDS)
        keep_in_children(self._sockets)

    def _run(self) -> None:
        asyncio.run(self._accept())

    async def _accept(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._on_connection, sock=self._listener, backlog=BACKLOG)
        self._running.set()
        await self._over.wait()
        self._loop.remove_reader(self._listener)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        server.close()
        for client in self._connections.values():
            client.transport.abort()
        if self._connections:
            await asyncio.wait(self._connections, timeout=CLOSE_SECONDS)

    def _on_connection(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        client.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = asyncio.create_task(self._serve_client(reader, client), name="a client")
        self._connections[connection] = client
        connection.add_done_callback(self._connections.pop)

    async def _serve_client(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        """One connection: a client, somebody who looks whether we live, or somebody with no business here."""
        room, name = None, ""
        self._waiting[client] = None
        self._make_room()
        client.write(entry(INCARNATION, self._incarnation().encode()))
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                name, size = await _read(reader)
            self._waiting.pop(client, None)
            room = self._rooms.setdefault(name, _Room(min(int(size), MOST_CLIENTS)))
            await room.serve(reader, client)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, ValueError):
            return  # it has left, or what it says is not an entry
        finally:
            self._waiting.pop(client, None)
            if room is not None:
                room.clients.discard(client)
                if not room.clients:
                    self._rooms.pop(name, None)
            client.transport.abort()  # one that is frozen would never take what is left for it
            with contextlib.suppress(OSError):
                await client.wait_closed()

    def _make_room(self) -> None:
        """Beyond the limit whoever has said nothing for longest goes: a member says at once which room it enters."""
        if len(self._waiting) + sum(len(room.clients) for room in self._rooms.values()) > self._most:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.transport.abort()


async def _read(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """The next entry. Raises `ValueError` (also for bytes that are not text) where it cannot be one."""
    name, size = HEAD.unpack(await reader.readexactly(HEAD.size))
    if name > MOST_KEY_BYTES or size > MOST_VALUE_BYTES:
        raise ValueError("an entry is too long")
    return (await reader.readexactly(name)).decode(), await reader.readexactly(size)
