"""Copies of blocks: how many are wanted in a world, and of which blocks there are fewer. Pure.

The view, the series and who holds what count them with this, so that all say the same. The planner makes as many.
"""

from __future__ import annotations

from itertools import pairwise

from shoal_protos.plan import Plan
from shoal_protos.runs import NO_BLOCKS, Runs

from shoal_controller.core.machine.durable import Durable


def copies_wanted(durable: Durable) -> int | None:
    """Of every block in the world that may train, the owner's among them: as many as the job asks for, and no more than
    there are members that keep blocks, as a joiner does once it is filled. None: there is no world.
    """
    description, world = durable.description, durable.current
    if description is None or world is None:
        return None
    keepers = sum(bool(share.keeps) for share in world.shares)
    return min(description.mirrors, max(1, keepers) - 1) + 1


def missing_copies(world: Plan | None, wanted: int | None) -> Runs:
    """Blocks with fewer copies than wanted, the owner's among them; none where there is no world."""
    if world is None or wanted is None:
        return NO_BLOCKS
    changes = dict.fromkeys((0, world.blocks), 0)
    """By how many the copies of this block are more than those of the block before."""
    for share in world.shares:
        for begin, end in share.keeps.spans:
            changes[begin] = changes.get(begin, 0) + 1
            changes[end] = changes.get(end, 0) - 1
    missing, copies = [], 0
    for begin, end in pairwise(sorted(changes)):
        copies += changes[begin]
        if copies < wanted:
            missing.append((begin, end))
    return Runs(missing)
