"""The one order of messages that have no tags of their own to be told apart by: who carries what, and when. Pure.

A transport such as NCCL carries messages in the order in which both ends name them, and one that is waited for holds up
all behind it. So nothing is carried before both ends have posted it, and all members carry the same batches in the same
order, each its own part: no end ever waits for one that waits for something else. One member of a group keeps this.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
