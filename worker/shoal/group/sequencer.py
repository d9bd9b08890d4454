"""The one order of messages on a wire without tags, as rank 0 makes it of what members tell it. Pure.

Called by ordered.py. Both ends have posted what is in a batch, and all members are told of batches in one order. What
they tell, and are told, has a form of fixed size.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.group.learnt_order import Carried, Post

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
