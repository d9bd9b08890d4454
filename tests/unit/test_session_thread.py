"""How a worker's session looks for its controller, and for how long who has nothing to lose waits for one."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from certificates import authority
from rule import Edit, holds, rule
from shoal.session import thread
from shoal.session.dialogue import RECONNECT_SECONDS
from shoal.session.driver import REPORT_SECONDS, SessionDriver
from shoal.session.settings import SessionSettings
from shoal.session.thread import LONGEST_PAUSE_SECONDS, STEADY_SECONDS, ControllerAddresses, SessionThread, ShownTokens
from shoal_protos.description import Description
from shoal_protos.messages import (
    NO_CONTROLLER,
    PROTOCOL_VERSION,
    Ending,
    Heartbeat,
    Hello,
    MemberState,
    Status,
    Telemetry,
)

MADE_OF = Description(4, 8, 4096, 8, 1, 0, 100, (), "SGD", {}, {}, False, False)
STATUS = Status(0, 0, MemberState.WAITING, 0, -1, 0)
HELLO = Hello(PROTOCOL_VERSION, "train", "w0", "w0.1", "127.0.0.1:9", "host", 1, "", MADE_OF, STATUS)


class Streams(SessionThread):
    """A session without a thread and without a socket. `streams`: for how long each one lasts after its welcome; None:
    it is not welcomed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *streams: float | None) -> None:
        self._left, self.now = list(streams), 0.0
        self.pauses: list[float] = []
        self.tried: list[str] = []
        self.unreachable: list[float] = []
        monkeypatch.setattr(thread.time, "monotonic", lambda: self.now)
        self._driver: Any = SimpleNamespace(
            silent=False, on_controller_unreachable=lambda seconds, _: self.unreachable.append(seconds)
        )
        self._why = ""
        self._addresses, self._leader = ControllerAddresses(["one", "two"]), ""
        self._term, self._closing, self._welcomed = None, False, False
        self._running = threading.Event()
        asyncio.run(self._live())

    async def _converse(self) -> None:
        lasts = self._left.pop(0)
        self.tried.append(self._addresses.current)
        self._welcomed = lasts is not None
        self.now += lasts or 0.0
        self._closing = not self._left

    async def _rest(self, seconds: float | None) -> None:
        assert seconds is not None
        self.pauses.append(seconds)
        self.now += seconds


class Certified(SessionThread):
    """A session without a thread, of which only the certificates matter."""

    def __init__(self, settings: SessionSettings) -> None:
        self._settings, self._credentials = settings, settings.credentials()
        self._addresses, self._closing, self._complaints = ControllerAddresses(["one"]), False, set()
        self._tokens = ShownTokens(None)


@holds("Certificates are read again when")
def test_a_worker_reads_its_certificates_again_for_every_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.session.settings.grpc.ssl_channel_credentials", lambda *files: files)
    for name in ("old", "new"):
        authority(tmp_path, name)
    used, new = tmp_path / "old.pem", (tmp_path / "new.pem").read_bytes()
    session = Certified(SessionSettings(controller="one:1", job="train", tls_ca=used))
    used.write_bytes(new)
    assert session._current_credentials() == (new, None, None)
    for spoil in (lambda: used.write_bytes(new[:200]), used.unlink):
        spoil()
        assert session._current_credentials() == (new, None, None), "what cannot be used changes nothing"


def test_attempts_to_reach_a_controller_become_rarer_until_a_stream_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch, *[None] * 6, 0.1, STEADY_SECONDS + 0.1, None, None)
    assert streams.pauses == [0.1, 0.2, 0.4, 0.8, *[LONGEST_PAUSE_SECONDS] * 3, 0.05, 0.1]


@rule(
    "A worker gives up a connection that is not made in 4 s: the time of two frozen controllers is less than "
    "`reconnect_seconds`",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal.session.thread", "CONNECT_SECONDS = 4.0", "CONNECT_SECONDS = 10.0"),
)
def test_a_controller_that_is_frozen_is_left_in_time_for_others_though_its_machine_takes_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 2 * thread.CONNECT_SECONDS < RECONNECT_SECONDS, "or two of them would have healthy workers evicted"
    monkeypatch.setattr(thread, "CONNECT_SECONDS", 0.1)
    with socket.socket() as frozen:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen()
        session = Certified(SessionSettings(controller="one:1", job="train"))
        session._addresses = ControllerAddresses([f"127.0.0.1:{frozen.getsockname()[1]}"])
        session._driver = SimpleNamespace(say_hello=lambda: HELLO)
        asyncio.run(asyncio.wait_for(session._converse(), 100))
    assert session._complaints and not session._welcomed


