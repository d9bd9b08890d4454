"""An address of gRPC's that another program has is known before gRPC writes lines of its own about it."""

import socket

import pytest
from shoal_controller.sessions.taken_port import is_taken


def listening(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


@pytest.mark.parametrize("taken", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("asked", ["0.0.0.0", "[::]"])
def test_a_port_that_one_address_has_is_taken_on_all_of_them(taken: str, asked: str) -> None:
    with listening(taken) as other:
        address = f"{asked}:{other.getsockname()[1]}"
        assert is_taken(address)
    assert not is_taken(address)


def test_another_port_of_this_machine_and_a_port_of_its_choice_are_free() -> None:
    with listening("127.0.0.1") as other:
        port = other.getsockname()[1]
        assert is_taken(f"127.0.0.1:{port}") and not is_taken(f"127.0.0.2:{port}")
    assert not is_taken("0.0.0.0:0") and not is_taken("192.0.2.1:7071")
