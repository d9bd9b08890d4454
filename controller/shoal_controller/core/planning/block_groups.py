"""Block groups: blocks that are alike to the planner, which works on thousands of groups at most, never block by block.

Blocks are alike when the same processes hold them and the same one owned them before. `gather` sweeps once over what
all hold; `cut` divides blocks without breaking more runs than needed; `name_fills` says who sends which to whom until
all is kept as it is to be. Workers are indexes into the planner's candidates, oldest first. Used by owners.py,
mirrors.py and planner.py. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from shoal_protos.plan import Fill
from shoal_protos.runs import Runs, Span

NOBODY = -1
"""Stands where no worker is: no owner before, or no mirror."""


class BlockGroup(NamedTuple):
    """Blocks that are alike, and what is decided about them so far."""

    blocks: Runs
    holders: frozenset[int]
    """Empty: lost."""
    previous_owner: int = NOBODY
    """Who owned them before and still holds them."""
    owner: int = NOBODY
    """Who is to own them in the end."""
    mirrors: tuple[int, ...] = ()
    """Who is to mirror them in the end."""

    @property
    def keepers(self) -> tuple[int, ...]:
        """All who are to keep them in the end."""
        return (self.owner, *self.mirrors)

    def decided(self, owner: int, mirrors: tuple[int, ...], blocks: Runs) -> BlockGroup:
        """Some of the blocks, with their owner and the mirrors decided so far."""
        return BlockGroup(blocks, self.holders, self.previous_owner, owner, mirrors)


def gather(blocks: int, holds: Sequence[Runs], owned: Mapping[int, Runs]) -> list[BlockGroup]:
    """The groups of a job with so many blocks: who holds what, and who owned what before."""
    alike: dict[tuple[int, frozenset[int]], list[Span]] = {}
    for span, owner, holders in _stretches(blocks, holds, owned):
        alike.setdefault((owner if owner in holders else NOBODY, holders), []).append(span)
    return [BlockGroup(Runs(spans), holders, was) for (was, holders), spans in alike.items()]


_HELD, _NOT_HELD, _OWNED, _NOT_OWNED = range(4)


def _stretches(
    blocks: int, holds: Sequence[Runs], owned: Mapping[int, Runs]
) -> Iterator[tuple[Span, int, frozenset[int]]]:
    """The longest intervals without a change, each with its owner and holders.

    A change is one integer, `(position * workers + worker) * 4 + kind`, because a hundred thousand of them are sorted.
    """
    workers = max(1, len(holds))
    changes: list[int] = []
    for worker, runs in enumerate(holds):
        for start, stop in runs.spans:
            changes.append((start * workers + worker) * 4 + _HELD)
            changes.append((stop * workers + worker) * 4 + _NOT_HELD)
    for worker, runs in owned.items():
        for start, stop in runs.spans:
            changes.append((start * workers + worker) * 4 + _OWNED)
            changes.append((stop * workers + worker) * 4 + _NOT_OWNED)
    changes.sort()
    at, owner, holders = 0, NOBODY, set[int]()
    for change in changes:
        position, worker = divmod(change >> 2, workers)
        kind = change & 3
        if position > at:
            yield (at, position), owner, frozenset(holders)
            at = position
        if kind == _HELD:
            holders.add(worker)
        elif kind == _NOT_HELD:
            holders.remove(worker)
        elif kind == _OWNED:
            owner = worker
        elif owner == worker:
            owner = NOBODY
    if at < blocks:
        yield (at, blocks), NOBODY, frozenset()


def cut(blocks: Runs, counts: Iterable[int]) -> Iterator[Runs]:
    """Pieces of so many blocks each, in order, together all of them."""
    counts = list(counts)
    if len(counts) == 1:
        yield blocks
        return
    spans = iter(blocks.spans)
    start, stop = 0, 0
    for count in counts:
        piece: list[Span] = []
        while count:
            if start == stop:
                start, stop = next(spans)
            taken = min(count, stop - start)
            piece.append((start, start + taken))
            start += taken
            count -= taken
        yield Runs.of_canonical(piece)


def lay(count: int, placed: Sequence[tuple[int, int]]) -> list[tuple[int, tuple[int, ...]]]:
    """Divides `count` blocks so that each `(worker, n)` gets n of them and every block equally many workers.

    The shares are laid end to end on a line that is wrapped around the blocks: no share is longer than the blocks, so
    no block meets a worker twice. Returns `(how many blocks, their workers)` in the order of the blocks.
    """
    ends: list[tuple[int, int]] = []
    at = 0
    for worker, share in placed:
        at += share
        ends.append((at, worker))
    edges = sorted({0, count, *(end % count for end, _ in ends)})
    pieces: list[tuple[int, tuple[int, ...]]] = []
    for low, high in pairwise(edges):
        shares = iter(ends)
        end, worker = next(shares)
        workers: list[int] = []
        for line in range(low, at, count):
            while end <= line:
                end, worker = next(shares)
            workers.append(worker)
        pieces.append((high - low, tuple(workers)))
    return pieces


# ---- fills: who sends which blocks to whom


class KeptBlocks(NamedTuple):
    """Blocks as a plan has them from its first step on: their owner and mirrors hold them with valid bits."""

    group: BlockGroup
    owner: int
    mirrors: tuple[int, ...]
    targets: tuple[int, ...] = ()
    """Who is to keep them in the end and does not hold them yet."""


def name_fills(kept: Sequence[KeptBlocks]) -> list[Fill]:
    """The fills towards the groups' targets; workers are the planner's indexes."""
    sent = Counter[int]()
    spans: defaultdict[tuple[int, int, int], list[Span]] = defaultdict(list)
    for now in sorted((now for now in kept if now.targets), key=lambda now: len(now.mirrors)):
        sources = (now.owner, *now.mirrors)
        for target in now.targets:
            counts = _even_out([sent[source] for source in sources], len(now.group.blocks))
            for source, count, blocks in zip(sources, counts, cut(now.group.blocks, counts), strict=True):
                sent[source] += count
                if count:
                    spans[len(now.mirrors), source, target] += blocks.spans
    return [Fill(source, target, Runs(spans[copies, source, target])) for copies, source, target in sorted(spans)]


def _even_out(loads: Sequence[int], more: int) -> list[int]:
    """Divides `more` so that the highest load is as low as can be."""
    if len(loads) == 1:
        return [more]
    given = [0] * len(loads)
    order = sorted(range(len(loads)), key=lambda index: loads[index])
    filled = 0
    for count, index in enumerate(order, start=1):
        following = loads[order[count]] if count < len(order) else None
        filled += loads[index]
        if following is None or following * count - filled >= more:
            least, extra = divmod(filled + more, count)
            for place, member in enumerate(order[:count]):
                given[member] = least + (place < extra) - loads[member]
            break
    return given
