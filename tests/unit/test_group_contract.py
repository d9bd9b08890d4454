"""What every group promises, whatever it is made of: gloo, gloo whose messages pass through shared memory, one in
memory, all staged for a device that is late, and one whose bulk goes by a wire that knows no tags.

Groups for real accelerators are held to the same by tests/gpu.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from late_device import LateDevice
from memory_group import MemoryGroup, Wire
from ordered_wire import ordered_over_gloo
from over_gloo import over_gloo
from rule import Edit, holds, rule
from shoal.group import host_peers
from shoal.group.device_group import StagedGroup
from shoal.group.group import Group, WorldChanged
from shoal.group.ordered import OrderedGroup
from tiers import check
from torch import Tensor

pytestmark = check("builds groups of gloo")

Act = Callable[[Group], object]
SIZE = 3


def in_memory(size: int, act: Act) -> None:
    changed = threading.Condition(threading.RLock())
    wire = Wire(size, changed)

    def member(rank: int) -> None:
        with changed:
            act(MemoryGroup(wire, rank, lambda until: changed.wait_for(until, 30.0)))

    with ThreadPoolExecutor(size) as threads:
        list(threads.map(member, range(size)))


def late(group: Group) -> Group:
    return StagedGroup(group, LateDevice(group.rank))


def staged_over_gloo(size: int, act: Act) -> None:
    over_gloo(size, lambda group: act(late(group)))


def staged_with_a_thread(size: int, act: Act) -> None:
    def staged(group: Group) -> None:
        found = StagedGroup(group, LateDevice(group.rank), posts_beside=True)
        try:
            act(found)
        finally:
            if found._landing is not None:
                found._landing.put(None)  # what `close` does, but the group below is still needed

    over_gloo(size, staged)


def staged_in_memory(size: int, act: Act) -> None:
    in_memory(size, lambda group: act(late(group)))


def through_shared_memory(size: int, act: Act) -> None:
    """All of it, the largest messages apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_peers, "LEAST_BYTES", host_peers.PLACE.size)
        over_gloo(size, act)


