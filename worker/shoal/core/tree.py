"""The one fixed binary tree over numbers (lanes, or blocks): what a subtree is, and in which order sums are taken.

Level by level, neighbours `2i` and `2i + 1` are added; an odd node at the end passes up unchanged. A node is named by
the half-open span of leaves below it. Whoever holds a whole subtree adds it up alone and passes on one partial sum; so
the shape of the sum never depends on who holds what. Pure. Pairwise summation: Higham, "The accuracy of floating point
summation", SIAM J. Sci. Comput. 14 (1993).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

from shoal_protos.runs import Runs, Span

Value = TypeVar("Value")


def sibling(span: Span, leaves: int) -> Span | None:
    """The node that is added to `span` on the way up; None at the root. `span` must be a node of the tree."""
    start, stop = span
    size = 1
    while True:
        parent_start = start - start % (2 * size)
        parent = (parent_start, min(parent_start + 2 * size, leaves))
        if parent != span and parent[1] - parent[0] > stop - start:
            return (parent[0], start) if parent[0] < start else (stop, parent[1])
        if size >= leaves:
            return None
        size *= 2


def are_leaves(spans: Iterable[Span]) -> bool:
    """Whether none of these nodes has more than one leaf."""
    return all(stop - start == 1 for start, stop in spans)


def are_siblings(left: Span, right: Span, leaves: int) -> bool:
    """Whether the two nodes, `left` before `right`, are added to each other."""
    return left[1] == right[0] and sibling(left, leaves) == right


def push(
    stack: list[tuple[Span, Value]], leaf: int, value: Value, leaves: int, add: Callable[[Value, Value], Value]
) -> None:
    """Adds a leaf's value to a stack of whole subtrees, which stay ascending: siblings are added as far as they go.

    `add(kept, new)` gives their sum. Leaves may come in any order: a + b and b + a have the same bits.
    """
    span = (leaf, leaf + 1)
    while (other := sibling(span, leaves)) is not None and other in (held := [kept for kept, _ in stack]):
        value = add(stack.pop(held.index(other))[1], value)
        span = (min(span[0], other[0]), max(span[1], other[1]))
    insort(stack, (span, value), key=lambda entry: entry[0])


def subtrees(held: Runs, leaves: int) -> list[Span]:
    """The maximal whole subtrees of a set of leaves, in ascending order."""
    found: list[Span] = []
    for start, stop in held.spans:
        while start < stop:
            size = 1
            # At the end of all leaves a subtree need not be full: an odd node passed up unchanged, so it is whole.
            while start % (2 * size) == 0 and (start + 2 * size <= stop or (stop == leaves and start + size < stop)):
                size *= 2
            end = min(start + size, stop)
            found.append((start, end))
            start = end
    return found


Additions = list[tuple[int, int]]
"""Pairs `(into, other)` of indices of partial sums, in the order in which they are added."""


def fold_up(spans: Sequence[Span], leaves: int, mine: Iterable[int] = ()) -> tuple[Additions, list[int]]:
    """How to add partial sums in place as far as they are siblings, and the indices of the sums that are left.

    `spans` are nodes, each leaf at most once, in any order. Where one of two partial sums is in `mine` the sum lands
    there. What is left is ascending.
    """
    prefer = set(mine)
    stack: list[tuple[Span, int]] = []
    additions: Additions = []
    # From left to right a sibling is always the top of the stack: whatever lies between the two has been added up.
    for index in sorted(range(len(spans)), key=lambda i: spans[i]):
        stack.append((spans[index], index))
        while len(stack) > 1 and are_siblings(stack[-2][0], stack[-1][0], leaves):
            (right, b), (left, a) = stack.pop(), stack.pop()
            # Where the sum lands changes no bit: a + b is b + a.
            into, other = (b, a) if b in prefer and a not in prefer else (a, b)
            additions.append((into, other))
            stack.append(((left[0], right[1]), into))
    return additions, [index for _, index in stack]


def fold(spans: Sequence[Span], leaves: int, mine: Iterable[int] = ()) -> Additions:
    """How to finish the tree in place, as `fold_up`; `spans` are all leaves together.

    The last `into` (index of the only span, where there is one) holds the root.
    """
    additions, left = fold_up(spans, leaves, mine)
    assert len(left) == 1, f"{spans} do not add up to {leaves} leaves"
    return additions


def fold_numbers(parts: Sequence[tuple[Span, float]], leaves: int) -> float:
    """The root of plain numbers, in float64."""
    values = [value for _, value in parts]
    root = 0
    for into, other in _fold_once(tuple(span for span, _ in parts), leaves):
        values[into] = values[into] + values[other]
        root = into
    return values[root] if values else 0.0


@lru_cache(maxsize=8)
def _fold_once(spans: tuple[Span, ...], leaves: int) -> Additions:
    """Of a world: its spans are the same at each step."""
    return fold(spans, leaves)
