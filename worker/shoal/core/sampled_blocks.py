"""Which blocks' copies are compared, beside a step and before a change. Pure: all members come to the same answer."""

from __future__ import annotations

from shoal_protos.plan import Plan
from shoal_protos.runs import NO_BLOCKS, Runs, in_two, union


def sampled(step: int, blocks: int, every_steps: int) -> Runs:
    """Every block once in any `every_steps` steps that follow each other, at even distances: so the work of a step is
    spread over the owners, however long their runs of blocks are.
    """
    return Runs.of(range(step % every_steps, blocks, every_steps))


def losing_a_copy(old: Plan, new: Plan) -> Runs:
    """Blocks of which two members of `old` at least keep copies, and no two of these keep theirs in `new`: before it
    begins is the last time to compare them. One that is filled does not count: it agrees with what it was made of.
    """
    before, after = [], []
    for member, share in zip(old.members, old.shares, strict=True):
        rank = new.rank_of(member.worker, member.incarnation)
        before.append(share.keeps)
        after.append(share.keeps & new.shares[rank].keeps if rank is not None else NO_BLOCKS)
    going = union(had - has for had, has in zip(before, after, strict=True))
    if not going:
        return NO_BLOCKS
    return in_two(had & going for had in before) - in_two(has & going for has in after)
