"""The hand-out: owners send updated parameters to whoever does not replay the block, bucket by bucket.

Posted only after the vote has passed: a hand-out received early would tear the parameters of a step that is run again.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal_protos.activity import StepPhase
from torch import Tensor

from shoal.blocks.flat import Flats
from shoal.exchange.packing import PackedReceive, pack, size_of
from shoal.exchange.traffic import HANDED, Ranges
from shoal.group.group import Group, Work

AHEAD = 2
"""Buckets in flight beyond the one that is waited for."""

RangesOf = Callable[[int, int], Ranges]
"""(owner, receiver) → what goes from one to the other."""


def hand_out(
    group: Group,
    parameters: Flats,  # per bucket (elements,) of its dtype
    ranges_of: RangesOf,
) -> int:
    """Returns when all that this member receives is in place and all that it sends has left: the bytes received."""
    others = [peer for peer in range(group.size) if peer != group.rank]
    to = {peer: ranges_of(group.rank, peer) for peer in others}
    source = {peer: ranges_of(peer, group.rank) for peer in others}
    waiting: list[list[PackedReceive | tuple[Work, Tensor]]] = []
    for bucket, flat in enumerate(parameters):
        posted: list[PackedReceive | tuple[Work, Tensor]] = []
        for peer in others:
            if source[peer][bucket]:
                posted.append(PackedReceive(group, peer, HANDED, flat, source[peer][bucket]))
        for peer in others:
            if to[peer][bucket]:
                message = pack([flat], to[peer][bucket])
                posted.append((group.send(message, peer, HANDED), message))
        waiting.append(posted)
        group.progress.reach(StepPhase.HAND_OUT, bucket)
        if len(waiting) > AHEAD:
            _wait(waiting.pop(0))
    group.progress.reach(StepPhase.HAND_OUT, len(parameters))
    for posted in waiting:
        _wait(posted)
    return sum(
        size_of(ranges) * flat.element_size()
        for peer in others
        for flat, ranges in zip(parameters, source[peer], strict=True)
    )


def _wait(
    posted: list[PackedReceive | tuple[Work, Tensor]],  # a send keeps its message: (elements in the ranges,)
) -> None:
    for one in posted:
        if isinstance(one, PackedReceive):
            one.wait()
        else:
            one[0].wait()
