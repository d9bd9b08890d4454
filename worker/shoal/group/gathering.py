"""Who exchanges rows with whom in an all-gather: directly in small groups, by two levels in large ones.

Two levels: members are in sections of about √size neighbours. First all rows of a section go between its members, then
whole sections between members of the same position: about 2·√size messages each, in place of size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import torch
from shoal_protos.runs import Span
from torch import Tensor

from shoal.group.group import GATHER_TAG, Group

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
