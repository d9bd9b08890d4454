"""Fills: which worker still has to receive which blocks, and from whom.

Every copy that the target wants and that does not exist yet is sent by one of those who keep the block meanwhile; all
have as little to send as can be, and blocks with the fewest copies go first. Called by planner.py last. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from shoal_protos.plan import Fill
from shoal_protos.runs import Runs, Span

from shoal_controller.core.planning.block_groups import BlockGroup, cut


class KeptBlocks(NamedTuple):
    """Blocks as a plan has them from its first step on: their owner and mirrors hold them with valid bits."""

    group: BlockGroup
    owner: int
    mirrors: tuple[int, ...]
    targets: tuple[int, ...] = ()
    """Who is to keep them in the end and does not hold them yet."""


def name_fills(kept: Sequence[KeptBlocks]) -> list[Fill]:
    """The fills towards the groups' targets; workers are the planner's indexes."""
    sent = Counter[int]()
    spans: defaultdict[tuple[int, int, int], list[Span]] = defaultdict(list)
    for now in sorted((now for now in kept if now.targets), key=lambda now: len(now.mirrors)):
        sources = (now.owner, *now.mirrors)
        for target in now.targets:
            counts = _even_out([sent[source] for source in sources], len(now.group.blocks))
            for source, count, blocks in zip(sources, counts, cut(now.group.blocks, counts), strict=True):
                sent[source] += count
                if count:
                    spans[len(now.mirrors), source, target] += blocks.spans
    return [Fill(source, target, Runs(spans[copies, source, target])) for copies, source, target in sorted(spans)]


def _even_out(loads: Sequence[int], more: int) -> list[int]:
    """Divides `more` so that the highest load is as low as can be."""
    if len(loads) == 1:
        return [more]
    given = [0] * len(loads)
    order = sorted(range(len(loads)), key=lambda index: loads[index])
    filled = 0
    for count, index in enumerate(order, start=1):
        following = loads[order[count]] if count < len(order) else None
        filled += loads[index]
        if following is None or following * count - filled >= more:
            least, extra = divmod(filled + more, count)
            for place, member in enumerate(order[:count]):
                given[member] = least + (place < extra) - loads[member]
            break
    return given
