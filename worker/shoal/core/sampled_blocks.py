"""Which blocks' copies are compared, beside a step and before a change. Pure: all members come to the same answer."""

from __future__ import annotations

from shoal_protos.plan import Plan
from shoal_protos.runs import NO_BLOCKS, Runs, in_two, union


def sampled(step: int, blocks: int, every_steps: int) -> Runs:
    """Every block once in any `every_steps` steps that follow each other, at even distances: so the work of a step is
    spread over the owners, however long their runs of blocks are.
    """
    return Runs.of(range(step % every_steps, blocks, every_steps))


def losing_a_copy(old: Plan, new: Plan, boundaries: int) -> Runs:
    """Blocks of which two members of `old` at least keep copies, and of all copies that are there after so many votes
    fewer than two stay in `new`: before it begins is the last time to compare them. Those that are filled count where
    all are: what they were made of was compared then.
    """
    filled: dict[int, list[Runs]] = {}
    for fill in old.fills if boundaries >= old.boundaries else ():
        filled.setdefault(fill.target, []).append(fill.blocks)
    before, after = [], []
    for own, member in enumerate(old.members):
        rank = new.rank_of(member.worker, member.incarnation)
        keeps, stays = old.kept_by(own), new.kept_by(rank) if rank is not None else NO_BLOCKS
        before.append(keeps)
        after.append((keeps | union(filled[own]) if own in filled else keeps) & stays)
    going = union(had - has for had, has in zip(before, after, strict=True))
    if not going:
        return NO_BLOCKS
    return in_two(had & going for had in before) - in_two(has & going for has in after)
