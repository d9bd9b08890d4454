"""What passes between members of one host through shared memory, what does not, and what is left of it."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import examples
from over_gloo import over_gloo, over_gloos
from rule import Edit, holds, rule
from shoal.group import host_peers
from shoal.group.gloo import GlooGroup
from shoal.group.group import Group, WorldChanged
from shoal.group.host_peers import PLACE_BYTES, PLACES, HostPeers, OpenedMemory, SharedMemory
from shoal.process.unnamed_memory import GROUP as NAME
from tiers import check
from torch import Tensor

pytestmark = check("starts processes")

LARGE = host_peers.LEAST_BYTES
SHORT = host_peers.PLACE.size
"""Bytes of the message that says where another one lies."""


class Counted:
    """A process group of torch; counts the bytes that it is given to send."""

    def __init__(self, gloo: Any) -> None:
        self._gloo, self.sent = gloo, 0

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        self.sent += tensors[0].nbytes
        return self._gloo.send(tensors, to, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)


def counted(group: Group) -> Counted:
    """From when all members are here, who have opened each other's memory by then."""
    assert isinstance(group, GlooGroup)
    group.all_gather(torch.zeros(1, dtype=torch.uint8))
    group._gloo = counts = Counted(group._gloo)
    return counts


def message(rank: int, number: int, size: int = LARGE) -> Tensor:  # (size,) uint8
    return (torch.arange(size, dtype=torch.int32) * 7 + 31 * rank + number).to(torch.uint8)


def swap(group: Group, numbers: Sequence[int] = (0,), size: int = LARGE) -> None:
    """Everybody sends so many messages to everybody, and looks at what came."""
    others = [rank for rank in range(group.size) if rank != group.rank]
    came = {(peer, number): torch.zeros(size, dtype=torch.uint8) for peer in others for number in numbers}
    works = [group.receive(into, peer, 1) for (peer, _), into in came.items()]
    works += [group.send(message(group.rank, number, size), peer, 1) for peer in others for number in numbers]
    group.wait(works)
    for (peer, number), into in came.items():
        assert torch.equal(into, message(peer, number, size))


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if NAME in line]


def new_mappings(before: Sequence[str]) -> list[str]:
    """Those that were not there; one of an earlier test may go at any time."""
    return [line for line in mappings() if line not in before]


def test_what_is_large_does_not_pass_through_the_network_and_what_is_small_does() -> None:
    def act(group: Group) -> None:
        counts = counted(group)
        swap(group)
        assert counts.sent == SHORT * (group.size - 1)
        swap(group, size=LARGE - 1)
        assert counts.sent == (SHORT + LARGE - 1) * (group.size - 1)

    over_gloo(3, act)


def test_room_is_given_back_as_messages_are_taken() -> None:
    rounds = 3 * PLACES * PLACE_BYTES // (4 * LARGE)

    def act(group: Group) -> None:
        counts = counted(group)
        for number in range(rounds):
            swap(group, range(4 * number, 4 * number + 4))
        assert counts.sent == 4 * rounds * SHORT

    over_gloo(2, act)


@holds("Memory that members of one host")
def test_what_finds_no_room_is_sent_after_all_and_may_be_awaited_in_any_order() -> None:
    count = PLACES * PLACE_BYTES // LARGE + 3

    def act(group: Group) -> None:
        counts, peer = counted(group), 1 - group.rank
        came = [torch.zeros(LARGE, dtype=torch.uint8) for _ in range(count)]
        receives = [group.receive(into, peer, 1) for into in came]
        sends = [group.send(message(group.rank, number), peer, 1) for number in range(count)]
        assert counts.sent == (count - 3) * SHORT + 3 * LARGE
        for receive in reversed(receives):
            receive.wait()
        group.wait(sends)
        assert all(torch.equal(into, message(peer, number)) for number, into in enumerate(came))

    over_gloo(2, act)


def test_members_of_different_hosts_share_no_memory() -> None:
    def act(groups: Sequence[Group]) -> None:
        (group,) = groups
        counts = counted(group)
        swap(group)
        assert counts.sent == SHORT + 2 * LARGE  # of the other three one is of the same host
        group.all_gather(torch.zeros(1, dtype=torch.uint8))

    over_gloos(4, 1, act, ("127.0.0.1", "127.0.0.2"))


def test_a_process_of_another_container_is_none_of_the_host_though_its_number_is_known_here() -> None:
    memory = SharedMemory(2)
    here = memory.address
    memory.close()
    assert here.is_seen_from(here)
    assert not here._replace(processes=b"pid:[1]").is_seen_from(here)
    assert not here._replace(boot=b"another start").is_seen_from(here)


def test_what_is_no_file_is_not_even_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory(2)
    ends = os.pipe()
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("a device may do something when it is opened"))
    with pytest.raises(FileNotFoundError, match="is no memory of Shoal's"):
        OpenedMemory(memory.address._replace(descriptor=ends[0]), 1, 2)
    memory.close()
    for end in ends:
        os.close(end)


