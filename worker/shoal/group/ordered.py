"""A group whose bulk goes from device to device by a wire that knows no tags; all else goes by a staged group.

A transport such as NCCL carries messages in the order in which both ends name them, and one that is waited for holds up
all behind it. So every member tells rank 0 what it has posted, and rank 0's `Sequencer` (pure) says in which order all
carry it, over the host's group, like the vote and all that is small. A message is carried only once both ends have
posted it, and all members carry the same batches in the same order, each its own part: no end ever waits for one that
waits for another message.

One thread carries batch after batch, and a waiting thread is told when its message's batch is over: then the device has
it. A wire is aborted with the group, and what was on it fails.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.group.gloo import GlooGroup
from shoal.group.group import RESERVED_TAGS, Group, Waiting, Work, WorldChanged
from shoal.process.device import Device

MOST_IN_BATCH = 32
"""Messages that are carried at once; one that is told in a message of fixed size needs a bound."""
_PEER_BITS, _TAG_BITS = 20, 21


class Post(NamedTuple):
    """A message as one end has posted it: those that are alike keep their order."""

    sends: bool
    """Whether it goes to `peer`; else it comes from there."""
    peer: int
    tag: int

    def to_number(self) -> int:
        """For messages between members."""
        return (int(self.sends) << _PEER_BITS | self.peer) << _TAG_BITS | self.tag

    @classmethod
    def from_number(cls, number: int) -> Post:
        """The inverse of `to_number`."""
        rest, tag = number >> _TAG_BITS, number & ((1 << _TAG_BITS) - 1)
        return cls(bool(rest >> _PEER_BITS), rest & ((1 << _PEER_BITS) - 1), tag)


Batch = dict[int, list[Post]]
"""By rank, what it carries of it."""


class Sequencer:
    """`take` what members have posted, in each one's order; then `batches` are what all carry next."""

    def __init__(self) -> None:
        self._alone: dict[tuple[int, int, int], int] = defaultdict(int)
        """By sender, receiver and tag: sends that no receive was posted for yet; below zero: the other way round."""
        self._met: deque[tuple[int, int, int]] = deque()

    def take(self, rank: int, posts: Sequence[Post]) -> None:
        """That member has posted these."""
        for sends, peer, tag in posts:
            key = (rank, peer, tag) if sends else (peer, rank, tag)
            step = 1 if sends else -1
            if self._alone[key] * step < 0:
                self._met.append(key)
            self._alone[key] += step
            if not self._alone[key]:
                del self._alone[key]

    def batches(self) -> Iterator[Batch]:
        """Of all that both ends have posted."""
        while self._met:
            batch: Batch = defaultdict(list)
            for _ in range(min(MOST_IN_BATCH, len(self._met))):
                sender, receiver, tag = self._met.popleft()
                batch[sender].append(Post(True, receiver, tag))
                batch[receiver].append(Post(False, sender, tag))
            yield batch


POSTED_TAG, CARRY_TAG = RESERVED_TAGS + 2, RESERVED_TAGS + 3
NUMBERS = 1 + MOST_IN_BATCH
"""Of a message between members: how many posts there are, then the posts."""


class CarriedMessage(Protocol):
    """A message that is carried."""

    tensor: Tensor
    post: Post
    given: Any
    """What `Device.mark` or `Device.promise` returned when it was posted."""


class Wire(Protocol):
    """What carries messages from device to device. One thread carries; any may abort."""

    def carry(self, messages: Sequence[CarriedMessage]) -> Callable[[], None]:
        """Begins to carry them, at once; returns what blocks until all are over. Raises `RuntimeError` for failures,
        and so may what it returns.
        """

    def abort(self) -> None:
        """Whatever is on its way ends now. Idempotent."""

    def close(self) -> None:
        """Nothing reads or writes a tensor of it any more."""


class _OrderedWork:
    """A message. `over`: it has come or left, or failed."""

    def __init__(self, group: OrderedGroup, tensor: Tensor, post: Post, given: Any) -> None:
        self._group, self.tensor, self.post, self.given = group, tensor, post, given
        self.over, self.failure = threading.Event(), ""

    def wait(self) -> None:
        self._group.wait([self])


class _OrderedWaiting:
    def __init__(self, group: OrderedGroup, works: Sequence[_OrderedWork], below: Waiting) -> None:
        self._group, self._works, self._below = group, works, below

    @property
    def is_over(self) -> bool:
        return self._below.is_over and all(work.over.is_set() for work in self._works)

    def wait(self) -> None:
        self._below.wait()
        for work in self._works:
            self._group.wait_for(work)


