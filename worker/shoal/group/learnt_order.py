"""What a member has learnt of the order of its messages on a wire without tags, from one passed vote to the next.

Of a step that is asked for, the batches are noted as the wire carries them, and beside them what this member did: its
posts, where its waits were found over, the units that it gathered, the units that others asked of it. A step that
repeats another one carries the same batches, and nothing is said over the host. That comes to an end on all members
because what each does goes by its own messages alone: by induction over the batches, the member that is to post for
the next one waits for earlier ones only. So a wait that was found over between two posts is found over there again,
and never before; and a difference is a deviation: of gathers, which then go another way until the vote, or one that
breaks the world. Called by ordered.py, under its lock. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

_PEER_BITS, _TAG_BITS = 20, 21


class Bulk(NamedTuple):
    """Tags of messages between devices."""

    tags: Collection[int]
    answers: int
    """One of them: of what an owner of units sends, beside its training thread."""


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


class Carried(NamedTuple):
    """What this member carries of one batch."""

    number: int
    """Of all batches that any member carries, in their order."""
    posts: tuple[Post, ...]


class PostPlace(NamedTuple):
    """One of the messages of a step: which of those that are alike it is."""

    post: Post
    at: int


Gathered = tuple[int, bool]
"""A unit, and whether a lane is in flight."""


class OutOfOrder(Exception):
    """A message that the step which is repeated did not have there: a sentence. `peer`: the rank of its other end."""

    def __init__(self, sentence: str, peer: int) -> None:
        super().__init__(sentence)
        self.peer = peer


@dataclass(slots=True)
class _Step:
    """What one member has noted from one passed vote to the next."""

    kind: object = None
    batches: list[Carried] = field(default_factory=list)
    posts: dict[Post, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Bytes of all that the training thread has posted."""
    found_over: dict[PostPlace, int] = field(default_factory=dict)
    """By the first message of what was waited for, how many posts there were when that was found over."""
    gathers: list[Gathered] = field(default_factory=list)
    """Units of which something came from others, as they were begun."""
    asked: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By peer, the units that it has asked for here."""
    made: int = 0
    """Posts."""

    def is_like(self, other: _Step) -> bool:
        """Whether this member did the same in both."""
        return self.posts == other.posts and self.gathers == other.gathers


class LearntOrder:
    """Of one member in one group. `begin` at each passed vote."""

    def __init__(self, answers: int) -> None:
        """`answers`: the tag of what an owner of units sends, which is no post of its training thread."""
        self._answers = answers
        self._now, self._known = _Step(), _Step()
        """The step at hand; and the one that it repeats, or is compared with."""
        self.repeats = False
        """Whether the step at hand repeats another one."""
        self._deviates: int | None = None
        """The first unit that was gathered otherwise than in the step that is repeated."""

    def begin(self, kind: object, may_repeat: bool) -> None:
        """`may_repeat`: whether all members have said that what they did since the last vote can be repeated; it is
        where a step of the same kind follows. `kind`: None: of no other step's.
        """
        if not self.repeats:
            self._known = self._now
        elif not may_repeat:
            self._known = _Step()
        self.repeats = may_repeat and kind is not None and kind == self._known.kind
        self._now, self._deviates = _Step(kind), None

    @property
    def batches(self) -> list[Carried]:
        """Of the step that is repeated."""
        return self._known.batches

    @property
    def is_in_order(self) -> bool:
        """Whether the step at hand, which is over here, can be repeated."""
        if self.repeats:
            return self._deviates is None
        return self._is_comparable and self._now.is_like(self._known)

    @property
    def _is_comparable(self) -> bool:
        return self._now.kind is not None and self._now.kind == self._known.kind

    @property
    def changed_at(self) -> int | None:
        """The first unit that this member gathers otherwise than in the step before of this kind, where it does."""
        if self.repeats or not self._is_comparable:
            return self._deviates
        pairs = zip_longest(self._now.gathers, self._known.gathers)
        return next(((now or known)[0] for now, known in pairs if now != known), None)

    # ---- messages

    def on_batch(self, batch: Carried) -> None:
        """The wire is to carry it next, as was asked for."""
        self._now.batches.append(batch)

    def on_post(self, post: Post, size: int) -> PostPlace:
        """The training thread posts a message of so many bytes. Raises `OutOfOrder`."""
        now = self._now.posts[post]
        if self.repeats:
            known = self._known.posts.get(post, [])
            if len(now) >= len(known) or known[len(now)] != size:
                expected = f"{known[len(now)]} bytes" if len(now) < len(known) else f"{len(known)} such messages"
                found = f"{_words(post)} of {size} bytes is posted, and the step before had {expected} there"
                raise OutOfOrder(found, post.peer)
        now.append(size)
        self._now.made += 1
        return PostPlace(post, len(now) - 1)

    def is_answer(self, post: Post) -> bool:
        """Whether it goes to a member that gathers a unit."""
        return post.sends and post.tag == self._answers

    def _is_gathered(self, post: Post) -> bool:
        return not post.sends and post.tag == self._answers

    def drain(self, post: Post) -> int | None:
        """The bytes of a message that comes and serves nothing, as this member gathers otherwise. None: it is no such
        one.
        """
        if self._deviates is None or not self._is_gathered(post):
            return None
        known, now = self._known.posts[post], self._now.posts[post]
        now.append(known[len(now)])
        return now[-1]

    def check_whole(self) -> None:
        """The step is over here. Raises `OutOfOrder` where a message of the one that it repeats is missing."""
        for post, known in self._known.posts.items() if self.repeats else ():
            if len(self._now.posts[post]) < len(known) and not self._is_gathered(post):
                raise OutOfOrder(f"{_words(post)} is missing, which the step before had", post.peer)

    # ---- waits

    def on_over(self, place: PostPlace) -> None:
        """What begins with this message was found over."""
        if not self.repeats:
            self._now.found_over.setdefault(place, self._now.made)

    def may_be_over(self, place: PostPlace) -> bool:
        """Whether it had been found over in the step that is repeated, when this member had posted as much."""
        return self._now.made >= self._known.found_over.get(place, 0)

    # ---- units

    def begin_gather(self, unit: Gathered) -> bool:
        """Whether it comes as in the step that is repeated."""
        at, known = len(self._now.gathers), self._known.gathers
        if not self.repeats:
            self._now.gathers.append(unit)
            return False
        if self._deviates is None and known[at : at + 1] == [unit]:
            self._now.gathers.append(unit)
            return True
        self.deviate(unit[0])
        return False

    def is_early(self, place: PostPlace) -> bool:
        """Whether what begins with that message is waited for before this member has posted as much as it had when it
        had come in the step that is repeated.
        """
        return self.repeats and not self.may_be_over(place)

    def deviate(self, unit: int) -> None:
        """It is to come otherwise than in the step that is repeated, and so are all that follow."""
        if self._deviates is None:
            self._deviates = unit

    def end_gathers(self) -> None:
        """No more are begun in order."""
        at, known = len(self._now.gathers), self._known.gathers
        if self.repeats and at < len(known):
            self.deviate(known[at][0])

    def on_asked(self, peer: int, unit: int) -> None:
        """A member that goes by no learnt order asks for it."""
        if not self.repeats:
            self._now.asked[peer].append(unit)

    def asked_by(self, peer: int) -> Iterator[int]:
        """Units that go to that member unasked."""
        return iter(self._known.asked.get(peer, []))


def _words(post: Post) -> str:
    return f"a message {'to' if post.sends else 'from'} rank {post.peer} with tag {post.tag}"