@holds("Memory that members of one host")
def test_memory_of_another_user_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in it may be a mutex, which the C library believes."""
    memory, user = SharedMemory(2), os.geteuid()
    OpenedMemory(memory.address, 1, 2).close()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(FileNotFoundError, match="is no memory of Shoal's"):
        OpenedMemory(memory.address, 1, 2)
    memory.close()


@pytest.mark.parametrize("name", ["own_life", "watch"])
def test_members_that_cannot_watch_each_other_share_memory_all_the_same(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    def act(group: Group) -> None:
        counts = counted(group)
        swap(group)
        assert counts.sent == SHORT

    monkeypatch.setattr(f"shoal.group.host_peers.{name}", no_thread)
    over_gloo(2, act)


def _refused(*_: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@holds("Memory that members of one host")
@pytest.mark.parametrize(
    "name", ["os.memfd_create", "shoal.group.host_peers.open_at", "shoal.group.host_peers.reserve"]
)
def test_where_memory_cannot_be_had_or_opened_messages_are_sent(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def act(group: Group) -> None:
        if name.endswith("_reserve"):
            monkeypatch.setattr(name, _refused)
        counts = counted(group)
        swap(group)
        assert counts.sent == LARGE

    if not name.endswith("_reserve"):
        monkeypatch.setattr(name, _refused)
    over_gloo(2, act)


def test_a_system_on_which_no_memory_may_hold_programs_lets_it_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the sysctl `vm.memfd_noexec` has it."""
    create, without_programs = os.memfd_create, 0x8
    try:
        os.close(create(NAME, without_programs))
    except OSError:
        pytest.skip("a kernel before 6.3 knows no such memory")
    monkeypatch.setattr(os, "memfd_create", lambda name, flags: create(name, flags | without_programs))

    def act(group: Group) -> None:
        counts = counted(group)
        swap(group)
        assert counts.sent == SHORT

    over_gloo(2, act)


def test_one_member_that_can_have_no_memory_keeps_the_others_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = threading.Lock()
    announce = HostPeers.announce
    without: list[HostPeers] = []

    def once_refused(peers: HostPeers, members: int) -> bytes:
        with made, pytest.MonkeyPatch.context() as patch:
            if not without:
                without.append(peers)
                patch.setattr(os, "memfd_create", _refused)
            return announce(peers, members)

    monkeypatch.setattr(HostPeers, "announce", once_refused)

    def act(group: Group) -> None:
        counts = counted(group)
        swap(group)
        is_without = group._host_peers in without  # type: ignore[attr-defined]
        assert counts.sent == (2 * LARGE if is_without else LARGE + SHORT)

    over_gloo(3, act)


