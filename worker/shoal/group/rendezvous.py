"""Both ends of the rendezvous at which members of a generation leave addresses for each other.

`RendezvousServer` is opened by each process at its start. Not torch's TCPStore: that one asks the name service about
every connection it makes or takes (seconds, where names are served badly), and its client cannot be cancelled. Here a
client says which room it enters and how many are expected; what a client posts goes to all clients, what was posted
before to one that comes later, and a last entry, ALL, when all are here. A room goes when its last client has left.
Each process that connects is told first which process this is: so the controller knows that it has reached it, and may
take a later refusal for its death.

`RendezvousClient` is a client of another process's server: what gloo asks for while it connects, in calls that can be
cancelled. Called on the builder's thread only. The cancellation shuts the connection down from outside, so every wait
ends at once, whether the host is alive, frozen or gone. The form of the bytes is in `shoal_protos.rendezvous`.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

from shoal_protos.addresses import join_address, split_address
from shoal_protos.rendezvous import HEAD, INCARNATION, MOST_KEY_BYTES, MOST_VALUE_BYTES, entry
from torch._C._distributed_c10d import Store

from shoal.group.build import Cancellation, GroupSpec
from shoal.group.group import WorldChanged
from shoal.process.forks import bound_as, keep_in_children, let_go_in_children

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
        """Beyond the limit the one longest silent goes: a member says at once which room it enters."""
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


HERE = "here/"
"""Before a rank: its client has come."""
CONNECT_SECONDS = 5.0
"""Time to reach the rendezvous server of a process that was alive when the plan was made."""


class RendezvousClient(Store):
    """One rank of a group being built, as a store for gloo. Raises `WorldChanged` when cancelled or cut off.

    A reference must be kept as long as gloo uses it: C++ holds only its own half.
    """

    def __init__(self, spec: GroupSpec, cancellation: Cancellation) -> None:
        super().__init__()
        self._spec, self._cancellation = spec, cancellation
        self._address = spec.addresses[spec.builder]
        self._progress = spec.progress
        self._entries: dict[str, bytes] = {}
        host, port = split_address(self._address)
        self._progress.wait_for(spec.builder)
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._stream = self._socket.makefile("rb")
        cancellation.on_cancel(self._shut_down)
        try:
            self._socket.settimeout(CONNECT_SECONDS)
            self._socket.connect((host, port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(None)
        except OSError as error:
            self.close()
            raise self._lost(error) from None
        if cancellation.is_cancelled:  # the way out was tried before there was a connection
            self.close()
            raise self._lost("")
        try:
            self._check_server()
            self._post(spec.room, str(spec.size).encode())
            self._post(f"{HERE}{spec.rank}", spec.announces)
        except WorldChanged:
            self.close()
            raise

    def _check_server(self) -> None:
        """● Before anything is said: another job's worker may have got the port of one that is dead, and rooms of two
        jobs can have one name.
        """
        if not is_greeted(self._read, self._spec.incarnation(self._spec.builder)):
            raise self._lost("what answers there is not the process that the plan names")

    def close(self) -> None:
        """Leave the room."""
        self._stream.close()
        self._socket.close()

    def _shut_down(self) -> None:
        """Shut down the connection; from any thread."""
        with contextlib.suppress(OSError):  # not connected yet, or no more
            self._socket.shutdown(socket.SHUT_RDWR)

    def wait_for_all(self) -> None:
        """Until all are here: one that dies before is not waited for in gloo, which cannot be cancelled."""
        ranks = [rank for rank in range(self._spec.size) if rank != self._spec.rank]
        self._progress.wait_for(*ranks)
        while ALL not in self._entries:
            self._read_entry()
            self._progress.keep_waiting_for([rank for rank in ranks if f"{HERE}{rank}" not in self._entries])

    def announced(self) -> tuple[bytes, ...]:
        """By rank, what each says of itself."""
        for rank in range(self._spec.size):
            if rank != self._spec.rank:
                self._read_until(f"{HERE}{rank}")  # everybody may be here before all have said so
        entries = {**self._entries, f"{HERE}{self._spec.rank}": self._spec.announces}
        return tuple(entries[f"{HERE}{rank}"] for rank in range(self._spec.size))

    # ---- what gloo asks

    def set(self, key: str, value: str | bytes) -> None:
        self._post(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        self._read_until(key)
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait as long as it takes: only the cancellation ends it, so `timeout` is ignored."""
        del timeout
        for key in keys:
            self._read_until(key)

    def has_extended_api(self) -> bool:
        return False

    # ---- the connection

    def _post(self, key: str, value: bytes) -> None:
        try:
            self._socket.sendall(entry(key, value))
        except OSError as error:
            raise self._lost(error) from None

    def _read_until(self, key: str) -> None:
        while key not in self._entries:
            self._read_entry()

    def _read_entry(self) -> None:
        name, size = HEAD.unpack(self._read(HEAD.size))
        if name > MOST_KEY_BYTES or size > MOST_VALUE_BYTES:
            raise self._lost("what answers there is not a rendezvous server")
        posted = self._read(name).decode(errors="replace")
        self._entries[posted] = self._read(size)

    def _read(self, count: int) -> bytes:
        try:
            data = self._stream.read(count)
        except OSError as error:
            raise self._lost(error) from None
        if len(data) < count:
            raise self._lost("it hung up")
        return data

    def _lost(self, why: object) -> WorldChanged:
        if self._cancellation.is_cancelled:
            return WorldChanged("the building of the group was cancelled")
        return WorldChanged(f"the rendezvous server at {self._address} is out of reach: {why}")
