"""A process's meeting place and the meetings there: what is posted arrives, and no wait outlives its reason."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from shoal.group.build import Meeting, Stop
from shoal.group.group import WorldChanged
from shoal.group.rendezvous_client import Rendezvous
from shoal.group.rendezvous_server import MeetingPlace, reachable, split_address
from shoal_protos.rendezvous import HEAD, MOST_VALUE_BYTES, entry

PATIENCE_SECONDS = 20.0


@pytest.fixture
def place() -> Iterator[MeetingPlace]:
    place = MeetingPlace("127.0.0.1")
    yield place
    place.close()


@pytest.fixture
def away() -> Iterator[Callable[..., Future[object]]]:
    """Calls something on another thread."""
    with ThreadPoolExecutor(4) as threads:
        yield threads.submit


def test_every_guest_gets_what_was_posted_before_and_after_it_came(place: MeetingPlace) -> None:
    first = Rendezvous(Meeting(1, 0, (place.address,) * 2, 0), Stop())
    first.set("early", b"\x00\xff")
    second = Rendezvous(Meeting(1, 0, (place.address,) * 2, 0), Stop())
    first.set("late", b"later")
    assert (second.get("early"), second.get("late"), first.get("late")) == (b"\x00\xff", b"later", b"later")
    for guest in (first, second):
        guest.wait_for_all()
        guest.close()


def test_all_are_here_only_when_all_are_here(place: MeetingPlace, away: Callable[..., Future[object]]) -> None:
    guests = [Rendezvous(Meeting(1, 0, (place.address,) * 3, 0), Stop()) for _ in range(2)]
    waiting = [away(guest.wait_for_all) for guest in guests]
    guests[0].set("said", b"")
    guests[1].set("heard", b"")
    assert not any(wait.done() for wait in waiting)
    guests.append(Rendezvous(Meeting(1, 0, (place.address,) * 3, 0), Stop()))
    for wait in waiting:
        wait.result(PATIENCE_SECONDS)
    for guest in guests:
        guest.close()


def test_meetings_do_not_hear_each_other_and_leave_nothing_behind(place: MeetingPlace) -> None:
    other = Rendezvous(Meeting(2, 0, (place.address,) * 1, 0), Stop())
    other.set("key", b"other")
    first = Rendezvous(Meeting(1, 0, (place.address,) * 1, 0), Stop())
    first.set("key", b"first")
    assert first.get("key") == b"first"
    first.close()
    deadline, seen = threading.Event(), b"first"
    while seen == b"first":  # until the place has noticed that it left
        again = Rendezvous(Meeting(1, 0, (place.address,) * 1, 0), Stop())
        again.set("key", b"again")
        seen = again.get("key")
        again.close()
        deadline.wait(0.01)
    assert seen == b"again"
    other.close()


def test_a_wait_ends_when_it_is_called_off(place: MeetingPlace, away: Callable[..., Future[object]]) -> None:
    stop = Stop()
    guest = Rendezvous(Meeting(1, 0, (place.address,) * 2, 0), stop)
    waiting = away(guest.wait_for_all)
    stop.set()
    with pytest.raises(WorldChanged, match="called off"):
        waiting.result(PATIENCE_SECONDS)
    with pytest.raises(WorldChanged, match="called off"):
        guest.set("key", b"")
        guest.get("key")
    guest.close()


def test_a_meeting_that_was_called_off_before_is_not_entered(place: MeetingPlace) -> None:
    stop = Stop()
    stop.set()
    with pytest.raises(WorldChanged, match="called off"):
        Rendezvous(Meeting(1, 0, (place.address,) * 2, 0), stop)


def test_connecting_to_a_host_that_does_not_answer_is_called_off_too(away: Callable[..., Future[object]]) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        callers = [socket.socket() for _ in range(3)]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        stop, tried = Stop(), threading.Event()
        stop.calls_off(tried.set)
        connecting = away(Rendezvous, Meeting(1, 0, (f"127.0.0.1:{full.getsockname()[1]}",) * 2, 0), stop)
        stop.set()
        with pytest.raises(WorldChanged, match="called off"):
            connecting.result(PATIENCE_SECONDS)
        assert tried.is_set()
        for caller in callers:
            caller.close()


def test_a_meeting_place_that_dies_and_one_that_is_dead_are_out_of_reach(away: Callable[..., Future[object]]) -> None:
    place = MeetingPlace("127.0.0.1")
    guest = Rendezvous(Meeting(1, 0, (place.address,) * 2, 0), Stop())
    waiting = away(guest.wait_for_all)
    assert reachable(place.address)
    place.close()
    with pytest.raises(WorldChanged, match="out of reach: it hung up"):
        waiting.result(PATIENCE_SECONDS)
    guest.close()
    assert not reachable(place.address)
    with pytest.raises(WorldChanged, match=r"out of reach: .*refused"):
        Rendezvous(Meeting(1, 0, (place.address,) * 2, 0), Stop())


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4096),
        entry("g1", b"many"),
        HEAD.pack(2, MOST_VALUE_BYTES + 1) + b"g1",
        entry("g1", b"2") + HEAD.pack(3, 2) + b"\xff\xfe\xfd..",
    ],
    ids=["nothing", "http", "noise", "no size", "too long", "no text"],
)
def test_garbage_on_the_port_harms_no_meeting(place: MeetingPlace, noise: bytes) -> None:
    guest = Rendezvous(Meeting(7, 0, (place.address,) * 1, 0), Stop())
    with socket.create_connection(split_address(place.address)) as stranger:
        stranger.sendall(noise)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(PATIENCE_SECONDS)
        while _received(stranger):
            continue
    guest.set("key", b"value")
    assert guest.get("key") == b"value"
    guest.close()


def _received(stranger: socket.socket) -> bytes:
    try:
        return stranger.recv(4096)
    except ConnectionResetError:
        return b""


def test_what_answers_at_the_address_may_be_no_meeting_place(away: Callable[..., Future[object]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        guest = Rendezvous(Meeting(1, 0, (f"127.0.0.1:{listener.getsockname()[1]}",) * 2, 0), Stop())
        connection, _ = listener.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(WorldChanged, match="no meeting place"):
            guest.wait_for_all()
        guest.close()
        connection.close()
