"""The members of a cell in one process, each in a thread of its own, over real groups; and random programs for them.

    in_cell(2, lambda member: dist.all_reduce(torch.ones(3), group=member.group))

`program` makes the same list of collectives on all members; `run` calls them by `torch.distributed`, over a cell's
group or over one of torch's own. All values are small whole numbers, so that a sum is the same in any order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from over_gloo import over_gloos
from shoal.cells.hub import CellHub
from shoal.cells.process_group import CellGroup
from shoal.group.group import Group
from shoal_protos.shape import Shape
from torch import Tensor


@dataclass
class Member:
    """One of a cell, whose first world and lane have begun."""

    hub: CellHub
    group: CellGroup
    worlds: Sequence[Group]
    """Its ends of all worlds that there are."""

    @property
    def rank(self) -> int:
        """Its coordinate."""
        return self.hub.coordinate

    @property
    def size(self) -> int:
        return self.hub.shape.processes

    def enter(self, number: int) -> None:
        """The world of that number begins, and a lane in it."""
        self.hub.begin(self.worlds[number], _ranks(self.size))
        self.hub.begin_lane()


def _ranks(size: int) -> tuple[int, ...]:
    """Ranks in the world by coordinate: other ones, so that nothing goes by the order of a world."""
    return tuple(reversed(range(size)))


def in_cell(size: int, act: Callable[[Member], object], worlds: int = 1, ends_together: bool = True) -> None:
    """Calls `act` on every member, each in a thread of its own, and returns when all are through. `ends_together`: a
    member that leaves closes what others may be in, so all come to a barrier.
    """

    def member(groups: Sequence[Group]) -> None:
        coordinate = _ranks(size)[groups[0].rank]
        hub = CellHub(Shape(tensor=size), coordinate)
        one = Member(hub, CellGroup(hub, range(size), "cell"), groups)
        one.enter(0)
        act(one)
        if ends_together and not hub.is_void:
            one.group.barrier().wait()

    over_gloos(size, worlds, member)


# ---- random programs


Call = Callable[[Any, int, int], list[Tensor]]
"""Called with a group, this member's rank and the size; what it has afterwards."""
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.float16)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
LENGTHS = (0, 1, 3, 8, 31, 257)
LONG = 70_001
"""Elements of which an all-reduce is cut into parts."""


class _Made:
    """One collective's arguments, drawn alike on all members."""

    def __init__(self, chance: random.Random) -> None:
        self.dtype, self.op = chance.choice(DTYPES), chance.choice(OPS)
        self.length = LONG if chance.random() < 0.05 else chance.choice(LENGTHS)
        self.seed, self.root, self.waits_later = chance.randrange(1 << 30), chance.randrange(6), chance.random() < 0.4
        self.sizes = [[chance.randrange(4) for _ in range(4)] for _ in range(4)]
        """Rows that each gives to each."""

    def values(self, rank: int, *shape: int) -> Tensor:
        """Of one member."""
        generator = torch.Generator().manual_seed(self.seed * 31 + rank)
        return torch.randint(0, 3, shape, generator=generator).to(self.dtype)

    def ended(self, work: Any) -> None:
        """Waits for a collective that was begun and not waited for."""
        if self.waits_later:
            work.wait()


def _all_reduce(made: _Made, group: Any, rank: int, size: int) -> list[Tensor]:
    values = made.values(rank, made.length)
    made.ended(dist.all_reduce(values, made.op, group=group, async_op=made.waits_later))
    return [values]


def _reduce(made: _Made, group: Any, rank: int, size: int) -> list[Tensor]:
    values = made.values(rank, made.length)
    dist.reduce(values, group_dst=made.root % size, op=made.op, group=group)
    return [values] if rank == made.root % size else []


def _all_gather(made: _Made, group: Any, rank: int, size: int) -> list[Tensor]:
    found = [made.values(9, made.length) for _ in range(size)]
    made.ended(dist.all_gather(found, made.values(rank, made.length), group=group, async_op=made.waits_later))
    return found


