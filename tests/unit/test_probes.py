"""Probes: only a refused connection proves a death."""

import asyncio
import socket

import pytest
from asynchronous import asynchronous
from shoal_controller.probes import PROBE_SECONDS, refuses


@asynchronous
async def test_a_port_that_nobody_listens_on_is_refused(free_port):
    assert await refuses(f"127.0.0.1:{free_port()}")


@asynchronous
async def test_a_port_that_answers_is_no_proof(monkeypatch):
    monkeypatch.setattr("shoal_controller.probes.PROBE_SECONDS", 0.1)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        assert not await refuses(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")


@asynchronous
async def test_a_port_that_stays_open_is_no_proof(monkeypatch):
    monkeypatch.setattr("shoal_controller.probes.PROBE_SECONDS", 0.1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert not await refuses(f"127.0.0.1:{listener.getsockname()[1]}")


@asynchronous
async def test_a_process_that_still_accepts_while_it_dies_is_found_dead_at_once():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        probe = asyncio.create_task(refuses(f"127.0.0.1:{listener.getsockname()[1]}"))
        listener.settimeout(5)
        accepted, _ = await asyncio.to_thread(listener.accept)
        listener.close()
        accepted.close()
        began = asyncio.get_running_loop().time()
        assert await probe
        assert asyncio.get_running_loop().time() - began < PROBE_SECONDS / 2


@asynchronous
async def test_a_host_that_says_nothing_is_no_proof(monkeypatch):
    monkeypatch.setattr("shoal_controller.probes.PROBE_SECONDS", 0.1)
    with socket.socket() as silent, socket.socket() as first:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        first.connect(silent.getsockname())  # its backlog is full: the kernel drops whoever comes next
        with socket.socket() as second:
            second.setblocking(False)
            second.connect_ex(silent.getsockname())
            assert not await refuses(f"127.0.0.1:{silent.getsockname()[1]}")


@pytest.mark.parametrize("address", ["", "host", "host:", ":1:", "no.such.host.invalid:1", "127.0.0.1:99999", "\0:1"])
@asynchronous
async def test_an_address_that_is_none_is_no_proof(address):
    assert not await refuses(address)