@rule(
    "Memory that members of one host share belongs to one group, and only a message of the group says that bytes "
    "in it are whole; who has not opened it, and who finds no room, is sent the bytes; no other file is opened "
    "in its place, not even one that was just made, nor what another user has made",
    "Groups",
    broken_by=[
        Edit(
            "shoal.group.host_peers",
            "            _copy(self._memory.content(place, target.numel()), target)\n"
            "            self._memory.mark(place, count, FREE)\n",
            "            self._memory.mark(place, count, FREE)\n"
            "            _copy(self._memory.content(place, target.numel()), target)\n",
        ),
        Edit(
            "shoal.process.unnamed_memory",
            "        if os.pread(descriptor, TOKEN_BYTES, 0) != address.token:\n",
            "        if not address.token:\n",
        ),
        Edit(
            "shoal.process.unnamed_memory",
            "        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & ~SEALED_BY_THE_SYSTEM != _seals():\n",
            "        if descriptor < 0:\n",
        ),
        Edit("shoal.group.host_peers", "not memory.is_open(reader) or ", ""),
        Edit("shoal.group.host_peers", "            memory.mark(place, count, TAKEN)\n", ""),
        Edit(
            "shoal.process.unnamed_memory",
            " or status.st_uid != os.geteuid()",
            "",
            by="test_memory_of_another_user_is_not_opened",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["a file", "a new file", "memory of others", "a pipe", "another memory", "nothing"])
def test_a_descriptor_that_is_something_else_by_now_is_not_opened_and_not_written(tmp_path: Path, kind: str) -> None:
    own = SharedMemory(2)
    other, ends = SharedMemory(2), os.pipe()
    content = {"a file": b"x" * 100, "a new file": b"", "memory of others": own.address.token + bytes(17 << 20)}
    files = {
        "a file": os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR),
        "a new file": os.open(tmp_path / "new", os.O_CREAT | os.O_RDWR),
        "memory of others": os.memfd_create(NAME),
    }
    for name, file in files.items():
        os.pwrite(file, content[name], 0)
    descriptor = {**files, "a pipe": ends[0], "another memory": other.address.descriptor, "nothing": 9999}
    try:
        with pytest.raises(OSError, match=r"process|/proc|memory|argument"):
            OpenedMemory(own.address._replace(descriptor=descriptor[kind]), 1, 2)
        for name, file in files.items():
            assert os.pread(file, len(content[name]) + 1, 0) == content[name]
    finally:
        own.close()
        other.close()
        for number in (*files.values(), *ends):
            os.close(number)


def test_nobody_can_make_memory_shorter_that_others_have_opened() -> None:
    own = SharedMemory(2)
    size = os.fstat(own.address.descriptor).st_size
    for other in (0, size - 1, size + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(own.address.descriptor, other)
    own.close()


def test_a_number_of_a_place_that_is_none_is_refused() -> None:
    own = SharedMemory(2)
    opened = OpenedMemory(own.address, 1, 2)
    for place in (PLACES, PLACES - 3, 1 << 40):
        with pytest.raises(RuntimeError, match=f"4 places is said to lie at {place}; there are {PLACES}"):
            opened.take(place, torch.zeros(LARGE, dtype=torch.uint8))
    opened.close()
    with pytest.raises(RuntimeError, match="the shared memory is closed"):
        opened.take(0, torch.zeros(LARGE, dtype=torch.uint8))
    own.close()
    assert own.put(torch.zeros(LARGE, dtype=torch.uint8), 1) is None


@holds("Memory that members of one host")
def test_places_are_given_back_when_what_lay_there_is_copied_and_not_before() -> None:
    """The sender may put something else there at once."""
    own = SharedMemory(2)
    opened = OpenedMemory(own.address, 1, 2)
    place = own.put(message(0, 1), 1)
    memory = opened._memory
    assert place is not None and memory is not None
    came, copied = torch.zeros(LARGE, dtype=torch.uint8), list[bool]()

    def look(*_: object) -> None:
        copied.append(torch.equal(came, message(0, 1)))

    memory.mark = look  # type: ignore[method-assign]
    opened.take(place, came)
    assert copied == [True]
    opened.close()
    own.close()


def test_memory_is_taken_as_it_is_used_and_gone_with_the_group() -> None:
    gc.collect()
    before = mappings()
    all_there = threading.Barrier(3)

    def act(group: Group) -> None:
        all_there.wait(100.0)
        assert len(new_mappings(before)) == 9
        memory = group._host_peers._memory  # type: ignore[attr-defined]
        assert os.fstat(memory.address.descriptor).st_blocks * 512 < PLACE_BYTES
        all_there.wait(100.0)
        swap(group)
        assert os.fstat(memory.address.descriptor).st_blocks * 512 < 2 * LARGE + PLACE_BYTES

    over_gloo(3, act)
    gc.collect()
    assert new_mappings(before) == []


def test_a_forked_child_keeps_no_memory_of_a_group_and_lives_on_without_it() -> None:
    own = SharedMemory(2)
    opened = OpenedMemory(own.address, 1, 2)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)]  # noqa: PTH115, PTH208
        del own, opened
        gc.collect()
        kept = [link for link in links if NAME in link] + mappings()
        os.write(writing, repr(kept).encode())
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 10_000) == b"[]"
    os.close(reading)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    place = own.put(message(0, 1), 1)
    assert place is not None
    came = torch.zeros(LARGE, dtype=torch.uint8)
    opened.take(place, came)
    assert torch.equal(came, message(0, 1))
    opened.close()
    own.close()


def _is_open(name: str) -> bool:
    try:
        os.fstat(int(name))
    except OSError:
        return False
    return True


def test_an_abort_ends_what_waits_for_a_message_of_the_same_host() -> None:
    def act(group: Group) -> None:
        if group.rank == 0:
            group.abort()
        else:
            into = torch.zeros(LARGE, dtype=torch.uint8)
            with pytest.raises(WorldChanged):
                group.receive(into, 0, 1).wait()
            group.close()
            assert not into.any()
        raise WorldChanged("the test is over")

    with pytest.raises(WorldChanged, match="the test is over"):
        over_gloo(2, act)


@pytest.fixture
def in_small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Messages of some bytes pass through memory for a few of them."""
    monkeypatch.setattr(host_peers, "LEAST_BYTES", 100)
    monkeypatch.setattr(host_peers, "PLACE_BYTES", 256)
    monkeypatch.setattr(host_peers, "PLACES", 4)
    yield


Posts = list[tuple[int, int, int, int]]
"""Sender, receiver, tag, bytes."""


@holds("Memory that members of one host")
@settings(max_examples=examples(25), deadline=None)
@given(
    posts=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1), st.integers(1, 1200)).filter(
            lambda post: post[0] != post[1]
        ),
        max_size=25,
    ),
    order=st.randoms(use_true_random=False),
)
@pytest.mark.usefixtures("in_small")
def test_whatever_is_sent_arrives_in_whatever_order_it_is_awaited(posts: Posts, order: Any) -> None:
    awaited = {rank: order.sample(range(len(posts)), len(posts)) for rank in range(3)}

    def act(group: Group) -> None:
        works: dict[int, Any] = {}
        came: dict[int, Tensor] = {}
        for number, (source, target, tag, size) in enumerate(posts):
            if target == group.rank:
                came[number] = torch.zeros(size, dtype=torch.uint8)
                works[number] = group.receive(came[number], source, tag)
            elif source == group.rank:
                works[number] = group.send(message(0, number, size), target, tag)
        for number in awaited[group.rank]:
            if number in works:
                works[number].wait()
        for number, into in came.items():
            assert torch.equal(into, message(0, number, posts[number][3]))

    over_gloo(3, act)
