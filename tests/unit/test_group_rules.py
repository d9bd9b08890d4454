"""What waits of a group and of its building depend on: no clock, and never the training thread (docs/rules.md)."""

from __future__ import annotations

import ast
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import shoal
import torch
from over_gloo import over_gloos
from rule import Edit, holds, rule
from shoal.group.build import Cancellation, GroupSpec
from shoal.group.gloo import A_MOMENT, GlooGroup, build_gloo
from shoal.group.group import Group, GroupProgress
from shoal.group.rendezvous import RendezvousServer
from shoal.session import shared as groups_module
from shoal.session.shared import Built, Groups
from worlds import recovery


@rule(
    "A group's own time-out is a day, and no wait in it has a limit: when such a limit expires, the group is closed",
    "Groups",
    broken_by=Edit("shoal.group.gloo", "FOREVER = timedelta(days=1)", "FOREVER = timedelta(minutes=30)"),
)
def test_a_groups_own_timeout_is_a_day_because_its_expiry_would_close_the_group() -> None:
    servers = [RendezvousServer("127.0.0.1") for _ in range(2)]
    addresses = tuple(server.address for server in servers)
    with ThreadPoolExecutor(2) as threads:
        specs = [GroupSpec(1, rank, addresses, builder=0) for rank in range(2)]
        groups = list(threads.map(lambda spec: build_gloo(spec, Cancellation()), specs))
    for group in groups:
        assert isinstance(group, GlooGroup)
        assert group._gloo.options._timeout == timedelta(days=1)  # type: ignore[union-attr]
        group.close()
    for server in servers:
        server.close()


class Recorded:
    """A process group of torch, and its works, that notes how it is waited for."""

    def __init__(self) -> None:
        self.waits: list[tuple[Any, ...]] = []

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Recorded:
        return self

    recv = send

    def wait(self, *limit: timedelta) -> bool:
        self.waits.append(limit)
        return True


@holds("A group's own time-out is")
def test_no_wait_of_an_exchange_has_a_limit_because_its_expiry_would_close_the_group() -> None:
    gloo = Recorded()
    group = GlooGroup(gloo, 0, 3, GroupProgress())
    group.send(torch.zeros(4), 1, 0).wait()
    group.receive(torch.zeros(4), 2, 0).wait()
    group.all_gather(torch.zeros(2, dtype=torch.uint8))
    group.close()
    assert gloo.waits == [()] * 6


@rule(
    "A group that is closed with operations in flight is aborted first, whatever a destructor would do with them",
    "Groups",
    broken_by=Edit("shoal.group.gloo", "        if self.in_flight or self._servers:\n            self.abort()\n", ""),
)
def test_a_group_that_is_closed_with_operations_in_flight_is_aborted_first() -> None:
    """Whether destroying it would wait for them is gloo's affair, and its time-out is a day."""
    finished, interrupted = Recorded(), Recorded()
    group = GlooGroup(finished, 0, 2, GroupProgress())
    group.receive(torch.zeros(4), 1, 0).wait()
    group.close()
    assert finished.waits == [()]
    group = GlooGroup(interrupted, 0, 2, GroupProgress())
    group.receive(torch.zeros(4), 1, 0)
    group.close()
    assert interrupted.waits == [(A_MOMENT,)]


def test_threads_that_serve_have_ended_when_their_group_is_closed() -> None:
    """One that comes back from gloo when Python ends aborts the process."""
    begun, never = threading.Event(), threading.Event()

    def answer(*_: object) -> None:
        begun.set()
        never.wait(0.2)

    def act(group: Group) -> None:
        threads = set(threading.enumerate())
        if group.rank == 0:
            group.serve(7, 1, answer)
            assert begun.wait(100.0)
            [serving] = (one for one in set(threading.enumerate()) - threads if "serves" in one.name)
            group.close()
            assert not serving.is_alive()
        else:
            group.wait([group.send(torch.zeros(1, dtype=torch.int64), 0, 7)])
            assert begun.wait(100.0)

    over_gloos(2, 1, lambda groups: act(groups[0]))


@rule(
    "The training thread never waits while a group is built, and no TCPStore is used",
    "Groups",
    broken_by=Edit(
        "shoal.session.shared",
        'self._start(f"shoal-group-{plan.generation}", self._build, building)',
        "self._build(building)",
    ),
)
def test_whoever_asks_for_a_group_does_not_wait_for_it() -> None:
    """The session's thread hears the plan, the training thread trains: the building waits on a thread of its own."""
    go, builders, outcomes, lock = threading.Event(), [], SimpleQueue(), threading.RLock()

    def transport(spec: GroupSpec, cancellation: Cancellation) -> Group:
        builders.append(threading.current_thread())
        go.wait(100)
        return GlooGroup(Recorded(), spec.rank, spec.size, spec.progress)

    groups = Groups(transport, lock, outcomes.put, outcomes.put)
    with lock:
        groups.build(recovery(1, "ab"), 0, joiner=False)
    assert outcomes.empty()
    go.set()
    assert isinstance(outcomes.get(timeout=100), Built)
    assert builders[0] is not threading.current_thread()
    groups.close()


@holds("Building a group can be")
def test_the_building_of_a_group_that_is_not_wanted_any_more_is_cancelled_at_once() -> None:
    go, begun, lock = threading.Event(), SimpleQueue[Cancellation](), threading.RLock()

    def transport(spec: GroupSpec, cancellation: Cancellation) -> Group:
        begun.put(cancellation)
        go.wait(100)
        return GlooGroup(Recorded(), spec.rank, spec.size, spec.progress)

    groups = Groups(transport, lock, lambda outcome: None, lambda error: None)
    with lock:
        groups.build(recovery(1, "ab"), 0, joiner=False)
    cancellation = begun.get(timeout=100)
    with lock:
        groups.cancel({1})
        assert not cancellation.is_cancelled
        groups.cancel({2})
    assert cancellation.is_cancelled
    go.set()
    groups.close()


def test_only_so_many_groups_are_built_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan whose group is not built here does not begin; another one comes."""
    monkeypatch.setattr(groups_module, "MOST_BUILDERS", 2)
    go, asked, outcomes, lock = threading.Event(), SimpleQueue[int](), SimpleQueue[Any](), threading.RLock()

    def transport(spec: GroupSpec, cancellation: Cancellation) -> Group:
        asked.put(spec.generation)
        go.wait(100)
        return GlooGroup(Recorded(), spec.rank, spec.size, spec.progress)

    groups = Groups(transport, lock, outcomes.put, outcomes.put)
    with lock:
        for generation in (1, 2, 3):
            groups.build(recovery(generation, "ab"), 0, joiner=False)
        assert [generation for generation in (1, 2, 3) if groups.of(generation) is not None] == [1, 2]
    assert {asked.get(timeout=100) for _ in range(2)} == {1, 2}
    go.set()
    assert all(isinstance(outcomes.get(timeout=100), Built) for _ in range(2))
    groups.close()
    assert asked.empty()


@holds("The training thread never waits")
def test_nobody_waits_in_a_store_that_cannot_be_cancelled() -> None:
    """A TCPStore's client blocks for as long as its host is frozen; Shoal meets over a server of its own."""
    source = Path(shoal.__file__).parent
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else node.id
        for file in source.rglob("*.py")
        if file.parent.name != "doctor"  # a process of its own, which is ended when its time is over
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute | ast.alias | ast.Name)
    }
    assert "PrefixStore" not in names and not [name for name in names if "TCPStore" in name or "FileStore" in name]
