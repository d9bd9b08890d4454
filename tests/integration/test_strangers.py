"""Callers without a token flood the workers' port with headers that never end, of which gRPC would keep everything."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from certificates import authority, certificate
from integration.cluster import Cluster
from rule import holds

CALLERS = 60
TIMES = 2
"""So often each of them begins anew."""
MOST_BYTES = 50 << 20
SECONDS = 60.0


class House(Cluster):
    """A controller that asks for a token, and for certificates if it is given some."""

    token = "secret"

    def __init__(self, folder: Path | None, **given: object) -> None:
        super().__init__(**given)  # type: ignore[arg-type]
        self._certificates: dict[str, str] = {}
        if folder is not None:
            files = {"CA": "house.pem", "CERTIFICATE": "worker.pem", "KEY": "worker.key"}
            self._certificates = {f"SHOAL_TLS_{name}": str(folder / file) for name, file in files.items()}
            files = {"CLIENT_CA": "house.pem", "CERTIFICATE": "controller.pem", "KEY": "controller.key"}
            self.settings = {f"SHOAL_GRPC_{name}": str(folder / file) for name, file in files.items()}

    @property
    def _secrets(self) -> dict[str, str]:
        return super()._secrets | self._certificates


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


def header(name: str, value: str) -> bytes:
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


HEADERS = {
    ":method": "POST", ":scheme": "http", ":path": "/shoal.v1.Sessions/Session", ":authority": "x",
    "content-type": "application/grpc", "te": "trailers",
}  # fmt: skip
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
BEGUN = PREFACE + frame(1, 0, 1, b"".join(header(*one) for one in HEADERS.items()))
GOES_ON = frame(9, 0, 1, b"".join(header(f"x{number:04}", "y" * 110) for number in range(134)))


async def opened(port: int, context: ssl.SSLContext | None) -> asyncio.StreamWriter:
    """A connection. One that is given up in its handshake is cut: asyncio would wait for the peer to agree, for longer
    than its loop lives.
    """
    opening = asyncio.ensure_future(asyncio.open_connection("127.0.0.1", port, ssl=context))
    try:
        _, writer = await asyncio.shield(opening)
    except asyncio.CancelledError:
        with suppress(OSError):
            _, writer = await opening
            writer.transport.abort()
        raise
    return writer


async def flood(port: int, context: ssl.SSLContext | None, ended: Callable[[], None]) -> None:
    """One caller, which comes again when it was ended."""
    while True:
        with suppress(OSError):
            writer = await opened(port, context)
            try:
                writer.write(BEGUN)
                while True:
                    writer.write(GOES_ON)
                    await writer.drain()
                    await asyncio.sleep(0)
            finally:
                ended()
                writer.transport.abort()


async def most_memory(controller: psutil.Process, port: int, context: ssl.SSLContext | None) -> int:
    """What the controller had at most while it was flooded; a little more than it may where it has more than that."""
    most, ends = controller.memory_info().rss, 0
    limit = most + MOST_BYTES

    def count() -> None:
        nonlocal ends
        ends += 1

    callers = [asyncio.create_task(flood(port, context, count)) for _ in range(CALLERS)]
    try:
        async with asyncio.timeout(SECONDS):
            while ends < CALLERS * TIMES and most < limit:
                await asyncio.sleep(0.01)
                most = max(most, controller.memory_info().rss)
    finally:
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
    return most


@holds("A connection to the workers' port brings")
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
def test_a_flood_of_headers_takes_little_memory_and_no_worker_from_its_job(secure: bool, tmp_path: Path) -> None:
    """By TLS from a caller with a certificate of the house, which has no token."""
    context = None
    if secure:
        authority(tmp_path, "house")
        for name in ("controller", "worker"):
            certificate(tmp_path, name, "house", names="DNS:localhost,IP:127.0.0.1")
        context = ssl.create_default_context(cafile=str(tmp_path / "house.pem"))
        context.load_cert_chain(tmp_path / "worker.pem", tmp_path / "worker.key")
        context.set_alpn_protocols(["h2"])
    with House(tmp_path if secure else None, workers=2, options={"max_steps": 30}, pace=0.03) as cluster:
        cluster.wait_step(2)
        (pid,) = cluster.controller_pids()
        controller = psutil.Process(pid)
        before = controller.memory_info().rss
        assert asyncio.run(most_memory(controller, cluster.grpc_port, context)) - before < MOST_BYTES
        report = cluster.wait_undisturbed()
        assert cluster.messages("lost") == []
    assert [world["generation"] for world in report["generations"]] == [1]