def _all_gather_single(made: _Made, group: Any, rank: int, size: int) -> list[Tensor]:
    found = made.values(9, size * made.length)
    own = found[rank * made.length : (rank + 1) * made.length]
    own.copy_(made.values(rank, made.length))
    dist.all_gather_single(found, own, group=group)
    return [found]


def _gather(made: _Made, group: Any, rank: int, size: int) -> list[Tensor]:
    found = [made.values(9, made.length) for _ in range(size)] if rank == made.root % size else None
    dist.gather(made.values(rank, made.length), found, group=group, group_dst=made.root % size)
    return found or []


def _scatter(made: _Made, group: Any, rank: int, size: int) -> list[Tensor]:
    found = made.values(9, made.length)
    given = [made.values(one, made.length) for one in range(size)] if rank == made.root % size else None
    dist.scatter(found, given, group=group, group_src=made.root % size)
    return [found]


def _reduce_scatter(made: _Made, group: Any, rank: int, size: int) -> list[Tensor]:
    found = made.values(9, made.length)
    dist.reduce_scatter(found, list(made.values(rank, size, made.length)), group=group)
    return [found]


def _reduce_scatter_single(made: _Made, group: Any, rank: int, size: int) -> list[Tensor]:
    found = made.values(9, made.length)
    dist.reduce_scatter_single(found, made.values(rank, size * made.length), group=group)
    return [found]


def _broadcast(made: _Made, group: Any, rank: int, size: int) -> list[Tensor]:
    values = made.values(rank, made.length)
    made.ended(dist.broadcast(values, group_src=made.root % size, group=group, async_op=made.waits_later))
    return [values]


def _all_to_all(made: _Made, group: Any, rank: int, size: int) -> list[Tensor]:
    gives, gets = made.sizes[rank][:size], [made.sizes[other][rank] for other in range(size)]
    found = made.values(9, sum(gets), 2)
    dist.all_to_all_single(found, made.values(rank, sum(gives), 2), gets, gives, group=group)
    return [found]


def _messages(made: _Made, group: Any, rank: int, size: int) -> list[Tensor]:
    """Round the ring, two with tags of their own, awaited in the other order than they are sent."""
    found = [made.values(9, made.length), made.values(9, made.length + 1)]
    given = [made.values(rank, made.length), made.values(rank, made.length + 1)]
    works = [dist.isend(one, group_dst=(rank + 1) % size, group=group, tag=tag) for tag, one in enumerate(given)]
    works += [dist.irecv(found[tag], group_src=(rank - 1) % size, group=group, tag=tag) for tag in (1, 0)]
    for work in works:
        work.wait()
    return found


def _objects(made: _Made, group: Any, rank: int, size: int) -> list[Tensor]:
    found: list[Any] = [None] * size
    dist.all_gather_object(found, made.values(rank, made.length), group=group)
    dealt = [made.values(rank, 2)]
    dist.broadcast_object_list(dealt, group_src=made.root % size, group=group)
    return [*found, *dealt]


def _barrier(made: _Made, group: Any, rank: int, size: int) -> list[Tensor]:
    dist.barrier(group=group)
    return []


KINDS = (
    _all_reduce, _reduce, _all_gather, _all_gather_single, _gather, _scatter, _reduce_scatter, _reduce_scatter_single,
    _broadcast, _all_to_all, _messages, _objects, _barrier,
)  # fmt: skip


def program(seed: int) -> list[Call]:
    """Up to eight collectives."""
    chance = random.Random(seed)
    calls: list[Call] = []
    for _ in range(chance.randrange(1, 9)):
        kind, made = chance.choice(KINDS), _Made(chance)
        calls.append(lambda group, rank, size, kind=kind, made=made: kind(made, group, rank, size))
    return calls


def run(calls: Sequence[Call], group: Any, rank: int, size: int) -> list[Tensor]:
    """All that one member has in the end."""
    return [tensor for call in calls for tensor in call(group, rank, size)]
