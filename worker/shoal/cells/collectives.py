"""What each collective sends, receives and adds up, and how it is answered without the other members.

A transport moves bytes only: all sums are made here, in the order of the group's ranks, so that they have the same bits
whichever processes are a cell. `Collective.rounds` yields what is exchanged; when it goes on all of that has come.
Arguments are checked here, before anything is posted: an error of a script must not look like a broken connection.
Called by process_group.py, and by the hub for what the engine adds up; hub.py posts the messages.

`me`, `size`: this process's rank in its group, and the group's size. Tensors may have any strides; their version
counters do not see what comes, as with the groups of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from shoal.cells.call import DTYPES, NO_ROOT, CollectiveCall, Kind, Op

Messages = list[tuple[int, Tensor]]
"""By peer, what goes to it or comes from it: contiguous."""
Round = tuple[Messages, Messages]
"""What is sent, and what is received."""

WHOLE_BYTES = 256 << 10
"""Up to so many bytes an all-reduce is one exchange of whole tensors; else each member adds up its part of them."""


@dataclass(slots=True)
class Collective:
    """One call of this process."""

    call: CollectiveCall
    rounds: Iterator[Round]
    here: Sequence[tuple[Tensor, Tensor | None]]
    """The answer without the other members: targets, and what they are set to (None: zeros)."""


# ---- sums


_FOLDS: dict[Op, Callable[..., Tensor]] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}


def fold(
    parts: Sequence[Tensor],  # by rank; those of others may be written to
    op: Op,
    me: int,
    target: Tensor,  # may be the part of `me`
) -> None:
    """((part 0, part 1), part 2) and so on, in one pass each: into the first one until the part of `me` is read."""
    combine, total = _FOLDS[op], parts[0]
    for rank in range(1, len(parts)):
        total = combine(total, parts[rank], out=target if rank >= me else total)
    if op is Op.AVG:
        target.div_(len(parts))


def all_reduce(me: int, size: int, tensor: Tensor, op: Op = Op.SUM) -> Collective:
    """All members get what becomes of all their tensors."""
    target = _checked(tensor)
    _check_op(op, target)
    call = CollectiveCall(Kind.ALL_REDUCE, target.dtype, target.numel(), op)
    rounds = _reduced_whole if target.nbytes <= WHOLE_BYTES else _reduced_in_parts
    return Collective(call, rounds(me, size, target, op), ())


def _reduced_whole(me: int, size: int, target: Tensor, op: Op) -> Iterator[Round]:
    own = target.contiguous()
    others = [peer for peer in range(size) if peer != me]
    parts = [own if rank == me else torch.empty_like(own) for rank in range(size)]
    yield [(peer, own) for peer in others], [(peer, parts[peer]) for peer in others]
    fold(parts, op, me, own)
    _put(own, target)


def _reduced_in_parts(me: int, size: int, target: Tensor, op: Op) -> Iterator[Round]:
    own = target.contiguous()
    others = [peer for peer in range(size) if peer != me]
    cuts = [own.numel() * rank // size for rank in range(size + 1)]
    chunks = [own.view(-1)[start:stop] for start, stop in pairwise(cuts)]
    parts = [chunks[me] if rank == me else LANDING.take(chunks[me]) for rank in range(size)]
    yield [(peer, chunks[peer]) for peer in others], [(peer, parts[peer]) for peer in others]
    fold(parts, op, me, chunks[me])
    LANDING.give_back(parts[peer] for peer in others)
    yield [(peer, chunks[me]) for peer in others], [(peer, chunks[peer]) for peer in others]
    _put(own, target)


def reduce(me: int, size: int, tensor: Tensor, op: Op, root: int) -> Collective:
    """The root gets what becomes of all tensors; those of others stay."""
    target = _checked(tensor)
    _check_op(op, target)
    return Collective(
        CollectiveCall(Kind.REDUCE, target.dtype, target.numel(), op, root), _reduced_at(me, size, target, op, root), ()
    )


def _reduced_at(me: int, size: int, target: Tensor, op: Op, root: int) -> Iterator[Round]:
    own = target.contiguous()
    if me != root:
        yield [(root, own)], []
        return
    parts = [own if rank == me else LANDING.take(own) for rank in range(size)]
    yield [], [(peer, part) for peer, part in enumerate(parts) if peer != me]
    fold(parts, op, me, own)
    LANDING.give_back(part for peer, part in enumerate(parts) if peer != me)
    _put(own, target)


def reduce_scatter(me: int, size: int, target: Tensor, sources: Sequence[Tensor], op: Op) -> Collective:
    """A member gets what becomes of the tensors that all have for it. `sources`: by rank."""
    target = _checked(target)
    _check_op(op, target)
    own = _all_alike(Kind.REDUCE_SCATTER, sources, target, size)
    call = CollectiveCall(Kind.REDUCE_SCATTER, target.dtype, target.numel(), op)
    return Collective(call, _reduced_and_dealt(me, size, target, own, op), [(target, own[me])])


def _reduced_and_dealt(me: int, size: int, target: Tensor, sources: Sequence[Tensor], op: Op) -> Iterator[Round]:
    others = [peer for peer in range(size) if peer != me]
    total = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
    parts = [sources[me].contiguous().view(-1) if rank == me else LANDING.take(total.view(-1)) for rank in range(size)]
    yield [(peer, sources[peer].contiguous()) for peer in others], [(peer, parts[peer]) for peer in others]
    fold(parts, op, me, total.view(-1))
    LANDING.give_back(parts[peer] for peer in others)
    _put(total, target)


# ---- moves


def all_gather(me: int, size: int, targets: Sequence[Tensor], source: Tensor) -> Collective:
    """All members get the tensors of all. `targets`: by rank."""
    own = _checked(source)
    found = _all_alike(Kind.ALL_GATHER, targets, own, size)
    rounds = _moved(me, dict.fromkeys(range(size), own), dict(enumerate(found)))
    return Collective(
        CollectiveCall(Kind.ALL_GATHER, own.dtype, own.numel()), rounds, [(target, own) for target in found]
    )


def gather(me: int, size: int, targets: Sequence[Tensor], source: Tensor, root: int) -> Collective:
    """The root gets the tensors of all. `targets`: there, by rank; elsewhere empty."""
    own = _checked(source)
    found = _all_alike(Kind.GATHER, targets, own, size if me == root else 0)
    rounds = _moved(me, {root: own}, dict(enumerate(found)))
    return Collective(
        CollectiveCall(Kind.GATHER, own.dtype, own.numel(), root=root), rounds, [(one, own) for one in found]
    )


def scatter(me: int, size: int, target: Tensor, sources: Sequence[Tensor], root: int) -> Collective:
    """A member gets the tensor that the root has for it. `sources`: there, by rank; elsewhere empty."""
    own = _checked(target)
    found = _all_alike(Kind.SCATTER, sources, own, size if me == root else 0)
    rounds = _moved(me, dict(enumerate(found)), {root: own})
    return Collective(
        CollectiveCall(Kind.SCATTER, own.dtype, own.numel(), root=root), rounds, [(own, found[me] if found else None)]
    )


def broadcast(me: int, size: int, tensor: Tensor, root: int) -> Collective:
    """All members get the root's."""
    own = _checked(tensor)
    is_root = me == root
    rounds = _moved(me, dict.fromkeys(range(size), own) if is_root else {}, {root: own})
    call = CollectiveCall(Kind.BROADCAST, own.dtype, own.numel(), root=root)
    return Collective(call, rounds, () if is_root else [(own, None)])


