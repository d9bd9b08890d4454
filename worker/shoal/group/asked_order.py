"""Members ask in which order a wire without tags carries what they post: over the host, and rank 0 says it.

Every member tells rank 0 what it has posted, and rank 0 tells all what they carry next, in one order: both ends have
posted what is in a batch. The `Sequencer` that makes the order is pure. Called by ordered.py in steps whose order is
not known; what a wait for a message needs is not known here.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from shoal.group.group import RESERVED_TAGS, WorldChanged
from shoal.group.learnt_order import Carried, Post
from shoal.group.wait_threads import Connection

POSTED_TAG, CARRY_TAG = RESERVED_TAGS + 2, RESERVED_TAGS + 3
NOT_IN_A_BATCH = -1
MOST_IN_BATCH = 32
"""Messages that are carried at once; one that is told in a message of fixed size needs a bound."""

PostedBatch = dict[int, list[Post]]
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

    def batches(self) -> Iterator[PostedBatch]:
        """Of all that both ends have posted."""
        while self._met:
            batch: PostedBatch = defaultdict(list)
            for _ in range(min(MOST_IN_BATCH, len(self._met))):
                sender, receiver, tag = self._met.popleft()
                batch[sender].append(Post(True, receiver, tag))
                batch[receiver].append(Post(False, sender, tag))
            yield batch


NUMBERS = 2 + MOST_IN_BATCH
"""Of a message between members: the batch's, how many posts there are, then the posts."""


def message_of(batch: Carried) -> Tensor:  # (NUMBERS,) int64
    numbers = [batch.number, len(batch.posts), *(post.to_number() for post in batch.posts)]
    return torch.tensor(numbers + [0] * (NUMBERS - len(numbers)), dtype=torch.int64, device="cpu")


def batch_in(
    message: Tensor,  # (NUMBERS,) int64
) -> Carried:
    number, count, *posts = message.tolist()
    return Carried(number, tuple(Post.from_number(post) for post in posts[:count]))


class HostGroup(Protocol):
    """What an ordered group needs of the one over the host (gloo.py)."""

    def serve(self, tag: int, elements: int, on_request: Callable[[int, Tensor], None]) -> None:
        """As `Group.serve`."""

    def deliver(self, messages: Sequence[tuple[Tensor, int, int]]) -> None:
        """Sends small messages, with peer and tag. Raises `WorldChanged`."""

    def connection(self, peer: int) -> Connection:
        """To look at while a peer is waited for."""

    def on_failure(self, peer: int, failure: str) -> WorldChanged:
        """Remembers whose connection broke, and says so."""


class AskedOrder:
    """One member's end. `to_carry` is given what is to be carried; `on_failure(why)` is called where no more will be,
    on a thread of its own.
    """

    def __init__(
        self, host: HostGroup, rank: int, to_carry: SimpleQueue[Carried | None], on_failure: Callable[[str], None]
    ) -> None:
        self._host, self._rank, self._to_carry, self._on_failure = host, rank, to_carry, on_failure
        self._news: SimpleQueue[tuple[int, Sequence[Post]] | None] = SimpleQueue()
        if rank == 0:
            host.serve(POSTED_TAG, NUMBERS, lambda peer, message: self._news.put((peer, batch_in(message).posts)))
        else:
            host.serve(CARRY_TAG, NUMBERS, lambda _, message: to_carry.put(batch_in(message)))
        act = self._order if rank == 0 else self._report
        threading.Thread(target=act, name="shoal-group-orders", daemon=True).start()

    def on_post(self, post: Post) -> None:
        """This member has posted it."""
        self._news.put((self._rank, [post]))

    def close(self) -> None:
        """No more is asked for."""
        self._news.put(None)

    # ---- on its thread

    def _report(self) -> None:
        """Of all but rank 0: what was posted here."""
        try:
            for news in self._drain():
                posts = [post for _, some in news for post in some]
                for first in range(0, len(posts), MOST_IN_BATCH):
                    posted = Carried(NOT_IN_A_BATCH, tuple(posts[first : first + MOST_IN_BATCH]))
                    self._host.deliver([(message_of(posted), 0, POSTED_TAG)])
        except WorldChanged as error:
            self._on_failure(str(error))

    def _order(self) -> None:
        """Of rank 0: what all carry."""
        sequencer, number = Sequencer(), 0
        try:
            for news in self._drain():
                for rank, posts in news:
                    sequencer.take(rank, posts)
                for batch in sequencer.batches():
                    parts = {rank: Carried(number, tuple(posts)) for rank, posts in batch.items()}
                    number += 1
                    mine = parts.pop(0, None)
                    self._host.deliver([(message_of(part), rank, CARRY_TAG) for rank, part in parts.items()])
                    if mine is not None:
                        self._to_carry.put(mine)
        except WorldChanged as error:
            self._on_failure(str(error))

    def _drain(self) -> Iterator[list[tuple[int, Sequence[Post]]]]:
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