class EndedChannel:
    """Of a stream that the controller ends after the hello, while something is about to be written."""

    def __init__(self) -> None:
        self.hellos, self.cancelled = 0, False

    async def __aenter__(self) -> EndedChannel:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def stream_stream(self, _: str) -> Any:
        return lambda metadata: self

    async def write(self, _: bytes) -> None:
        self.hellos += 1
        if self.hellos > 1:
            raise asyncio.InvalidStateError("RPC already finished.")

    async def read(self) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    def cancel(self) -> None:
        self.cancelled = True


@rule(
    "A stream that ends just as something is to be written on it ends no session: its worker looks for the next "
    "controller",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal.session.thread",
        "            except asyncio.InvalidStateError:  #",
        "            except asyncio.IncompleteReadError:  #",
    ),
)
def test_a_stream_that_ends_just_before_something_is_written_on_it_does_not_end_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread, "FAREWELL_SECONDS", 0.01)
    session, channel = Certified(SessionSettings(controller="one:1", job="train")), EndedChannel()
    session._driver = SimpleNamespace(
        say_hello=lambda: HELLO, heartbeat_seconds=0.0, take_outgoing=lambda beat: [Heartbeat(STATUS, Telemetry())]
    )
    session._welcomed = False
    session._woken = asyncio.Event()
    asyncio.run(asyncio.wait_for(session._converse_over(channel), 100))  # type: ignore[arg-type]
    assert channel.cancelled and session._complaints


def test_only_where_nobody_welcomes_it_a_worker_tries_the_next_address(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch, None, 5.0, 5.0, None, None)
    assert streams.tried == ["one", "two", "two", "two", "one"]


def test_a_controller_is_away_since_it_was_last_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch, None, None, 5.0, None, None)
    assert streams.unreachable == pytest.approx([0.0, 0.1, 0.05, 0.15])


@rule(
    "A worker tries the leader that another controller names at once, and knows all controllers that its own has "
    "told it of",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal.session.thread", "            self._leader = leader\n", ""),
)
def test_a_worker_asks_the_leader_that_a_controller_names_at_once_and_the_others_when_that_one_is_gone() -> None:
    addresses = ControllerAddresses(["a:1", "b:1"])
    assert addresses.on_failure("c:1") and addresses.current == "c:1"
    assert not addresses.on_failure() and addresses.current == "b:1"
    assert not addresses.on_failure("b:1"), "it names itself: there is nothing new to try"
    assert addresses.current == "a:1"


@rule(
    "A worker that one controller sends to another, and that one to a third, pauses in between: two may name "
    "each other",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal.session.thread", "return not was_named", "return True"),
)
def test_two_controllers_that_name_each_other_are_not_asked_without_a_pause() -> None:
    addresses = ControllerAddresses(["a:1", "b:1"])
    assert addresses.on_failure("b:1"), "the first one that is named is asked at once"
    for named in ("a:1", "b:1", "a:1"):
        assert not addresses.on_failure(named) and addresses.current == named
    assert not addresses.on_failure() and addresses.current == "b:1", "the others get their turn"


@holds("A worker tries the leader that")
def test_a_worker_knows_all_controllers_that_it_was_given_and_told_of() -> None:
    addresses = ControllerAddresses(["service:1"])
    addresses.on_welcome(["a:1", "service:1", "b:1"])
    tried = [addresses.current for _ in range(4) if not addresses.on_failure()]
    assert tried == ["a:1", "b:1", "service:1", "a:1"]
    addresses.on_welcome([])
    assert addresses.current == "service:1", "whoever is gone from the store is forgotten, whoever was given is not"


@holds("A process that has not said hello is killed")
@pytest.mark.parametrize(
    ("script_has_ended", "launcher", "in_a_world", "ends_after"),
    [(True, "", True, 60.0), (False, "local", False, 70.0), (False, "local", True, None), (False, "", False, None)],
)
def test_who_has_nothing_to_lose_waits_only_so_long_for_a_controller(
    script_has_ended: bool, launcher: str, in_a_world: bool, ends_after: float | None
) -> None:
    ends: list[tuple[Any, ...]] = []
    shared: Any = SimpleNamespace(
        dialogue=SimpleNamespace(script_has_ended=script_has_ended, reconnect_seconds=10.0),
        lock=nullcontext(), membership=SimpleNamespace(live={3} if in_a_world else {0}),
        settings=SimpleNamespace(launcher=launcher), end=lambda *how: ends.append(how),
    )  # fmt: skip
    driver = SessionDriver(shared)
    driver.on_controller_unreachable((ends_after or 10 * REPORT_SECONDS) - 0.1)
    assert ends == []
    driver.on_controller_unreachable((ends_after or 10 * REPORT_SECONDS) + 0.1)
    assert [(how[0], *how[2:]) for how in ends] == (
        [] if ends_after is None else [(Ending.DONE,)] if script_has_ended else [(Ending.REPLACED, NO_CONTROLLER)]
    )
