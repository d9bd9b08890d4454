"""Probes: does the host of a dead-looking worker refuse the port that the worker opened?

A refused connection confirms the death of the process (ARCHITECTURE section 4, "Who notices?"); an accepted one, a
silent host or an unreachable network prove nothing. A process that is being killed still accepts for a moment, after
its stream has ended: so an accepted connection is watched, and when it is closed the port is tried again. Called by the
shell for `Probe` effects.
"""

from __future__ import annotations

import asyncio
import contextlib

PROBE_SECONDS = 0.8
"""How long a host may take to refuse; `Probe` is answered within a second."""
AGAIN_SECONDS = 0.005
"""Between a connection's end and the next attempt."""


async def refuses(address: str) -> bool:
    """Whether the host at `HOST:PORT` actively refuses the port, at once or within `PROBE_SECONDS`."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return False
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            while True:
                await _until_closed(host.strip("[]"), int(port))
                await asyncio.sleep(AGAIN_SECONDS)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError, ValueError, OverflowError):
        return False


async def _until_closed(host: str, port: int) -> None:
    """Connects, and returns when the other side has ended the connection. Raises `ConnectionRefusedError`."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            said = b"nothing yet"
            while said:
                said = await reader.read(1 << 16)
    finally:
        writer.close()
