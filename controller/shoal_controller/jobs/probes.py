"""Probes: is the process that opened this rendezvous port there, and does its host refuse the port?

Whoever connects is told first which process it is; a probe that reads the expected incarnation has reached it. What a
refusal proves after that is the machine's to decide; an accepted connection, a silent host or an unreachable network
prove nothing. A process that is being killed still accepts for a moment, after its stream has ended: so an accepted
connection is watched, and when it is closed the port is tried again; not where only the greeting is asked for. Called
by the shell for `Probe` effects.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import NamedTuple

from shoal_protos.addresses import split_address
from shoal_protos.rendezvous import HEAD, INCARNATION, MOST_KEY_BYTES, MOST_VALUE_BYTES

PROBE_SECONDS = 0.8
"""How long a host may take; `Probe` is answered within a second."""
AGAIN_SECONDS = 0.005
"""Between a connection's end and the next attempt."""


class ProbeResult(NamedTuple):
    """What a probe has met."""

    reached: bool = False
    """The process of that incarnation has answered there."""
    refused: bool = False
    """The host actively refuses the port; afterwards, where the process was reached as well."""


async def probe(address: str, incarnation: str, watched: bool = True) -> ProbeResult:
    """What answers at `HOST:PORT` within `PROBE_SECONDS`. `watched`: whether the connection is watched to its end."""
    try:
        host, port = split_address(address)
    except ValueError:
        return ProbeResult()
    reached = False
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            async with _connected(host, port) as reader:
                reached = await _greeting(reader) == incarnation.encode()
                if not watched:
                    return ProbeResult(reached)
                await _until_closed(reader)
            while True:
                await asyncio.sleep(AGAIN_SECONDS)
                async with _connected(host, port) as reader:
                    await _until_closed(reader)
    except ConnectionRefusedError:
        return ProbeResult(reached, refused=True)
    except (OSError, TimeoutError, ValueError, OverflowError):
        return ProbeResult(reached)


@contextlib.asynccontextmanager
async def _connected(host: str, port: int) -> AsyncGenerator[asyncio.StreamReader]:
    """A connection's reader."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        yield reader
    finally:
        writer.close()


async def _greeting(reader: asyncio.StreamReader) -> bytes:
    """The incarnation that the other side says it is; empty where it says no such thing."""
    try:
        name, size = HEAD.unpack(await reader.readexactly(HEAD.size))
        if name > MOST_KEY_BYTES or size > MOST_VALUE_BYTES or await reader.readexactly(name) != INCARNATION.encode():
            return b""
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
        return b""


async def _until_closed(reader: asyncio.StreamReader) -> None:
    """Returns when the other side has ended the connection."""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while await reader.read(1 << 16):
            continue
