"""Serves the API with uvicorn: takes the port when made, answers when started, ends within a deadline.

Signals are the command's business, so uvicorn gets none.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from shoal_protos.errors import UserError
from starlette.types import ASGIApp

from shoal_controller.tasks import end_task, guarded

START_SECONDS = 10.0
FINISH_SECONDS = 3
"""How long requests under way may take when the server stops."""
MOST_CONNECTIONS = 1024
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


class Web:
    """One port and what answers on it."""

    def __init__(self, host: str, port: int) -> None:
        """Takes the port; 0: a free one. Nobody is answered before `start`."""
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
            app, lifespan="off", ws="none", http="h11", log_config=None, access_log=False, server_header=False,
            proxy_headers=False, limit_concurrency=MOST_CONNECTIONS, timeout_graceful_shutdown=FINISH_SECONDS,
        )  # fmt: skip
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
