"""The port for workers is taken at all addresses of its host that are free there; else one sentence says why not."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest
from shoal_controller.process.worker_port import listen
from shoal_protos.errors import UserError


def other_program(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def places(listening: Sequence[socket.socket]) -> list[str]:
    """Where they listen; closes them."""
    found = [one.getsockname()[0] for one in listening]
    assert len({one.getsockname()[1] for one in listening}) == 1
    for one in listening:
        one.close()
    return found


@pytest.mark.parametrize("taken", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("asked", ["0.0.0.0", "[::]"])
def test_a_port_that_one_address_has_is_taken_on_all_of_them(taken: str, asked: str) -> None:
    with other_program(taken) as other:
        address = f"{asked}:{other.getsockname()[1]}"
        sentence = f"^cannot listen for workers on {address}: it is in use; give another --grpc HOST:PORT$"
        with pytest.raises(UserError, match=sentence.replace("[", r"\[").replace("]", r"\]")):
            listen(address)
    assert places(listen(address))[0] in ("::", "0.0.0.0")


def test_another_address_of_this_machine_is_free_and_names_stand_for_all_of_theirs() -> None:
    with other_program("127.0.0.1") as other:
        port = other.getsockname()[1]
        assert places(listen(f"127.0.0.2:{port}")) == ["127.0.0.2"]
        named = {place[0] for *_, place in socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)}
        if others := named - {"127.0.0.1"}:
            assert set(places(listen(f"localhost:{port}"))) == others, "it is free at one of them"
    assert set(places(listen("localhost:0"))) == named


@pytest.mark.parametrize(
    ("address", "why"),
    [("192.0.2.1:7071", "Cannot assign requested address"), ("no.such.host.invalid:7071", "[A-Z].*")],
)
def test_what_is_no_address_of_this_machine_is_said_so(address: str, why: str) -> None:
    with pytest.raises(UserError, match=f"^cannot listen for workers on {address}: {why}; give another --grpc"):
        listen(address)
