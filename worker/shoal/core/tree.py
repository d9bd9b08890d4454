"""The one fixed binary tree over numbers (lanes, or blocks), which decides the order of every sum of gradients.

Level by level, neighbours `2i` and `2i + 1` are added; an odd node at the end passes up unchanged. A node is named by
the half-open span of leaves below it. A holder of a whole subtree adds it up alone and passes on one partial sum; so
the shape of the sum never depends on who holds what. Pairwise summation: Higham, "The accuracy of floating point
summation", SIAM J. Sci. Comput. 14 (1993).

`add` and `total` need no order at all: partial sums without error, so that an evaluation's mean has the same bits in
every world.

`rounds` is the order of a step's lanes where gradients are added up on shards (stages 2 and 3). Round i is every
member's i-th lane; a member without one only serves. Every lane leaves for the owners at once, so an owner gets a
round's lanes together and keeps, in a stack on its shard, those that wait for their sibling (`ShardTree`). The plan
alone tells all of it, so all members know which lane a gradient is of, and the order is found once for a world.

`HostSums` says, for whole gradients, which member adds up which partial sums before they leave their host, so that the
host sends one. Where the lanes of a host's workers are fewer subtrees together than apart, what goes to an owner on
another host is added up by one of them, each for a part of the owners; what goes to an owner on the same host goes to
it at once. Where nothing joins, all send as if each were on a host of its own. Each choice adds the same pairs of the
one tree. Derived once for a world. Pure; tensors are added in exchange/ (tree_sum.py) and blocks/ (shard_sums.py).
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, count, zip_longest
from typing import TypeVar

from shoal_protos.plan import Plan
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


MOST_PARTS = 4
"""As many as 212 bits from the highest to the lowest: numbers of one kind need two or three."""


def add(parts: list[float], value: float) -> None:
    """Adds a number, in place. `parts`: what they add up to exactly, the largest first: the sum rounded, what that
    leaves rounded, and so on. So one sum has one form, and as few parts as hold it (Shewchuk's sums, by `math.fsum`).
    """
    rest = [*parts, value]
    if not math.isfinite(rounded := sum(rest)):
        parts[:] = [rounded]
        return
    parts.clear()
    while len(parts) < MOST_PARTS and (largest := math.fsum(rest)):
        parts.append(largest)
        rest.append(-largest)


def total(parts: list[float]) -> float:
    """The sum, rounded once."""
    return parts[0] if parts else 0.0


NO_LANE = -1

Round = tuple[int, ...]
"""By rank, the lane that it trains; NO_LANE: it only serves."""


def rounds(plan: Plan) -> list[Round]:
    """Of every step of the world but the first; none where no steps run."""
    return _in_columns(map(plan.lanes_of, plan.ranks)) if plan.steps else []


def first_rounds(plan: Plan) -> list[Round]:
    """Of the world's first step: who had begun a lane when the last world broke begins with that one again."""
    if plan.recovery is None or not plan.recovery.lanes_in_flight or not plan.steps:
        return rounds(plan)
    pairs = zip(map(plan.lanes_of, plan.ranks), plan.recovery.lanes_in_flight, strict=True)
    return _in_columns(_beginning_with(first, lanes) for lanes, first in pairs)


def _beginning_with(first: int, lanes: Sequence[int]) -> Sequence[int]:
    return sorted(lanes, key=lambda lane: lane != first)


def _in_columns(orders: Iterable[Sequence[int]]) -> list[Round]:
    return list(zip_longest(*orders, fillvalue=NO_LANE))


# ---- adding up


@dataclass(frozen=True, slots=True)
class RoundSum:
    """How an owner adds up one round on its shard: first the additions, in their order, then the pushes.

    Its parts are numbered: the members' lanes by rank, then the copies of the shard that wait.
    """

    additions: Additions
    """Parts, the second added to the first in place."""
    pushes: tuple[tuple[int, int], ...]
    """A lane's part that is to wait, and the copy that it is moved to."""
    waiting: tuple[Span, ...]
    """The subtrees that wait then, ascending."""


@dataclass(frozen=True, slots=True)
class ShardTree:
    """How an owner adds up a step, round by round."""

    rounds: tuple[RoundSum, ...]
    root: int
    """The part of the last round that is the sum of all lanes then; divided by their number it is the mean."""
    copies: int
    """So many copies of the shard wait at most."""


def shard_tree(step: Sequence[Round], lanes: int) -> ShardTree:
    """`step`: its rounds, with each of the job's `lanes` in one of them."""
    waiting: dict[int, Span] = {}
    sums: list[RoundSum] = []
    root = copies = 0
    for lanes_by_rank in step:
        members = len(lanes_by_rank)
        arrived = {rank: (lane, lane + 1) for rank, lane in enumerate(lanes_by_rank) if lane != NO_LANE}
        additions, left = _add_up(waiting, arrived, lanes)
        if (0, lanes) in left.values():
            (root,), left = left, {}
        pushes = _pushes(left, members)
        moved = dict(pushes)
        waiting = {moved.get(part, part): span for part, span in left.items()}
        copies = max(copies, *(part - members + 1 for part in waiting), 0)
        sums.append(RoundSum(additions, pushes, tuple(waiting.values())))
    assert not waiting, f"{list(waiting.values())} wait at the end of a step of {lanes} lanes"
    return ShardTree(tuple(sums), root, copies)


Parts = dict[int, Span]
"""By number, the subtree that a part is the sum of."""


def _add_up(waiting: Parts, arrived: Parts, lanes: int) -> tuple[Additions, Parts]:
    """The additions, and what is left, ascending. A sum lands in a copy that waits, wherever one takes part."""
    spans = waiting | arrived
    numbers = list(spans)
    found, left = fold_up(list(spans.values()), lanes, range(len(waiting)))
    additions = [(numbers[into], numbers[other]) for into, other in found]
    for into, other in additions:
        pair = spans[into], spans.pop(other)
        spans[into] = min(pair)[0], max(pair)[1]
    return additions, {numbers[index]: spans[numbers[index]] for index in left}


def _pushes(left: Parts, members: int) -> tuple[tuple[int, int], ...]:
    """What is left of lanes goes to the first copies that are free."""
    free = (copy for copy in count(members) if copy not in left)
    return tuple((part, next(free)) for part in left if part < members)


Source = tuple[Span, int]
"""A subtree of lanes, and the rank that sends its sum."""


class HostSums:
    """Who adds up what for whom.

    `lane_spans`: by rank, the whole subtrees of lanes that it trains; `hosts`: by rank, empty where no two share one;
    `owners`: the ranks that own blocks.
    """

    def __init__(
        self, lane_spans: Sequence[Sequence[Span]], hosts: Sequence[int], owners: Sequence[int], lanes: int
    ) -> None:
        self.lane_spans, self._hosts = lane_spans, hosts or range(len(lane_spans))
        self._crews: dict[int, list[int]] = {}
        for rank, spans in enumerate(lane_spans):
            if spans:
                self._crews.setdefault(self._hosts[rank], []).append(rank)
        together = {host: subtrees(Runs(self._spans(crew)), lanes) for host, crew in self._crews.items()}
        self._joint = {
            host: spans for host, spans in together.items() if len(spans) < len(self._spans(self._crews[host]))
        }
        self._adders = {host: self._share(host, owners) for host in self._joint}
        self._adds_for: list[list[int]] = [[] for _ in lane_spans]
        for adders in self._adders.values():
            for owner, adder in adders.items():
                self._adds_for[adder].append(owner)
        self._received = [len(self.sources(rank)) - len(spans) for rank, spans in enumerate(lane_spans)]
        self._gathered = [len(self._spans(self.crew(rank))) for rank in range(len(lane_spans))]

    def _spans(self, crew: Sequence[int]) -> list[Span]:
        return list(chain.from_iterable(self.lane_spans[rank] for rank in crew))

    def _share(self, host: int, owners: Sequence[int]) -> dict[int, int]:
        """Who of a host adds up for which owner: each for neighbours, whose blocks mostly lie side by side."""
        crew, outside = self._crews[host], [owner for owner in owners if self._hosts[owner] != host]
        return {owner: crew[at * len(crew) // len(outside)] for at, owner in enumerate(outside)}

    def crew(self, rank: int) -> Sequence[int]:
        """Who trains on its host."""
        return self._crews.get(self._hosts[rank], ())

    def adder(self, rank: int, owner: int) -> int | None:
        """Who adds up what this rank has for an owner; None: it is sent to the owner at once."""
        return self._adders.get(self._hosts[rank], {}).get(owner)

    def adds_for(self, rank: int) -> Sequence[int]:
        """The owners for which it adds up what its host has."""
        return self._adds_for[rank]

    def gathered(self, rank: int) -> list[Source]:
        """What it adds up for each of them, its own sums among it."""
        return [(span, peer) for peer in self.crew(rank) for span in self.lane_spans[peer]]

    def sources(self, owner: int) -> list[Source]:
        """Whose sums reach an owner, its own among them: every lane once."""
        found: list[Source] = []
        for host, crew in self._crews.items():
            adder = self._adders.get(host, {}).get(owner)
            if adder is None:
                found += [(span, rank) for rank in crew for span in self.lane_spans[rank]]
            else:
                found += [(span, adder) for span in self._joint[host]]
        return found

    def most_held(self, sizes: Sequence[int], scattered: Sequence[int]) -> int:
        """As `held`, on the member that holds most."""
        return max(self.held(sizes, scattered))

    def held(self, sizes: Sequence[int], scattered: Sequence[int]) -> list[int]:
        """Elements that messages take, by rank: what it gets, and what it packs to send.

        By owner: the elements that it owns, and those of them that do not lie in one range.
        """
        total, total_scattered, found = sum(sizes), sum(scattered), list[int]()
        for rank, spans in enumerate(self.lane_spans):
            count, joint = len(spans), len(self._joint.get(self._hosts[rank], ()))
            added, added_scattered = _sum(sizes, self._adds_for[rank]), _sum(scattered, self._adds_for[rank])
            received = sizes[rank] * self._received[rank] + added * (self._gathered[rank] - count)
            sent, sent_scattered = total - sizes[rank] - added, total_scattered - scattered[rank] - added_scattered
            packed = count * (sent if count > 1 else sent_scattered) + joint * (added if joint > 1 else added_scattered)
            found.append(received + packed)
        return found


def _sum(values: Sequence[int], of: Iterable[int]) -> int:
    return sum(values[index] for index in of)