def all_to_all(me: int, size: int, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Collective:
    """A member gets the tensors that all have for it. Both: by rank."""
    given, found = _one_dtype(sources, size), _one_dtype(targets, size)
    if given[0].dtype != found[0].dtype or given[me].numel() != found[me].numel():
        raise ValueError(
            f"all_to_all gives rank {me}, which is this process, {given[me].numel()} {given[0].dtype} elements and "
            f"expects {found[me].numel()} {found[0].dtype}"
        )
    by_peer = tuple(one.numel() for one in given), tuple(one.numel() for one in found)
    call = CollectiveCall(Kind.ALL_TO_ALL, given[0].dtype, 0, by_peer=by_peer)
    here = [(one, given[me] if one.numel() == given[me].numel() else None) for one in found]
    return Collective(call, _moved(me, dict(enumerate(given)), dict(enumerate(found))), here)


def barrier(me: int, size: int) -> Collective:
    """All members have come here."""
    own = torch.zeros(size, dtype=torch.uint8)
    rounds = _moved(me, dict.fromkeys(range(size), own[:1]), dict(enumerate(own.split(1))))
    return Collective(CollectiveCall(Kind.BARRIER, own.dtype, 1), rounds, ())


def meeting() -> Collective:
    """All members have come here, and each has been told where the others are."""
    return Collective(CollectiveCall(Kind.MEETING, torch.uint8, 0), iter(()), ())


def send(peer: int, tensor: Tensor, tag: int) -> Collective:
    """A message to one member."""
    own = _checked(tensor)
    return Collective(CollectiveCall(Kind.SEND, own.dtype, own.numel(), tag=tag), _moved(-1, {peer: own}, {}), ())


def receive(peer: int, tensor: Tensor, tag: int) -> Collective:
    """A message from one member."""
    own = _checked(tensor)
    return Collective(
        CollectiveCall(Kind.RECV, own.dtype, own.numel(), tag=tag), _moved(-1, {}, {peer: own}), [(own, None)]
    )


def _moved(me: int, sources: dict[int, Tensor], targets: dict[int, Tensor]) -> Iterator[Round]:
    """One round. `sources`, `targets`: by rank, that of `me` among them where it has both."""
    landings = {
        peer: one if one.is_contiguous() else torch.empty_like(one, memory_format=torch.contiguous_format)
        for peer, one in targets.items()
        if peer != me
    }
    leaving = [(peer, one.contiguous()) for peer, one in sources.items() if peer != me]
    yield leaving, list(landings.items())
    for peer, landing in landings.items():
        _put(landing, targets[peer])
    if me in sources and me in targets:
        _put(sources[me], targets[me])


def _put(source: Tensor, target: Tensor) -> None:
    """Copies, unless it lies there already."""
    if source.data_ptr() != target.data_ptr():
        target.copy_(source.reshape(target.shape))


# ---- memory that messages land in


class Landing:
    """Memory for what others send, used again and again: to ask the system for it takes as long as to fill it."""

    LEAST_BYTES = 64 << 10
    """Less is asked for each time."""
    MOST = 8
    """Pieces of memory that are kept."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, like: Tensor) -> Tensor:
        """Contiguous, of its shape and dtype. What is not given back is freed by its last user."""
        if like.nbytes < self.LEAST_BYTES:
            return torch.empty_like(like, memory_format=torch.contiguous_format)
        try:
            memory = self._free.pop()
        except IndexError:
            memory = torch.empty(like.nbytes, dtype=torch.uint8)
        if memory.numel() < like.nbytes:
            memory = torch.empty(like.nbytes, dtype=torch.uint8)
        return memory[: like.nbytes].view(like.dtype).view(like.shape)

    def give_back(self, taken: Iterator[Tensor]) -> None:
        """Nothing lands there any more."""
        for one in taken:
            if one.nbytes >= self.LEAST_BYTES:
                self._free.append(torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage()))
        del self._free[: -self.MOST]


LANDING = Landing()


# ---- arguments


def _checked(tensor: Tensor) -> Tensor:
    """Its values, without gradients. Raises `ValueError`."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise ValueError(
            f"a collective of a cell is given a tensor of layout {tensor.layout} on {tensor.device}; expected a dense "
            "one on the CPU"
        )
    return tensor.data


