"""Rounds: the order of a step's lanes where gradients are added up on shards (stages 2 and 3), and how they are added.

Round i is everybody's i-th lane; who has no i-th lane only serves. Every lane leaves for the owners at once, so an
owner gets a round's lanes together and keeps, until the next rounds, what waits for its sibling in the one tree
(tree.py): a stack, on its shard. The plan alone tells all of it, so that all members know which lane a gradient is of,
and the order of additions is found once for a world. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, zip_longest

from shoal_protos.plan import Plan
from shoal_protos.runs import Span

from shoal.core.tree import Additions, fold_up

NO_LANE = -1

Round = tuple[int, ...]
"""By rank, the lane that it trains; NO_LANE: it only serves."""


def rounds(plan: Plan) -> list[Round]:
    """Of every step of the world but the first; none where no steps run."""
    return _in_columns(share.lanes for share in plan.shares) if plan.steps else []


def first_rounds(plan: Plan) -> list[Round]:
    """Of the world's first step: who had begun a lane when the last world broke begins with that one again."""
    if plan.recovery is None or not plan.recovery.lanes_in_flight or not plan.steps:
        return rounds(plan)
    pairs = zip(plan.shares, plan.recovery.lanes_in_flight, strict=True)
    return _in_columns(_beginning_with(first, share.lanes) for share, first in pairs)


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
