"""Groups of real processes: what is exchanged, and that nothing waits for a peer that is dead or frozen.

No test measures time. Whoever must come back is waited for by a deadline far above what it takes; with the rule broken
(an abort by a single receive, a rendezvous call on the caller's thread, no abort before reuse) it would never come.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import operator
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from integration.cluster import ended, fork, until
from rule import Edit, holds, rule

PATIENCE_SECONDS = 100.0
"""Less than gloo's own 30 s for connecting, so that nobody is saved by it."""

CHANGED = "world changed"


class Process:
    """The test's end of one member."""

    def __init__(self, listener: socket.socket, log: Path) -> None:
        self.pid = fork("integration.group_member:serve", {"port": listener.getsockname()[1]}, {}, log)
        connection, _ = listener.accept()
        self._commands, self._replies = connection.makefile("w"), connection.makefile("r")
        connection.close()
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._reader = threading.Thread(target=self._read, name=f"member {self.pid}")
        self._reader.start()
        self.address = self.ask("address")

    def start(self, command: str, **given: Any) -> Future[Any]:
        """Begin a command; the future is its answer, `CHANGED` where it raised WorldChanged."""
        number = next(self._numbers)
        future = self._answers[number] = Future()
        self._commands.write(json.dumps({"number": number, "do": command, "given": given}) + "\n")
        self._commands.flush()
        return future

    def ask(self, command: str, **given: Any) -> Any:
        return self.start(command, **given).result(PATIENCE_SECONDS)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Returns when it is gone."""
        self.signal(signal.SIGKILL)
        until("the killed process to be gone", lambda: self.pid in ended())

    def end(self) -> None:
        if self.pid not in ended():
            self.kill()
        self._reader.join(PATIENCE_SECONDS)
        self._replies.close()
        with contextlib.suppress(OSError):  # nobody is there to take what was left
            self._commands.close()

    def _read(self) -> None:
        try:
            for line in self._replies:
                answer = json.loads(line)
                future = self._answers.pop(answer["number"])
                if "error" in answer:
                    future.set_exception(AssertionError(answer["error"]))
                else:
                    future.set_result(CHANGED if "changed" in answer else answer["answer"])
        except ConnectionResetError:
            return


class Party(list[Process]):
    """Processes that build groups together."""

    def meet(self, generation: int, members: list[int] | None = None, builder: int = 0) -> list[Future[Any]]:
        """Start building the group of these members (all); returns what becomes of it at each."""
        members = list(range(len(self))) if members is None else members
        addresses = [self[index].address for index in members]
        return [
            self[index].start("build", generation=generation, rank=rank, addresses=addresses, builder=builder)
            for rank, index in enumerate(members)
            if self[index].pid not in ended()
        ]

    def build(self, generation: int, members: list[int] | None = None) -> None:
        assert results(self.meet(generation, members)) == ["built"] * (len(members) if members else len(self))

    def all(self, command: str, **given: Any) -> list[Any]:
        return results([process.start(command, **given) for process in self])


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(PATIENCE_SECONDS) for future in futures]


@contextmanager
def party(size: int) -> Iterator[Party]:
    folder, processes = Path(tempfile.mkdtemp(prefix="party-")), Party()
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        for index in range(size):
            processes.append(Process(listener, folder / f"{index}.log"))
        yield processes
    except BaseException:
        for log in sorted(folder.iterdir()):
            print(f"---- {log.name}\n{log.read_text()}")
        raise
    finally:
        listener.close()
        for process in processes:
            process.end()
        shutil.rmtree(folder)


@pytest.mark.parametrize("size", [2, 5])
def test_every_member_gets_every_row_and_every_message(size: int) -> None:
    with party(size) as members:
        members.build(1)
        rows = results([member.start("gather", generation=1, number=rank) for rank, member in enumerate(members)])
        assert rows == [list(range(size))] * size
        means = members.all("swap", generation=1, elements=100_000)
        assert means == [[float(other) for other in range(size) if other != rank] for rank in range(size)]


def test_a_framed_message_arrives_whole_and_an_empty_one_too() -> None:
    with party(2) as members:
        members.build(1)
        for content in ("state of the job", ""):
            read = members[1].start("read", generation=1, source=0)
            members[0].ask("send_framed", generation=1, to=1, content=content)
            assert read.result(PATIENCE_SECONDS) == content


@rule(
    "gloo is aborted by posting a receive that nobody sends to, to each peer in turn, until one times out",
    "Groups",
    broken_by=Edit(
        "shoal.group.gloo",
        "any(_times_out(self._gloo, peer) for peer in self._order)",
        "any(_times_out(self._gloo, peer) for peer in self._order[:1])",
    ),
)
def test_an_abort_wakes_everybody_though_one_peer_is_dead_and_one_is_frozen() -> None:
    with party(4) as members:
        members.build(1)
        members[3].signal(signal.SIGSTOP)
        blocked = [members[rank].start("receive", generation=1, source=3) for rank in (0, 1)]
        gathering = [members[rank].start("gather", generation=1, number=rank) for rank in (0, 1)]
        members[2].kill()
        assert [members[rank].ask("abort", generation=1) for rank in (0, 1)] == ["aborted"] * 2
        assert results(blocked) == [CHANGED] * 2
        assert results(gathering) == [CHANGED] * 2
        assert members[0].ask("close", generation=1) == "closed"
        members.build(2, [0, 1])
        assert results([members[rank].start("gather", generation=2, number=rank) for rank in (0, 1)]) == [[0, 1]] * 2


@holds("gloo is aborted by posting")
def test_an_abort_closes_the_connections_to_all_peers_though_the_first_one_is_dead() -> None:
    """A peer's receive raises, and what a frozen one sends after it thaws lands nowhere."""
    with party(4) as members:
        members.build(1)
        members[1].kill()
        members[3].signal(signal.SIGSTOP)
        blocked = members[2].start("receive", generation=1, source=0)
        receiving = members[0].start("receive", generation=1, source=3)
        late = members[3].start("send", generation=1, to=0)
        assert members[0].ask("abort", generation=1) == "aborted"
        assert receiving.result(PATIENCE_SECONDS) == CHANGED
        assert blocked.result(PATIENCE_SECONDS) == CHANGED
        members[0].ask("fill", value=1.0)
        members[3].signal(signal.SIGCONT)
        assert late.result(PATIENCE_SECONDS) == CHANGED
        assert members[0].ask("mean") == 1.0


