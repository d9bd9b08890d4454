"""The one order of messages on a wire without tags: against a plain model, and groups that go by it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from random import Random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from late_device import LateDevice
from matrices import examples
from ordered_wire import BULK, GlooWire, ordered_over_gloo
from over_gloo import over_gloos
from rule import Edit, rule
from shoal.group.asked_order import MOST_IN_BATCH, Sequencer
from shoal.group.build import Cancellation, GroupSpec
from shoal.group.device_group import StagedGroup, all_have_their_own, groups_of
from shoal.group.gloo import build_gloo
from shoal.group.group import Group, SoloGroup, WorldChanged
from shoal.group.learnt_order import Carried, Post
from shoal.group.ordered import OrderedGroup
from shoal.group.rendezvous import RendezvousServer
from shoal.process.device import HOST

RANDOM = settings(
    max_examples=examples(60), deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate], database=None
)


def random_posts(random: Random, members: int, messages: int) -> list[list[Post]]:
    """By rank, what it posts, in an order of its own; of one pair and tag in the same order on both ends."""
    posts: list[list[Post]] = [[] for _ in range(members)]
    for _ in range(messages):
        sender, receiver = random.sample(range(members), 2)
        tag = random.randrange(3)
        posts[sender].append(Post(True, receiver, tag))
        posts[receiver].append(Post(False, sender, tag))
    for mine in posts:
        random.shuffle(mine)
    return posts


@rule(
    "A wire without tags carries what both ends have posted, and all members carry it in one order",
    "Devices",
    broken_by=Edit(
        "shoal.group.asked_order", "            if self._alone[key] * step < 0:\n", "            if sends:\n"
    ),
)
@given(st.integers(0, 1 << 30), st.integers(2, 5), st.integers(0, 200))
@RANDOM
def test_all_carry_the_same_batches_and_every_message_once(number: int, members: int, messages: int) -> None:
    random, sequencer = Random(number), Sequencer()
    posts = random_posts(random, members, messages)
    left = [deque(mine) for mine in posts]
    open_posts: list[list[Post]] = [[] for _ in range(members)]
    carried = 0
    while any(left):
        rank = random.choice([rank for rank, mine in enumerate(left) if mine])
        posted = [left[rank].popleft() for _ in range(min(len(left[rank]), random.randint(1, 9)))]
        open_posts[rank] += posted
        sequencer.take(rank, posted)
        for batch in sequencer.batches():
            ends = [(rank, post.peer, post.tag) for rank, mine in batch.items() for post in mine if post.sends]
            others = [(post.peer, rank, post.tag) for rank, mine in batch.items() for post in mine if not post.sends]
            assert sorted(ends) == sorted(others)
            assert 0 < len(ends) <= MOST_IN_BATCH
            for one, mine in batch.items():
                for post in mine:
                    open_posts[one].remove(post)  # it was posted: nobody is posted to carry what he has not
            carried += len(ends)
    assert carried == messages and not any(open_posts)


def test_what_is_posted_at_once_is_in_as_few_calls_of_the_wire_as_a_message_can_name() -> None:
    sequencer, count = Sequencer(), 2 * MOST_IN_BATCH + 6
    sequencer.take(0, [Post(True, 1, 0)] * count)
    assert not list(sequencer.batches()), "nobody has posted the other ends"
    sequencer.take(1, [Post(False, 0, 0)] * count)
    assert [len(batch[0]) for batch in sequencer.batches()] == [MOST_IN_BATCH, MOST_IN_BATCH, 6]


@given(st.booleans(), st.integers(0, (1 << 20) - 1), st.integers(0, 1 << 20))
def test_a_post_survives_being_a_number(sends: bool, peer: int, tag: int) -> None:
    assert Post.from_number(Post(sends, peer, tag).to_number()) == Post(sends, peer, tag)


# ---- groups


@pytest.mark.parametrize("number", range(4))
def test_messages_posted_in_any_order_by_all_members_come_as_they_were_meant(number: int) -> None:
    """A wire without an order would hang here, or bring what was meant for another."""
    posts = random_posts(Random(number), 3, 120)

    def act(group: Group) -> None:
        counts: dict[Post, int] = {}
        sends, receives = [], []
        for post in posts[group.rank]:
            count = counts[post] = counts.get(post, 0) + 1
            sender, receiver = (group.rank, post.peer) if post.sends else (post.peer, group.rank)
            meant = torch.full((7 + count % 5,), float(sender * 10_000 + receiver * 1_000 + post.tag * 100 + count))
            if post.sends:
                sends.append(group.send(meant, post.peer, post.tag))
            else:
                came = torch.zeros_like(meant)
                receives.append((group.receive(came, post.peer, post.tag), came, meant))
        for work, came, meant in receives:
            work.wait()
            assert torch.equal(came, meant)
        group.wait(sends)

    ordered_over_gloo(3, act)


@rule(
    "A group whose order is broken says so, naming the member at the other end of the message, and is not left hanging",
    "Devices",
    broken_by=[
        Edit("shoal.group.ordered", "self._host.on_failure(error.peer, str(error))", "assert error.peer < self.size"),
        Edit("shoal.group.ordered", "on_failure(error.peer,", "on_failure((self.rank + 1) % self.size,"),
    ],
)
@pytest.mark.parametrize("wrong", ["more", "fewer", "later"])
def test_steps_repeat_their_order_over_a_strict_wire_until_a_member_does_otherwise(wrong: str) -> None:
    """Each step in another order of waits; `reported`: what the members said of their posts."""
    posts, reported = random_posts(Random(7), 3, 40), [0, 0, 0]

    def step(group: OrderedGroup, mine: Sequence[Post], number: int) -> bool:
        works = []
        for post in mine:
            act = group.send if post.sends else group.receive
            works.append(act(torch.full((5,), float(number)), post.peer, post.tag))
        Random(number * 10 + group.rank).shuffle(works)
        for work in works:
            work.wait()
            assert work.tensor.eq(float(number)).all()  # type: ignore[attr-defined]
        return group.order.end_step()

    def vote(group: OrderedGroup, mine: bool) -> bool:
        return bool(group.all_gather(torch.tensor([mine], dtype=torch.uint8)).all())

    def act(group: Group) -> None:
        assert isinstance(group, OrderedGroup)
        real, mine = group._asked.on_post, posts[group.rank]

        def on_post(post: Post) -> None:
            reported[group.rank] += 1
            real(post)

        group._asked.on_post = on_post  # type: ignore[method-assign]
        group.order.begin_step("a step", False)
        for number in range(6):
            group.order.begin_step("a step", vote(group, step(group, mine, number)))
        assert reported[group.rank] == 2 * len(mine), "told in the first two steps only"
        with pytest.raises(WorldChanged):
            if group.rank or wrong == "fewer":
                step(group, mine if group.rank else [], 9)
            elif wrong == "more":
                group.send(torch.zeros(5), 2, 2).wait()
                group.send(torch.zeros(6), 2, 2)
            else:
                group.begin_wait([group.receive(torch.zeros(5), mine[-1].peer, mine[-1].tag)]).wait()
            vote(group, True)
        if not group.rank:
            assert group.broken_peers == ({"more": 2, "fewer": mine[0].peer, "later": mine[-1].peer}[wrong],)
        raise WorldChanged("the test is over")

    with pytest.raises(WorldChanged, match="the test is over"):
        ordered_over_gloo(3, act)


def test_what_lies_on_the_host_is_brought_up_and_only_bulk_goes_by_the_wire() -> None:
    def act(group: Group) -> None:
        assert isinstance(group, OrderedGroup) and isinstance(group.device, LateDevice)
        if group.rank == 0:
            here = group.device.pinned(50, torch.float32).fill_(3.0)
            group.wait([group.send(here, 1, 1), group.send(here, 1, 3)])
        else:
            there, host = torch.zeros(50), group.device.pinned(50, torch.float32)
            group.wait([group.receive(there, 0, 1), group.receive(host, 0, 3)])
            assert there.eq(3.0).all() and host.eq(3.0).all()
        assert isinstance(group._wire, GlooWire) and group._wire.carried == 1

    ordered_over_gloo(2, act)


def test_an_abort_ends_what_waits_for_the_wire_and_the_wire_is_closed_before_buffers_serve_again() -> None:
    closed: list[str] = []

    def act(group: Group) -> None:
        assert isinstance(group, OrderedGroup)
        wire = group._wire
        real = wire.close
        wire.close = lambda: (closed.append("wire"), real())  # type: ignore[method-assign, assignment, func-returns-value]
        if group.rank == 0:
            group.abort()
        else:
            with pytest.raises(WorldChanged):
                group.receive(torch.zeros(9), 0, 1).wait()
        group.close()
        with pytest.raises(WorldChanged):
            group.send(torch.zeros(9), 1 - group.rank, 1)
        raise WorldChanged("the test is over")

    with pytest.raises(WorldChanged, match="the test is over"):
        ordered_over_gloo(2, act)
    assert closed


def test_a_batch_that_is_named_as_the_group_is_aborted_is_not_carried_and_breaks_no_thread() -> None:
    def act(group: Group) -> None:
        assert isinstance(group, OrderedGroup)
        group.abort()
        group._to_carry.put(Carried(0, (Post(False, 1 - group.rank, 1),)))
        raise WorldChanged("the test is over")

    with pytest.raises(WorldChanged, match="the test is over"):
        ordered_over_gloo(2, act)
    for thread in threading.enumerate():
        if thread.name == "shoal-group-carries":
            thread.join(100.0)
            assert not thread.is_alive()


# ---- which group a device gets


def test_nccl_is_for_members_that_have_a_device_each() -> None:
    assert all_have_their_own([b"a", b"b"])
    assert not all_have_their_own([b"a", b"a"])
    assert not all_have_their_own([b"a", b""])
    assert not all_have_their_own([b"a", b"b", b"a"])


def built(announced: Sequence[bytes]) -> list[type]:
    """The class of group that each of so many members gets; what they say of their devices is given."""
    servers = [RendezvousServer("127.0.0.1") for _ in announced]
    addresses = tuple(server.address for server in servers)
    found: list[type] = [object] * len(announced)

    def member(groups: Sequence[Group]) -> None:
        (other,) = groups
        device = LateDevice()
        build = groups_of(build_gloo, device, BULK, lambda _: announced[other.rank], lambda *_: GlooWire(other))
        group = build(GroupSpec(7, other.rank, addresses, builder=0), Cancellation())
        try:
            found[other.rank] = type(group)
            group.all_gather(torch.zeros(1, dtype=torch.uint8))
            other.all_gather(torch.zeros(1, dtype=torch.uint8))
        finally:
            group.close()

    try:
        over_gloos(len(announced), 1, member)
    finally:
        for server in servers:
            server.close()
    return found


@rule(
    "Members take the same kind of group because each has heard what all have said where they met",
    "Devices",
    broken_by=Edit(
        "shoal.group.rendezvous",
        '                self._read_until(f"{HERE}{rank}")  # everybody may be here before all have said so\n',
        '                self._entries.setdefault(f"{HERE}{rank}", b"")\n',
    ),
)
def test_members_of_a_group_agree_by_what_each_has_said_where_they_met() -> None:
    assert built([b"one", b"two"]) == [OrderedGroup] * 2
    assert built([b"one", b"one"]) == [StagedGroup] * 2
    assert built([b"one", b""]) == [StagedGroup] * 2


def test_a_group_of_one_and_groups_of_the_host_are_what_they_were() -> None:
    assert groups_of(build_gloo, HOST, BULK) is build_gloo
    build = groups_of(build_gloo, LateDevice(), BULK)
    assert isinstance(build(GroupSpec(1, 0, ("127.0.0.1:1",), 0), Cancellation()), SoloGroup)


def test_some_members_of_a_world_have_a_group_and_an_order_of_their_own_for_another_purpose() -> None:
    """Two cells of two in a world of four, all of one generation and with the same servers."""
    servers = [RendezvousServer("127.0.0.1") for _ in range(4)]
    addresses = tuple(server.address for server in servers)

    def member(groups: Sequence[Group]) -> None:
        world, other = groups
        cell, rank = divmod(world.rank, 2)

        def connect(*_: object) -> GlooWire:
            return GlooWire(build_gloo(GroupSpec(7, rank, mine, builder=0, purpose="wire"), Cancellation()))

        mine = addresses[2 * cell : 2 * cell + 2]
        build = groups_of(build_gloo, LateDevice(), BULK, lambda _: bytes([world.rank + 1]), connect)
        group = build(GroupSpec(7, rank, mine, builder=0, purpose="cell"), Cancellation())
        assert isinstance(group, OrderedGroup) and (group.rank, group.size) == (rank, 2)
        try:
            for number in range(3):
                sent = group.send(torch.full((9,), float(cell + number)), 1 - rank, tag=1)
                group.receive(came := torch.zeros(9), 1 - rank, tag=1).wait()
                sent.wait()
                assert came.eq(cell + number).all()
            other.all_gather(torch.zeros(1, dtype=torch.uint8))
        finally:
            group.abort()
            group.close()
        world.all_gather(torch.zeros(1, dtype=torch.uint8))  # it ends with its cell's no more than with another's

    try:
        over_gloos(4, 2, member)
    finally:
        for server in servers:
            server.close()


def test_members_that_cannot_connect_their_devices_have_no_group() -> None:
    server = [RendezvousServer("127.0.0.1") for _ in range(2)]
    addresses = tuple(one.address for one in server)

    def fails(*_: object) -> GlooWire:
        raise WorldChanged("no way between these devices")

    def member(groups: Sequence[Group]) -> None:
        (other,) = groups
        build = groups_of(build_gloo, LateDevice(), BULK, lambda _: bytes([other.rank + 1]), fails)
        with pytest.raises(WorldChanged, match="no way between"):
            build(GroupSpec(7, other.rank, addresses, builder=0), Cancellation())

    try:
        over_gloos(2, 1, member)
    finally:
        for one in server:
            one.close()
