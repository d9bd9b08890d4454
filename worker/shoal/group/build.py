"""The building of a group: where the members of a generation meet, the switch that cancels it, and its all-gather.

A `GroupSpec` is made from a plan by the session and carried out by a `Transport` on a thread of its own. The training
thread never waits there, and a wait there for a dead process does not last: `Cancellation.cancel` ends every wait at
once.

`gather` exchanges rows directly in small groups, by two levels in large ones. Members are in sections of about √size
neighbours: first all rows of a section go between its members, then whole sections between members of the same
position: about 2·√size messages each, in place of size.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import isqrt

import torch
from shoal_protos.plan import Plan
from shoal_protos.runs import Span
from torch import Tensor

from shoal.group.group import GATHER_TAG, Group, GroupProgress

WORLD = "g"
"""What a group is for, which begins the name of the room where it is built: all members of a generation."""


def _nobody_listens(rank: int) -> None:
    """Its death is noticed elsewhere."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One process's view of the building of one group: of all members of a generation, or of some, such as a cell."""

    generation: int
    rank: int
    addresses: tuple[str, ...]
    """`HOST:PORT` of each member's rendezvous server, by rank; gloo listens on the same host."""
    builder: int
    """The rank at whose server the group is built."""
    incarnations: tuple[str, ...] = ()
    """Incarnations by rank: whoever else answers at a member's address is not that member."""
    announces: bytes = b""
    """What this process says to all others where they meet: which device it has for itself (device_group.py)."""
    progress: GroupProgress = field(default_factory=GroupProgress, compare=False)
    """Whom the building waits for; the group that comes of it goes on with it."""
    on_death: Callable[[int], None] = field(default=_nobody_listens, compare=False)
    """Called with the rank of a member whose process has been seen to die, from another thread."""
    purpose: str = WORLD
    """Groups of one generation that are for different purposes do not meet."""

    @classmethod
    def of(cls, plan: Plan, rank: int, purpose: str, progress: GroupProgress) -> GroupSpec:
        addresses = tuple(member.address for member in plan.members)
        incarnations = tuple(member.incarnation for member in plan.members)
        return cls(plan.generation, rank, addresses, plan.builder, incarnations, progress=progress, purpose=purpose)

    @property
    def size(self) -> int:
        return len(self.addresses)

    @property
    def room(self) -> str:
        """Its name on the builder's server. Who does not know all members cannot guess it, and so cannot enter it, with
        another size for instance, before they do.
        """
        members = "/".join(self.incarnations).encode()
        return f"{self.purpose}{self.generation}-{hashlib.blake2b(members, digest_size=16).hexdigest()}"

    def incarnation(self, rank: int) -> str:
        """Empty where servers say nothing of themselves."""
        return self.incarnations[rank] if self.incarnations else ""


class Cancellation:
    """The switch. Set once, from any thread; whoever waits somewhere registers what ends the wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """`callback` is called when this is set; at once where it is set already. It must not block."""
        with self._lock:
            self._callbacks.append(callback)
            is_cancelled = self._is_cancelled
        if is_cancelled:
            callback()

    def cancel(self) -> None:
        """End every wait of the building, and all later ones at once. Idempotent."""
        with self._lock:
            self._is_cancelled = True
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback()


Transport = Callable[[GroupSpec, Cancellation], Group]
"""Builds the group of a spec. Raises `WorldChanged` when cancelled, or when somebody is out of reach."""


MOST_DIRECT = 64
"""Members who send their rows to each other directly: up to so many the second wait costs more than the messages."""


def gather(
    group: Group,
    row: Tensor,  # (bytes of a row,)
) -> Tensor:  # (members, bytes of a row): by rank
    """Every member's row. By sends between pairs: with eight members a third of the time of gloo's own all-gather.

    Raises `WorldChanged`.
    """
    rows = torch.empty(group.size, row.numel(), dtype=row.dtype, device="cpu")
    rows[group.rank] = row
    for level in exchanges(group.rank, group.size):
        mine = rows[slice(*level.rows)].view(-1)
        works = [group.send(mine, peer, GATHER_TAG) for peer in level.targets]
        works += [group.receive(rows[slice(*theirs)].view(-1), peer, GATHER_TAG) for peer, theirs in level.sources]
        group.wait(works)
    return rows


@dataclass(frozen=True, slots=True)
class Exchange:
    """Of one member at one level. Everything sent is in place before the level begins."""

    targets: tuple[int, ...]
    """Ranks to which `rows` go."""
    rows: Span
    sources: tuple[tuple[int, Span], ...]
    """Ranks, and the rows that come from each."""


@lru_cache(maxsize=8)
def exchanges(rank: int, size: int) -> tuple[Exchange, ...]:
    """A member's levels, in order. Peers: each begins with the one after itself, and receives the other way round."""
    if size <= MOST_DIRECT:
        return (_within((0, size), rank),)
    sections = _sections(size)
    mine = next(index for index, (start, stop) in enumerate(sections) if start <= rank < stop)
    return _within(sections[mine], rank), _between(sections, mine, rank - sections[mine][0])


def _sections(size: int) -> list[Span]:
    count = isqrt(size)
    return [(size * index // count, size * (index + 1) // count) for index in range(count)]


def _within(section: Span, rank: int) -> Exchange:
    start, stop = section
    others = [start + (rank - start + distance) % (stop - start) for distance in range(1, stop - start)]
    return Exchange(tuple(others), (rank, rank + 1), tuple((peer, (peer, peer + 1)) for peer in reversed(others)))


def _between(sections: list[Span], mine: int, position: int) -> Exchange:
    """Sections differ by one member at most: the first of a smaller one stands for the one that it lacks."""
    size = sections[mine][1] - sections[mine][0]
    targets: list[int] = []
    sources: list[tuple[int, Span]] = []
    for distance in range(1, len(sections)):
        start, stop = sections[(mine + distance) % len(sections)]
        targets += [rank for rank in range(start, stop) if (rank - start) % size == position]
        start, stop = sections[(mine - distance) % len(sections)]
        sources.append((start + position % (stop - start), (start, stop)))
    return Exchange(tuple(targets), sections[mine], tuple(sources))