@holds("A group that is closed")
def test_a_group_that_is_closed_with_operations_in_flight_is_gone_for_all_peers() -> None:
    """A wait that gloo has forgotten keeps a group alive, and its connections to everybody else."""
    with party(3) as members:
        members.build(1)
        half_way = members[0].start("much", generation=1, kind="receive", peer=1)
        members[1].start("much", generation=1, kind="send", peer=0, freeze=True)
        until("the peer to be frozen", lambda: psutil.Process(members[1].pid).status() == psutil.STATUS_STOPPED)
        blocked = members[2].start("receive", generation=1, source=0)
        members[0].ask("post", generation=1, source=2)
        members[1].kill()
        assert half_way.result(PATIENCE_SECONDS) == CHANGED
        assert members[0].ask("close", generation=1) == "closed"
        assert blocked.result(PATIENCE_SECONDS) == CHANGED


def test_one_abort_wakes_the_peers_too() -> None:
    with party(3) as members:
        members.build(1)
        blocked = members[1].start("receive", generation=1, source=0)
        members[0].ask("abort", generation=1)
        assert blocked.result(PATIENCE_SECONDS) == CHANGED


@pytest.mark.parametrize(("mine", "theirs"), [("send", "receive"), ("receive", "send")])
def test_an_abort_wakes_who_waits_for_a_message_that_is_half_way_through(mine: str, theirs: str) -> None:
    """gloo itself forgets it when the connection is closed."""
    with party(2) as members:
        members.build(1)
        blocked = members[0].start("much", generation=1, kind=mine, peer=1)
        members[1].start("much", generation=1, kind=theirs, peer=0, freeze=True)
        until("the peer to be frozen", lambda: psutil.Process(members[1].pid).status() == psutil.STATUS_STOPPED)
        members[0].ask("abort", generation=1)
        assert blocked.result(PATIENCE_SECONDS) == CHANGED
        assert members[0].ask("close", generation=1) == "closed"


@pytest.mark.parametrize(("mine", "theirs"), [("send", "receive"), ("receive", "send")])
def test_a_peer_that_dies_in_the_middle_of_a_message_is_noticed(mine: str, theirs: str) -> None:
    with party(2) as members:
        members.build(1)
        blocked = members[0].start("much", generation=1, kind=mine, peer=1)
        members[1].start("much", generation=1, kind=theirs, peer=0, freeze=True)
        until("the peer to be frozen", lambda: psutil.Process(members[1].pid).status() == psutil.STATUS_STOPPED)
        members[1].kill()
        assert blocked.result(PATIENCE_SECONDS) == CHANGED
        assert members[0].ask("broken", generation=1) == [1]


