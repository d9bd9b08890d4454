"""Probes: who answers at a worker's port, and whether its host refuses it."""

import asyncio
import socket

import pytest
from asynchronous import asynchronous
from ports import free_port
from rule import holds
from shoal.group.rendezvous import RendezvousServer
from shoal_controller.jobs.probes import ProbeResult, probe
from shoal_protos.rendezvous import INCARNATION, entry

NOTHING = ProbeResult(reached=False, refused=False)


@pytest.fixture
def late(monkeypatch):
    """The end of a probe's time, which an answer does not wait for."""
    monkeypatch.setattr("shoal_controller.jobs.probes.PROBE_SECONDS", 3600.0)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr("shoal_controller.jobs.probes.PROBE_SECONDS", 0.1)


@asynchronous
async def test_a_port_that_nobody_listens_on_is_refused():
    assert await probe(f"127.0.0.1:{free_port()}", "i") == ProbeResult(reached=False, refused=True)


@asynchronous
async def test_a_worker_is_reached_where_it_says_who_it_is():
    server = RendezvousServer("127.0.0.1", lambda: "i")
    try:
        assert await probe(server.address, "i") == ProbeResult(reached=True, refused=False)
        assert await probe(server.address, "another") == NOTHING
    finally:
        await asyncio.to_thread(server.close)
    assert await probe(server.address, "i") == ProbeResult(reached=False, refused=True)


@asynchronous
async def test_where_only_the_greeting_is_asked_for_the_answer_comes_with_it(late):
    server = RendezvousServer("127.0.0.1", lambda: "i")
    try:
        async with asyncio.timeout(60):
            assert await probe(server.address, "i", watched=False) == ProbeResult(reached=True, refused=False)
            assert await probe(server.address, "another", watched=False) == NOTHING
    finally:
        await asyncio.to_thread(server.close)


@holds("A refused connection proves a")
@pytest.mark.parametrize(
    "says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", entry("i", b"i"), entry(INCARNATION, b"j"), b"\xff" * 6, b"\0"]
)
@asynchronous
async def test_whoever_says_something_else_is_not_reached(soon, says):
    def answer(_, writer):
        writer.write(says)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        assert await probe(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "i") == NOTHING


@asynchronous
async def test_a_port_that_stays_open_and_says_nothing_is_no_proof(soon):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert await probe(f"127.0.0.1:{listener.getsockname()[1]}", "i") == NOTHING


@asynchronous
async def test_a_process_that_still_accepts_while_it_dies_is_found_dead_at_once(late):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        probing = asyncio.create_task(probe(f"127.0.0.1:{listener.getsockname()[1]}", "i"))
        listener.settimeout(100)
        accepted, _ = await asyncio.to_thread(listener.accept)
        accepted.sendall(entry(INCARNATION, b"i"))
        listener.close()
        accepted.close()
        async with asyncio.timeout(60):
            assert await probing == ProbeResult(reached=True, refused=True)


@asynchronous
async def test_a_host_that_says_nothing_is_no_proof(soon):
    with socket.socket() as silent, socket.socket() as first:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        first.connect(silent.getsockname())  # its backlog is full: the kernel drops whoever comes next
        with socket.socket() as second:
            second.setblocking(False)
            second.connect_ex(silent.getsockname())
            assert await probe(f"127.0.0.1:{silent.getsockname()[1]}", "i") == NOTHING


@pytest.mark.parametrize("address", ["", "host", "host:", ":1:", "no.such.host.invalid:1", "127.0.0.1:99999", "\0:1"])
@asynchronous
async def test_an_address_that_is_none_is_no_proof(address):
    assert await probe(address, "i") == NOTHING