def _fits(op: Op, dtype: torch.dtype) -> bool:
    if op in (Op.BAND, Op.BOR, Op.BXOR):
        return not (dtype.is_floating_point or dtype.is_complex)
    if op is Op.AVG:
        return dtype.is_floating_point or dtype.is_complex
    return op not in (Op.MIN, Op.MAX) or not dtype.is_complex


_REDUCIBLE = frozenset((op, dtype) for op in _FOLDS for dtype in DTYPES if _fits(op, dtype))


def _check_op(op: Op, tensor: Tensor) -> None:
    if (op, tensor.dtype) not in _REDUCIBLE:
        raise ValueError(f"a collective of a cell cannot reduce {tensor.dtype} by {op.name}")


def _one_dtype(tensors: Sequence[Tensor], count: int) -> list[Tensor]:
    found = [_checked(tensor) for tensor in tensors]
    if len(found) != count:
        raise ValueError(f"a collective of a cell is given {len(found)} tensors; expected {count}, one for each rank")
    strange = next((one for one in found if one.dtype != found[0].dtype), None)
    if strange is not None:
        raise ValueError(f"a collective of a cell is given tensors of {found[0].dtype} and {strange.dtype}")
    return found


def _all_alike(kind: Kind, tensors: Sequence[Tensor], like: Tensor, count: int) -> list[Tensor]:
    found = _one_dtype(tensors, count)
    strange = next((one for one in found if one.numel() != like.numel() or one.dtype != like.dtype), None)
    if strange is not None:
        raise ValueError(
            f"{kind.words} is given tensors of {like.numel()} {like.dtype} and {strange.numel()} {strange.dtype} "
            "elements; expected equal ones"
        )
    return found


def root_within(size: int, root: int) -> int:
    """A root that is in the group. Raises `ValueError`."""
    if not 0 <= root < size or root == NO_ROOT:
        raise ValueError(f"a collective of a cell has root {root}; expected a rank of its group, below {size}")
    return root
