"""Owners: who is to own which block in the end, even to one block, and who is to be its first mirror.

The two are decided together, because a choice of owners alone may cost transfers of mirrors. Owners stay where evenness
allows, else a holder is promoted, else the block has to be filled. The copies of one owner are even to one block over
all others (over those in other failure domains, where there are any). Called by planner.py before mirrors.py. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shoal_controller.core.planning.block_groups import NOBODY, BlockGroup, cut
from shoal_controller.core.planning.flow import place_evenly
from shoal_controller.core.planning.placement import Capacity, Demand


def share_owners(
    groups: Sequence[BlockGroup], keepers: Sequence[int], mirrors: int, sites: Sequence[int]
) -> list[BlockGroup]:
    """The groups, divided where needed, each with its owner and, where one mirror is wanted, that mirror.

    Both are keepers, at two sites; `sites` is by candidate.
    """
    among = frozenset(keepers)
    stays = _stays(groups, keepers)
    demands = [
        Demand(
            count=len(group.blocks),
            holders=tuple(sorted(group.holders & among)),
            previous_owner=group.previous_owner if group.previous_owner in among else NOBODY,
            stays=count,
        )
        for group, count in zip(groups, stays, strict=True)
    ]
    blocks = sum(demand.count for demand in demands)
    room = (
        _capacity_of_pairs(blocks, keepers, sites)
        if mirrors == 1
        else _capacity_of_owners(blocks, keepers, mirrors, sites)
    )
    shared: list[BlockGroup] = []
    for group, placed in zip(groups, place_evenly(demands, room), strict=True):
        pairs = sorted(placed, key=lambda pair: (pair[0] != group.previous_owner, pair))
        for (owner, mirror), piece in zip(pairs, cut(group.blocks, [placed[pair] for pair in pairs]), strict=True):
            shared.append(group.decided(owner, () if mirror == NOBODY else (mirror,), piece))
    return shared


def _stays(groups: Sequence[BlockGroup], keepers: Sequence[int]) -> list[int]:
    """How many blocks of each group should stay with their owner: evenly of its groups, down to what it may have.

    What goes then comes evenly from all who mirror them. The owners that may have one more are those with most.
    """
    least, spare = divmod(sum(len(group.blocks) for group in groups), len(keepers))
    owned: dict[int, list[int]] = {keeper: [] for keeper in keepers}
    for index, group in enumerate(groups):
        if group.previous_owner in owned:
            owned[group.previous_owner].append(index)
    sizes = {owner: sum(len(groups[index].blocks) for index in mine) for owner, mine in owned.items()}
    fullest = sorted((owner for owner in owned if sizes[owner] > least), key=lambda owner: (-sizes[owner], owner))
    stays = [0] * len(groups)
    for owner, mine in owned.items():
        allowed = least + (owner in fullest[:spare])
        for index, count in zip(mine, level([len(groups[index].blocks) for index in mine], allowed), strict=True):
            stays[index] = count
    return stays


def level(counts: Sequence[int], total: int) -> list[int]:
    """Cuts the highest counts down until their sum is `total` at most; of equal ones the first stay higher."""
    left, kept = total, [0] * len(counts)
    order = sorted(range(len(counts)), key=lambda index: (counts[index], -index))
    for behind, index in enumerate(order):
        kept[index] = min(counts[index], left // (len(order) - behind))
        left -= kept[index]
    return kept


def _capacity_of_owners(blocks: int, keepers: Sequence[int], mirrors: int, sites: Sequence[int]) -> Capacity:
    least, more = divmod(blocks, len(keepers))
    return Capacity(
        workers=keepers,
        mirrors=(NOBODY,),
        site=sites,
        least=lambda _owner, _mirror: least,
        most=lambda _owner, _mirror: least + 1,
        below=[least] * len(sites),
        extra=[0] * len(sites),
        more=more,
        parts=1 + mirrors,
    )


def _capacity_of_pairs(blocks: int, keepers: Sequence[int], sites: Sequence[int]) -> Capacity:
    least, more = divmod(blocks, len(keepers))
    crowd = Counter(sites[keeper] for keeper in keepers)
    others = [max(1, len(keepers) - crowd[site]) for site in sites]
    share = [least // count for count in others]
    return Capacity(
        workers=keepers,
        mirrors=keepers,
        site=sites,
        least=lambda owner, _mirror: share[owner],
        most=lambda owner, _mirror: share[owner] + 1,
        below=[least - least % count for count in others],
        extra=[least % count for count in others],
        more=more,
    )
