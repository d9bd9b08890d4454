"""How far a thread has come in a group and for whom it waits: what heartbeats tell, and that telling costs nothing."""

from __future__ import annotations

import gc
import socket
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rule import Edit, holds, rule
from shoal.group import gloo, group
from shoal.group.build import Cancellation, GroupSpec
from shoal.group.gloo import PIECE_BYTES, GlooGroup
from shoal.group.group import GroupProgress, WorldChanged
from shoal.group.rendezvous import RendezvousClient, RendezvousServer
from shoal.group.wait_threads import LONGEST_LOOK_SECONDS
from shoal_protos.activity import MOST_NAMED, StepPhase


class Time:
    """A clock that a test moves."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(group.time, "monotonic", lambda: self.now)


def name(rank: int) -> str:
    return f"w{rank}"


def test_positions_only_grow_through_the_building_of_a_group_and_the_steps_in_it() -> None:
    seen = GroupProgress(7)
    positions = [seen.activity(name).position]
    for move in (
        lambda: seen.reach(StepPhase.BUILT), lambda: seen.reach(StepPhase.CATCHING_UP),
        lambda: seen.reach(StepPhase.HAND_OUT, 3), lambda: seen.begin_boundary(0), seen.step_on, seen.step_on,
        lambda: seen.reach(StepPhase.REDUCTION, 1), lambda: seen.reach(StepPhase.VOTE),
        lambda: seen.reach(StepPhase.HAND_OUT), lambda: seen.begin_boundary(1),
    ):  # fmt: skip
        move()
        positions.append(seen.activity(name).position)
    assert positions == sorted(set(positions))


@holds("… only waits older than")
def test_a_wait_begins_anew_when_a_piece_is_complete(monkeypatch) -> None:
    time, seen = Time(monkeypatch), GroupProgress()
    seen.wait_for(2)
    time.now += 5
    assert (seen.activity(name).waits_for, seen.activity(name).seconds) == (("w2",), 5.0)
    seen.on_piece()
    time.now += 1
    assert seen.activity(name).seconds == 1.0
    seen.go_on()
    assert seen.activity(name).waits_for == ()


@holds("… only waits older than")
@pytest.mark.parametrize(
    "move",
    [
        lambda seen: seen.reach(StepPhase.VOTE), lambda seen: seen.begin_boundary(3), GroupProgress.step_on,
        lambda seen: seen.wait_for(1), GroupProgress.go_on,
    ],
    ids=["reach", "begin_boundary", "step_on", "wait_for", "go_on"],
)  # fmt: skip
def test_whatever_it_does_it_has_done_for_no_time_yet(monkeypatch, move) -> None:
    time, seen = Time(monkeypatch), GroupProgress()
    time.now += 60
    move(seen)
    assert seen.activity(name).seconds == 0.0


@holds("… only waits older than")
def test_who_goes_on_waiting_for_fewer_has_waited_as_long_as_before(monkeypatch) -> None:
    time, seen = Time(monkeypatch), GroupProgress()
    seen.wait_for(1, 2, 3)
    time.now += 60
    seen.keep_waiting_for((3,))
    assert (seen.activity(name).waits_for, seen.activity(name).seconds) == (("w3",), 60.0)


def test_the_first_piece_of_a_message_tells_nothing_of_the_connection_because_its_sender_may_have_been_busy(
    monkeypatch,
) -> None:
    time, seen = Time(monkeypatch), GroupProgress()
    for seconds in (60.0, 2.0, 3.0):
        seen.wait_for(1)
        time.now += seconds
        seen.on_piece()
        time.now += seconds
        seen.on_piece()
        seen.go_on()
    assert seen.activity(name).slowest_piece_seconds == 60.0
    again = GroupProgress()
    again.wait_for(1)
    time.now += 60.0
    again.on_piece()
    assert again.activity(name).slowest_piece_seconds == 0.0


def test_a_heartbeat_names_only_so_many_peers() -> None:
    seen = GroupProgress()
    seen.wait_for(*range(1000))
    assert len(seen.activity(name).waits_for) == MOST_NAMED


# ---- in a group


class Posted:
    """torch's process group, and its works, which are done at once; `posts` has what was posted."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, int]] = []
        self.kept: list[weakref.ref[torch.Tensor]] = []

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Posted:
        self.posts.append(("send", tensors[0].nbytes))
        return self

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Posted:
        self.posts.append(("recv", tensors[0].nbytes))
        self.kept.append(weakref.ref(tensors[0]))
        return self

    def wait(self, *limit: object) -> bool:
        return True


