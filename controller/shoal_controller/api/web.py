"""Serves the API with uvicorn: takes the port when made, answers when started, ends within a deadline.

Signals are the command's business, so uvicorn gets none. Connections that bring no request, or take no answer, end:
each holds a file descriptor, which the controller needs to hear workers and to start them. So does, where there are
too many, the oldest that has shown no right token.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from shoal_protos.errors import UserError
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal_controller.access.callers import network_of
from shoal_controller.process.tasks import end_task, guarded

START_SECONDS = 10.0
FINISH_SECONDS = 3
"""How long requests under way may take when the server stops."""
REQUEST_SECONDS = 10.0
"""How long a client may take to send a request; at most twice as long until its connection ends."""
LEAST_TAKEN_BYTES = 1 << 14
"""What a client must take meanwhile of an answer that waits for it. A whole answer may have less."""
MOST_CONNECTIONS = 1024
"""Of all; an address has half of them at most."""
BACKLOG = 128


class _Uvicorn(uvicorn.Server):
    """Says when it listens, and takes no signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """Ends where its client has been waited for at two looks in a row: it has completed no request between them, or
    taken next to nothing of its answer.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self.network = network_of(self.client[0]) if self.client else ""
        self.came = self.loop.time()
        everybody, most = [one for one in self.connections if isinstance(one, _Connection) and one.is_open], _most()
        neighbours = [one for one in everybody if one.network == self.network]
        for crowd, room in ((everybody, most), (neighbours, most // 2)):
            if len(crowd) > room:
                min(crowd, key=lambda one: (one.is_let_in, one.came)).transport.abort()
                break
        self._waited_after: object = self
        """The request after which its client was waited for at the last look; itself where it was not."""
        self._left = 0
        """Bytes of answers that its client had not taken at the last look; 0 where it has caught up since."""
        self._next_look = self.loop.call_later(REQUEST_SECONDS, self._look)

    @property
    def is_open(self) -> bool:
        return not self.transport.is_closing()

    @property
    def is_let_in(self) -> bool:
        """Whether its last request showed a right token, where one is needed (`api/guard.py` found its caller)."""
        return bool(self.scope) and self.scope.get("state", {}).get("caller") is not None

    def resume_writing(self) -> None:
        self._left = 0
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_look.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        before, self._left = self._left, self.transport.get_write_buffer_size()
        if before and self._left and before < self._left + LEAST_TAKEN_BYTES:
            return self._reset()
        cycle = self.cycle
        is_waited_for = not self._left and (cycle is None or cycle.more_body or cycle.response_complete)
        if is_waited_for and self._waited_after is cycle:
            return self.transport.close()
        self._waited_after = cycle if is_waited_for else self
        self._next_look = self.loop.call_later(REQUEST_SECONDS, self._look)
        return None

    def _reset(self) -> None:
        """At once: the kernel would keep what was sent for a client that does not take it."""
        opened = self.transport.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


class Web:
    """One port and what answers on it."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """Takes the port; 0: a free one. Nobody is answered before `start`. `tls`: with it the port speaks nothing
        else.
        """
        self._tls = tls
        try:
            self._socket = _listening(host, port)
        except OSError as error:
            raise UserError(
                f"cannot listen for REST on {host}:{port}: {error.strerror}; give another --http HOST:PORT"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, app: ASGIApp, failed: Callable[[BaseException], None]) -> None:
        """Answer requests from now on. `failed` hears when that ends unexpectedly."""
        config = uvicorn.Config(
            app, lifespan="off", ws="none", http=_Connection, log_config=None, access_log=False, server_header=False,
            proxy_headers=False, timeout_graceful_shutdown=FINISH_SECONDS,
        )  # fmt: skip
        config.load()
        config.ssl = self._tls
        self._server = _Uvicorn(config)
        self._task = guarded("rest", self._server.serve(sockets=[self._socket]), failed)
        async with asyncio.timeout(START_SECONDS):
            await self._server.listens.wait()

    async def stop(self) -> None:
        """End requests under way, and let go of the port."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task], timeout=2 * FINISH_SECONDS)
            await end_task(self._task)
        self._socket.close()


def _most() -> int:
    """Half of what this process may open is left to workers, their logs and the store."""
    return min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def _listening(host: str, port: int) -> socket.socket:
    """With its protocol named: only then does asyncio turn off Nagle's delay (40 ms per answer) on its connections."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening
