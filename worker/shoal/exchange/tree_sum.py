"""Sums over the one tree: adds the partial sums of several members, in the order that `core/tree.py` decides.

Where a cell divides a sequence, several of its coordinates contribute to a gradient: each has a tree of its own, and
the roots are added in the order of coordinates.

Each way of holding the subtrees adds the same pairs, so a sum has the same bits in every world. In place: the
memory of a message, and of this worker's own sums, is the reduction's to write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from shoal_protos.runs import Span
from torch import Tensor

from shoal.blocks.flat import Gradients
from shoal.core.tree import Additions, Source, are_leaves, fold_up
from shoal.exchange.pieces import Extent

OWN = -1
"""In place of a peer."""


class TreeSum:
    """The sum of some members' partial sums, as far as they are siblings. Made once for a world."""

    def __init__(self, contributors: Sequence[Sequence[Source]], rank: int, lanes: int) -> None:
        """`contributors`: the sources of each, by coordinate; several of them have all lanes each."""
        self._sources = sources = list(chain.from_iterable(contributors))
        self.subtrees_from = Counter(peer for _, peer in sources if peer != rank)
        """How many subtrees' sums come from each peer."""
        self.leaves_from = {
            peer for peer in self.subtrees_from if are_leaves([span for span, sender in sources if sender == peer])
        }
        """The peers of which it gets the gradients of single lanes, and nothing else."""
        seen: Counter[int] = Counter()
        self._places: list[tuple[int, int]] = []
        """By source, the peer that it comes from, or OWN, and which of its sums it is."""
        for _, peer in sources:
            self._places.append((OWN if peer == rank else peer, seen[peer]))
            seen[peer] += 1
        self._additions, self.left = _fold_contributors(contributors, rank, lanes)
        """By number, the partial sums in which the sums end up; one, where all lanes are added."""

    def parts(
        self,
        own: Sequence[Gradients],  # this member's sums, of whole buckets
        messages: Mapping[int, Sequence[Tensor]],  # by peer, of each of its subtrees (elements in the extents,)
        extent: Extent,
        at: int,
    ) -> list[Tensor]:  # each (elements of the extent,)
        """The partial sums of one extent. `at`: where it begins in its message."""
        bucket, start, stop = extent
        end = at + stop - start
        return [
            own[index].range(bucket, start, stop) if peer == OWN else messages[peer][index][at:end]
            for peer, index in self._places
        ]

    def add_up(
        self,
        parts: Sequence[Tensor],  # by source, each (elements of the extent,)
    ) -> list[Tensor]:  # each (elements of the extent,)
        """Adds them in place; the sums that are left, ascending."""
        for into, other in self._additions:
            parts[into].add_(parts[other])
        return [parts[index] for index in self.left]

    def culprit(
        self,
        parts: Sequence[Tensor],  # by source, each (elements of the extent,)
        at_once: bool,
    ) -> Callable[[], Span]:
        """Tells which subtree brought in what is not finite. `parts` have been added up. `at_once`: it is asked while
        they are there; else the answers are made now, where the parts lie.
        """
        found = None if at_once else {other: torch.isfinite(parts[other]).all() for _, other in self._additions}

        def is_finite(other: int) -> bool:
            return bool(torch.isfinite(parts[other]).all() if found is None else found[other])

        def span() -> Span:
            suspect = self.left[0]
            for into, other in reversed(self._additions):
                if into == suspect and not is_finite(other):
                    suspect = other
            return self._sources[suspect][0]

        return span


def _fold_contributors(contributors: Sequence[Sequence[Source]], rank: int, lanes: int) -> tuple[Additions, list[int]]:
    """As `fold_up`, of each; then root by root."""
    additions, roots, first = list[tuple[int, int]](), list[list[int]](), 0
    for sources in contributors:
        mine = [index for index, (_, peer) in enumerate(sources) if peer == rank]
        found, left = fold_up([span for span, _ in sources], lanes, mine)
        additions += [(first + into, first + other) for into, other in found]
        roots.append([first + index for index in left])
        first += len(sources)
    for (root,) in roots[1:]:
        additions.append((roots[0][0], root))
    return additions, roots[0] if roots else []