def test_a_long_message_travels_in_pieces_so_that_a_slow_connection_is_seen_to_be_alive() -> None:
    posted = Posted()
    group = GlooGroup(posted, 0, 2, GroupProgress())
    group.send(torch.zeros(PIECE_BYTES // 4 * 2 + 1), 1, 0).wait()
    group.receive(torch.zeros(3, PIECE_BYTES // 8), 1, 0).wait()
    group.close()
    assert posted.posts == [
        ("send", PIECE_BYTES), ("send", PIECE_BYTES), ("send", 4), ("recv", PIECE_BYTES), ("recv", PIECE_BYTES // 2),
    ]  # fmt: skip


class Looked(Posted):
    """Notes for whom the group says that it waits whenever one of its works is waited for."""

    def __init__(self, progress: GroupProgress) -> None:
        super().__init__()
        self._progress = progress
        self.named: list[tuple[str, ...]] = []

    def wait(self, *limit: object) -> bool:
        self.named.append(self._progress.activity(name).waits_for)
        return True


def test_of_messages_that_are_waited_for_together_only_the_peer_whose_turn_it_is_is_named() -> None:
    """What the others sent may have come: a wait for them would accuse links that are whole."""
    progress = GroupProgress()
    looked = Looked(progress)
    group = GlooGroup(looked, 0, 4, progress)
    works = [group.receive(torch.zeros(4), peer, 0) for peer in (2, 1, 3)]
    group.wait(works)
    assert looked.named == [(name(2),), (name(1),), (name(3),)]
    assert not group.in_flight
    assert progress.activity(name).waits_for == ()
    with pytest.raises(WorldChanged, match="the operation is over"):
        group.wait(works)
    group.close()


@rule(
    "Of the probes of a slow peer's connection only the last is kept, and they become rarer: gloo frees a posted "
    "receive only when the group ends",
    "Groups",
    broken_by=Edit(
        "shoal.group.wait_threads",
        "        self.pause_seconds = min(2 * self.pause_seconds, LONGEST_LOOK_SECONDS)\n",
        "",
    ),
)
def test_of_all_looks_at_a_peer_only_the_last_is_kept_and_they_become_rarer() -> None:
    posted = Posted()
    group = GlooGroup(posted, 0, 2, GroupProgress())
    pauses = []
    for _ in range(9):
        connection = group.connection(1)
        pauses.append(connection.pause_seconds)
        assert connection.look() is None
    gc.collect()
    assert len([one for one in posted.kept if one() is not None]) == 1
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_LOOK_SECONDS, 60.0, 60.0]
    group.close()


def test_who_builds_a_group_waits_for_those_who_have_not_come() -> None:
    server = RendezvousServer("127.0.0.1")
    mine = GroupProgress(4)
    cancellation = Cancellation()
    with ThreadPoolExecutor(1) as threads:
        client = RendezvousClient(GroupSpec(4, 0, (server.address,) * 3, 0, progress=mine), cancellation)
        waiting = threads.submit(client.wait_for_all)
        other = RendezvousClient(GroupSpec(4, 2, (server.address,) * 3, 0), Cancellation())
        while mine.activity(name).waits_for != ("w1",):
            assert not waiting.done()
        last = RendezvousClient(GroupSpec(4, 1, (server.address,) * 3, 0), Cancellation())
        waiting.result(100)
    for one in (client, other, last):
        one.close()
    server.close()


def test_while_gloo_connects_those_who_do_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "LONG_SECONDS", 0.01)
    mine, server = GroupProgress(4), RendezvousServer("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        away = f"127.0.0.1:{closed.getsockname()[1]}"
    deadline = time.monotonic() + 100
    with gloo.watch_reach(GroupSpec(4, 0, (server.address, server.address, away), 0, progress=mine)):
        while mine.activity(name).waits_for != ("w2",):
            assert time.monotonic() < deadline, f"waited 100 s for w2 to be named alone: {mine.activity(name)}"
    server.close()