class OrderedGroup:
    """A `Group` for tensors of `device`: messages with tags of `bulk` go by `wire`. `below`: over the group `host`."""

    def __init__(self, below: Group, host: GlooGroup, wire: Wire, device: Device, bulk: Collection[int]) -> None:
        self.below, self.device, self._host, self._wire, self._bulk = below, device, host, wire, bulk
        self.rank, self.size, self.progress = below.rank, below.size, below.progress
        self._lock = threading.Lock()
        self._posted: dict[Post, deque[_OrderedWork]] = defaultdict(deque)
        """What is not carried yet."""
        self._live: set[_OrderedWork] = set()
        self._over = ""
        """Why no message is worth while any more."""
        self._news: SimpleQueue[tuple[int, list[Post]] | None] = SimpleQueue()
        self._to_carry: SimpleQueue[list[Post] | None] = SimpleQueue()
        if self.rank == 0:
            host.serve(POSTED_TAG, NUMBERS, lambda peer, message: self._news.put((peer, _posts_in(message))))
        else:
            host.serve(CARRY_TAG, NUMBERS, lambda _, message: self._to_carry.put(_posts_in(message)))
        for act, name in ((self._order if self.rank == 0 else self._report, "orders"), (self._carry, "carries")):
            threading.Thread(target=act, name=f"shoal-group-{name}", daemon=True).start()

    @property
    def broken_peers(self) -> tuple[int, ...]:
        return self.below.broken_peers

    # ---- messages

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        if tag not in self._bulk or not tensor.numel():
            return self.below.send(tensor, to, tag)
        if not self.device.holds(tensor):
            tensor = self._copy_to_device(tensor)
        return self._post(tensor, Post(True, to, tag), self.device.mark())

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        if tag not in self._bulk or not tensor.numel():
            return self.below.receive(tensor, source, tag)
        assert self.device.holds(tensor), f"a message with tag {tag} is received on the host"
        return self._post(tensor, Post(False, source, tag), self.device.promise(tensor))

    def _copy_to_device(self, tensor: Tensor) -> Tensor:  # of the same shape and dtype
        there = torch.empty_like(tensor, device=self.device.kind)
        self.device.to_device(tensor, there, self.device.promise(there)).join()
        return there

    def _post(self, tensor: Tensor, post: Post, given: Any) -> _OrderedWork:
        work = _OrderedWork(self, tensor.detach(), post, given)
        with self._lock:
            if self._over:
                raise WorldChanged(self._over)
            self._live.add(work)
            self._posted[post].append(work)
            self._news.put((self.rank, [post]))  # in the lock: it is told in the order in which it is posted
        return work

    def wait(self, works: Sequence[Work]) -> None:
        self.begin_wait(works).wait()

    def begin_wait(self, works: Sequence[Work]) -> Waiting:
        mine = [work for work in works if isinstance(work, _OrderedWork)]
        others = [work for work in works if not isinstance(work, _OrderedWork)]
        return _OrderedWaiting(self, mine, self.below.begin_wait(others))

    def wait_for(self, work: _OrderedWork) -> None:
        """Raises `WorldChanged` where it failed."""
        connection = self._host.connection(work.post.peer)
        if not work.over.is_set():
            self.progress.wait_for(work.post.peer)
        while not work.over.wait(connection.pause_seconds):
            wrong = connection.look()
            if wrong is not None:
                raise self._host.on_failure(work.post.peer, wrong)
        if work.failure:
            raise WorldChanged(f"the exchange with rank {work.post.peer} of {self.size} failed: {work.failure}")
        self.progress.go_on()

    def serve(self, tag: int, elements: int, on_request: Callable[[int, Tensor], None]) -> None:
        self.below.serve(tag, elements, on_request)

    def all_gather(self, row: Tensor) -> Tensor:
        return self.below.all_gather(row)

    # ---- on threads of the group

    def _report(self) -> None:
        """Of all but rank 0: what was posted here."""
        try:
            for news in self._drain():
                posts = [post for _, some in news for post in some]
                for first in range(0, len(posts), MOST_IN_BATCH):
                    self._host.deliver([(_message_of(posts[first : first + MOST_IN_BATCH]), 0, POSTED_TAG)])
        except WorldChanged as error:
            self._fail(str(error))

    def _order(self) -> None:
        """Of rank 0: what all carry."""
        sequencer = Sequencer()
        try:
            for news in self._drain():
                for rank, posts in news:
                    sequencer.take(rank, posts)
                for batch in sequencer.batches():
                    mine = batch.pop(0, None)
                    self._host.deliver([(_message_of(posts), rank, CARRY_TAG) for rank, posts in batch.items()])
                    if mine:
                        self._to_carry.put(mine)
        except WorldChanged as error:
            self._fail(str(error))

    def _drain(self) -> Iterator[list[tuple[int, list[Post]]]]:
        """All that is there at a time, until the end."""
        while (first := self._news.get()) is not None:
            found = [first]
            try:
                while (more := self._news.get_nowait()) is not None:
                    found.append(more)
            except Empty:
                yield found
            else:
                return

    def _carry(self) -> None:
        while (posts := self._to_carry.get()) is not None:
            with self._lock:
                if self._over:  # what was posted has failed already
                    return
                works = [self._posted[post].popleft() for post in posts]
            try:
                self._wire.carry(works)()
            except (RuntimeError, WorldChanged) as error:
                self._fail(str(error))
                return
            with self._lock:
                self._live.difference_update(works)
            for work in works:
                work.over.set()

    # ---- its end

    def _fail(self, why: str) -> None:
        with self._lock:
            self._over = self._over or why
            live, self._live = self._live, set()
            self._posted.clear()
        for work in live:
            work.failure = self._over
            work.over.set()

    def abort(self) -> None:
        self._fail("the group was aborted")
        self.below.abort()
        self._wire.abort()

    def close(self) -> None:
        with self._lock:
            is_busy = bool(self._live)
        if is_busy:
            self.abort()
        self._fail("the group is closed")
        self._news.put(None)
        self._to_carry.put(None)
        self._wire.close()
        self.below.close()


def _message_of(posts: Sequence[Post]) -> Tensor:  # (NUMBERS,) int64
    numbers = [len(posts), *(post.to_number() for post in posts)]
    return torch.tensor(numbers + [0] * (NUMBERS - len(numbers)), dtype=torch.int64, device="cpu")


def _posts_in(
    message: Tensor,  # (NUMBERS,) int64
) -> list[Post]:
    count, *numbers = message.tolist()
    return [Post.from_number(number) for number in numbers[:count]]
