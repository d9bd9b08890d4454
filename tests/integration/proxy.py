"""A TCP proxy before a controller or an etcd that can hold every byte back: a network that loses packets, or is slow.

Connections stay open while it holds, and what was sent meanwhile arrives when it lets go; new ones wait too.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

PATIENCE_SECONDS = 100.0


class Proxy:
    """See the module's text. `port` is where it listens."""

    def __init__(self, target: int, delay_seconds: float = 0.0) -> None:
        self._target = target
        self._delay_seconds = delay_seconds
        self.port = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="proxy")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        assert self._started.wait(PATIENCE_SECONDS)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(PATIENCE_SECONDS)
            assert not self._thread.is_alive(), "the proxy does not end"

    def hold(self) -> None:
        """From now on nothing gets through."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def let_go(self) -> None:
        self._loop.call_soon_threadsafe(self._open.set)

    # ---- on its thread

    async def _serve(self) -> None:
        self._loop, self._open, self._end = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        async with server:
            await self._end.wait()
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with _cut_at_the_end(writer):
            await self._open.wait()
            try:
                theirs, ours = await asyncio.open_connection("127.0.0.1", self._target)
            except OSError:
                return
            with _cut_at_the_end(ours):
                ways = [asyncio.create_task(self._carry(*way)) for way in ((reader, ours), (theirs, writer))]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            await asyncio.sleep(self._delay_seconds)
            await self._open.wait()
            target.write(data)
            await target.drain()


@contextlib.contextmanager
def _cut_at_the_end(writer: asyncio.StreamWriter) -> Iterator[None]:
    """Drops what a peer has not taken: a plain `close` waits for it, and outlives the loop where the peer is gone."""
    try:
        yield
    finally:
        writer.transport.abort()