def test_what_a_killed_member_shared_goes_with_the_group_of_the_others() -> None:
    with party(3) as members:
        members.build(1)
        assert members.all("swap", generation=1, elements=2_000_000) == [[1.0, 2.0], [0.0, 2.0], [0.0, 1.0]]
        assert members.all("shared_memory") == [[3, 4]] * 3  # three mappings and what they keep open, and its own
        members[2].kill()
        for member in (members[0], members[1]):
            member.ask("abort", generation=1)
            member.ask("close", generation=1)
            assert member.ask("shared_memory") == [0, 0]


def test_an_aborted_group_stays_aborted() -> None:
    with party(2) as members:
        members.build(1)
        members[0].ask("abort", generation=1)
        assert members[0].ask("abort", generation=1) == "aborted"
        assert members[0].ask("gather", generation=1, number=0) == CHANGED
        assert members[0].ask("send", generation=1, to=1) == CHANGED


def test_a_broken_connection_names_the_peer_and_an_own_abort_names_nobody() -> None:
    with party(3) as members:
        members.build(1)
        blocked = members[0].start("receive", generation=1, source=2)
        members[2].kill()
        assert blocked.result(PATIENCE_SECONDS) == CHANGED
        assert members[0].ask("broken", generation=1) == [2]
        waiting = members[1].start("receive", generation=1, source=0)
        members[1].ask("abort", generation=1)
        assert waiting.result(PATIENCE_SECONDS) == CHANGED
        assert members[1].ask("broken", generation=1) == []


@holds("Building a group can be")
def test_a_member_that_dies_before_it_comes_holds_nobody_when_the_building_is_cancelled() -> None:
    with party(3) as members:
        members[2].kill()
        building = members.meet(1)
        assert [members[rank].ask("cancel", generation=1) for rank in (0, 1)] == ["cancelled"] * 2
        assert results(building) == [CHANGED] * 2
        members.build(2, [0, 1])


@holds("Building a group can be")
def test_a_frozen_builder_holds_nobody_when_the_building_is_cancelled() -> None:
    with party(3) as members:
        members[0].signal(signal.SIGSTOP)
        building = members.meet(1)[1:]
        assert [members[rank].ask("cancel", generation=1) for rank in (1, 2)] == ["cancelled"] * 2
        assert results(building) == [CHANGED] * 2
        members.build(2, [1, 2])


def test_a_dead_builder_is_noticed_by_all() -> None:
    with party(3) as members:
        members[0].kill()
        assert results(members.meet(1)) == [CHANGED] * 2
        members.build(2, [1, 2])


def test_a_member_that_dies_while_it_connects_does_not_keep_the_next_group_from_being_built() -> None:
    with party(3) as members:
        assert members[2].ask("come_to", generation=1, address=members[0].address, size=3) == "came"
        members[2].kill()
        members.meet(1)
        for rank in (0, 1):
            members[rank].ask("cancel", generation=1)
        members.build(2, [0, 1])


@rule(
    "Buffers of an aborted group are reused only after the group is gone: until then a late sender can write into them",
    "Groups",
    broken_by=Edit("shoal.group.gloo", "            any(_times_out(self._gloo, peer) for peer in self._order)\n", ""),
)
def test_a_late_sender_cannot_write_into_a_buffer_that_is_used_again() -> None:
    with party(3) as members:
        members.build(1)
        receiving = members[0].start("receive", generation=1, source=1)
        members[1].signal(signal.SIGSTOP)
        late = members[1].start("send", generation=1, to=0)
        members[0].ask("abort", generation=1)
        assert receiving.result(PATIENCE_SECONDS) == CHANGED
        members[0].ask("close", generation=1)
        members[0].ask("fill", value=1.0)
        members[1].signal(signal.SIGCONT)
        assert late.result(PATIENCE_SECONDS) == CHANGED
        assert members[0].ask("mean") == 1.0


def test_a_group_waits_for_a_day_because_its_own_time_out_would_close_it() -> None:
    with party(2) as members:
        members.build(1)
        assert members[0].ask("patience", generation=1) >= 24 * 3600


def test_forty_generations_leave_no_socket_behind() -> None:
    with party(2) as members:
        for generation in range(1, 41):
            members.build(generation)
            members.all("gather", generation=generation, number=1)
            if generation % 2:
                members[0].ask("abort", generation=generation)
            members.all("close", generation=generation)
            if generation == 10:
                before = members.all("open_files")
        until("all others to be closed", lambda: all(map(operator.le, members.all("open_files"), before)))
