"""Anchors: for each tensor that is updated as a whole, one of its blocks; the block's owner is the tensor's home.

Anchors are spread so that the cost of updates is even over block numbers, as far as each tensor's own blocks allow.
Whoever owns a run of numbers, which is a slice of every bucket, is then home to that share of the cost. Homes have no
state, and no plan names them: they follow from who owns what. Anchors change no bits, so the layout does not list them.

`equal_cut` is how such a tensor is taken where it is computed element by element. A kernel rounds the last elements of
a run otherwise, those that fill no vector. So what a tensor has of its first and of its last block is always a run of
its own. Blocks between are whole vectors, and may be taken together, as long as one thread takes them all.

Source of the order: Jackson, "Scheduling a production line to minimize maximum tardiness" (1955), earliest end first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from shoal_protos.runs import Span

from shoal.core.cell_part import Division
from shoal.core.layout import Bucket, Layout, Slot

Place = tuple[Bucket, Slot]
"""Where a tensor lies."""
LONGEST = 114_688
"""Elements of a run: a few of such runs stay in a processor's cache."""
LONGEST_SHARED = 28_672
"""Where there are several threads: kernels of torch share runs of 32,768 among them, at places that are no whole
vectors.
"""


def anchors(layout: Layout, tensors: Sequence[Place], costs: Sequence[int]) -> list[int]:
    """Return the number of each tensor's anchor block. `costs`: of their updates, in any unit, above 0.

    Those of each division of a cell by themselves: what is common to coordinates has one anchor at all of them.
    """
    found, by_division = [0] * len(tensors), defaultdict[Division, list[int]](list)
    for index, (bucket, _) in enumerate(tensors):
        by_division[bucket.division].append(index)
    for of_one in by_division.values():
        numbers = [_numbers(layout, *tensors[index]) for index in of_one]
        for index, anchor in zip(of_one, _spread(numbers, [costs[index] for index in of_one]), strict=True):
            found[index] = anchor
    return found


def _spread(numbers: Sequence[Sequence[int]], costs: Sequence[int]) -> list[int]:
    """One of each tensor's numbers, so that the cost is even between the lowest and the highest of all."""
    waiting = [(one[0], one[-1], index) for index, one in enumerate(numbers)]
    heapify(waiting)
    ready, found, at = list[tuple[int, int]](), [0] * len(numbers), float(waiting[0][0])
    share = (1 + max(one[-1] for one in numbers) - at) / sum(costs)
    while waiting or ready:
        while waiting and (waiting[0][0] <= at or not ready):
            first, last, index = heappop(waiting)
            at = max(at, first) if not ready else at
            heappush(ready, (last, index))
        _, index = heappop(ready)
        found[index] = _nearest(numbers[index], at + share * costs[index] / 2)
        at += share * costs[index]
    return found


def _numbers(layout: Layout, bucket: Bucket, slot: Slot) -> Sequence[int]:
    """Of the blocks that a tensor has a part of, ascending."""
    size = bucket.block_elements
    first, last = slot.start // size, (slot.start + max(1, slot.parameter.elements) - 1) // size
    return layout.numbers[bucket.index][first : last + 1]


def _nearest(numbers: Sequence[int], wanted: float) -> int:
    at = bisect_left(numbers, wanted)
    return min(numbers[max(0, at - 1) : at + 1], key=lambda number: abs(number - wanted))


def equal_cut(place: Place, start: int, stop: int, threads: int) -> Iterator[Span]:
    """Yield what of a tensor lies in elements `[start, stop)`, whole blocks of its bucket, in pieces of equal bits.
    `threads`: that share a run.
    """
    (bucket, slot), longest = place, LONGEST if threads == 1 else LONGEST_SHARED
    size, begins, ends = bucket.block_elements, slot.start, slot.start + slot.parameter.elements
    first, last = max(start, begins), min(stop, ends)
    while first < last:
        blocks = 1 if first % size else max(1, min(longest // size, (last - first) // size))
        end = min(last, (first // size + blocks) * size)
        yield first, end
        first = end