def through_little_memory(size: int, act: Act) -> None:
    """Some messages find no room in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_peers, "LEAST_BYTES", host_peers.PLACE.size)
        patch.setattr(host_peers, "PLACES", 3)
        over_gloo(size, act)


def staged_through_shared_memory(size: int, act: Act) -> None:
    through_shared_memory(size, lambda group: act(late(group)))


every_group = pytest.mark.parametrize(
    "run",
    [
        over_gloo,
        through_shared_memory,
        through_little_memory,
        in_memory,
        staged_over_gloo,
        staged_with_a_thread,
        staged_through_shared_memory,
        staged_in_memory,
        ordered_over_gloo,
    ],
)
Run = Callable[[int, Act], None]


def values(rank: int, peer: int, number: int, count: int = 1000) -> Tensor:
    return torch.arange(count, dtype=torch.float32) + 10_000 * (100 * rank + 10 * peer + number)


@rule(
    "Whoever waits in a group has posted all that he sends, and what lands while he is elsewhere is posted by a "
    "thread: a peer may wait for it",
    "Devices",
    broken_by=[
        Edit(
            "shoal.group.device_group",
            "                on_request(peer, message)\n            self.post_all()\n",
            "                on_request(peer, message)\n",
        ),
        Edit(
            "shoal.group.device_group",
            "        if work.posted is None and self._posts_beside:\n",
            "        if work.posted is None and self._posts_beside and copy is LANDED:\n",
        ),
    ],
)
@holds("A message leaves a device")
@every_group
def test_messages_of_one_tag_keep_their_order_and_tags_do_not_mix(run: Run) -> None:
    def act(group: Group) -> None:
        others = [peer for peer in range(group.size) if peer != group.rank]
        sent = [values(group.rank, peer, number) for peer in others for number in range(4)]
        sends = [
            group.send(message, peer, number % 2)
            for message, (peer, number) in zip(sent, [(p, n) for p in others for n in range(4)], strict=True)
        ]
        for peer in others:
            came = {number: torch.zeros(1000) for number in (1, 3, 0, 2)}
            group.wait([group.receive(message, peer, number % 2) for number, message in came.items()])
            for number, message in came.items():
                assert torch.equal(message, values(peer, group.rank, number))
        group.wait(sends)

    run(SIZE, act)


@rule(
    "Pinned memory serves others only when the message in it has left",
    "Devices",
    broken_by=Edit(
        "shoal.group.device_group",
        "            self.posted = below.send(self._message, self._to, self._tag)\n",
        "            self.posted = below.send(self._message, self._to, self._tag)\n"
        "            if self.copy is not LANDED:\n"
        "                self._group.device.give_back(self._message)\n"
        "                self.copy = LANDED\n",
    ),
)
@every_group
def test_any_dtype_and_size_arrives(run: Run) -> None:
    messages = [
        torch.tensor([1, -2, 3], dtype=torch.int64), torch.ones(5, 7, dtype=torch.bfloat16), torch.tensor(2.5).double(),
        torch.arange(3_000_000, dtype=torch.int32), torch.tensor([7], dtype=torch.uint8),
    ]  # fmt: skip

    def act(group: Group) -> None:
        if group.rank == 0:
            group.wait([group.send(message, 1, 5) for message in messages])
        if group.rank == 1:
            came = [torch.zeros_like(message) for message in messages]
            group.wait([group.receive(message, 0, 5) for message in came])
            assert all(torch.equal(one, other) for one, other in zip(came, messages, strict=True))

    run(SIZE, act)


@every_group
def test_who_waits_in_the_background_learns_that_it_is_over(run: Run) -> None:
    def act(group: Group) -> None:
        peer = (group.rank + 1) % group.size
        came, before = torch.zeros(1000), (group.rank - 1) % group.size
        works = [group.send(values(group.rank, peer, 0), peer, 1), group.receive(came, before, 1)]
        waiting = group.begin_wait(works)
        for _ in range(1000):
            if waiting.is_over:
                break
        waiting.wait()
        assert torch.equal(came, values(before, group.rank, 0))
        assert group.begin_wait([]).is_over

    run(SIZE, act)


@every_group
def test_what_was_sent_may_be_changed_once_it_was_waited_for(run: Run) -> None:
    def act(group: Group) -> None:
        if group.rank == 0:
            message = values(0, 1, 0)
            for number in range(5):
                message.copy_(values(0, 1, number))
                group.wait([group.send(message, 1, 2)])
        if group.rank == 1:
            for number in range(5):
                came = torch.zeros(1000)
                group.receive(came, 0, 2).wait()
                assert torch.equal(came, values(0, 1, number))

    run(2, act)


@every_group
def test_memory_that_a_message_lay_in_can_be_freed_once_it_was_waited_for(run: Run) -> None:
    """As units are in stage 3: torch frees nothing that numpy has looked at."""

    def act(group: Group) -> None:
        peer = 1 - group.rank
        sent, came = values(group.rank, peer, 0), torch.zeros(1000)
        group.wait([group.receive(came, peer, 4), group.send(sent, peer, 4)])
        assert torch.equal(came, values(peer, group.rank, 0))
        for message in (sent, came):
            message.untyped_storage().resize_(0)

    run(2, act)


@every_group
def test_a_message_of_the_host_keeps_its_place_among_those_of_the_device(run: Run) -> None:
    def act(group: Group) -> None:
        pinned = (
            group.device.pinned
            if isinstance(group, StagedGroup | OrderedGroup)
            else lambda n, dtype: torch.zeros(n, dtype=dtype)
        )
        if group.rank == 0:
            here = pinned(1000, torch.float32)
            here.copy_(values(0, 1, 1))
            group.wait([group.send(values(0, 1, 0), 1, 3), group.send(here, 1, 3), group.send(values(0, 1, 2), 1, 3)])
        if group.rank == 1:
            came = [torch.zeros(1000), pinned(1000, torch.float32), torch.zeros(1000)]
            group.wait([group.receive(message, 0, 3) for message in came])
            assert all(torch.equal(message, values(0, 1, number)) for number, message in enumerate(came))

    run(2, act)


@holds("Whoever waits in a group has")
@every_group
def test_whoever_serves_answers_beside_what_it_does_itself(run: Run) -> None:
    answered = threading.Barrier(2)

    def act(group: Group) -> None:
        if group.rank == 0:
            sent: list[object] = []

            def answer(peer: int, message: Tensor) -> None:
                answer_of = values(0, peer, int(message[1]))
                sent.append((answer_of, group.send(answer_of, peer, 8)))

            group.serve(7, 2, answer)
            _leave_the_lock(group, answered)  # in no call of the group until all is answered
        else:
            for number in range(3):
                came = torch.zeros(1000)
                group.wait([group.send(torch.tensor([0, number]), 0, 7), group.receive(came, 0, 8)])
                assert torch.equal(came, values(0, 1, number))
            _leave_the_lock(group, answered)

    run(2, act)


def _leave_the_lock(group: Group, barrier: threading.Barrier) -> None:
    below = group.below if isinstance(group, StagedGroup) else group
    if not isinstance(below, MemoryGroup):
        barrier.wait(100.0)
        return
    below.wire.changed.release()
    try:
        barrier.wait(100.0)
    finally:
        below.wire.changed.acquire()


@every_group
def test_everybody_gets_every_row(run: Run) -> None:
    def act(group: Group) -> None:
        rows = group.all_gather(torch.tensor([group.rank, 7], dtype=torch.uint8))
        assert rows.tolist() == [[rank, 7] for rank in range(group.size)]

    run(SIZE, act)


@every_group
def test_an_abort_ends_what_waits_and_all_that_comes_later(run: Run) -> None:
    def act(group: Group) -> None:
        if group.rank == 0:
            group.abort()
            group.abort()
        else:
            with pytest.raises(WorldChanged):
                group.receive(torch.zeros(4), 0, 1).wait()
            group.close()
            with pytest.raises(WorldChanged):
                group.receive(torch.zeros(4), 0, 1).wait()
            with pytest.raises(WorldChanged):
                group.send(torch.zeros(4), 0, 1).wait()
        raise WorldChanged("the test is over")

    with pytest.raises(WorldChanged, match="the test is over"):
        run(2, act)


@holds("Whoever waits in a group has")
def test_what_lands_while_nobody_calls_the_group_leaves_by_a_thread() -> None:
    arrived = threading.Barrier(2)

    def act(group: Group) -> None:
        staged = StagedGroup(group, LateDevice(), posts_beside=True)
        if group.rank == 0:
            sends = [staged.send(values(0, 1, number), 1, 1) for number in range(20)]
            arrived.wait(100.0)
            staged.wait(sends)
            staged._landing.put(None)  # type: ignore[union-attr]
        else:
            for number in range(20):
                came = torch.zeros(1000)
                staged.receive(came, 0, 1).wait()
                assert torch.equal(came, values(0, 1, number))
            arrived.wait(100.0)

    over_gloo(2, act)
