"""Probes: does the host of a dead-looking worker refuse the port that the worker opened?

A refused connection confirms the death of the process (ARCHITECTURE section 4, "Who notices?"); an accepted one, a
silent host or an unreachable network prove nothing. Called by the shell for `Probe` effects.
"""

from __future__ import annotations

import asyncio
import contextlib

PROBE_SECONDS = 0.8
"""How long a host may take to answer; `Probe` is answered within a second."""


async def refuses(address: str) -> bool:
    """Whether the host at `HOST:PORT` actively refuses the port."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return False
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError, ValueError, OverflowError):
        return False
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(PROBE_SECONDS):
            await writer.wait_closed()
    return False
