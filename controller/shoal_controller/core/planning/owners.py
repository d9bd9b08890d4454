"""Owners: who is to own which block in the end, even to one block, and who is to be its first mirror.

Where there is to be one mirror the two are decided together, because a choice of owners alone may cost transfers of
mirrors. Owners stay where evenness allows, else a holder is promoted, else the block has to be filled. The copies of
one owner are even to one block over its partners. Called by planner.py before mirrors.py. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal_controller.core.planning.block_groups import NOBODY, BlockGroup, cut
from shoal_controller.core.planning.flow import place_evenly
from shoal_controller.core.planning.mirrors import Partners
from shoal_controller.core.planning.placement import ALONE, Capacity, Demand


def share_pairs(
    groups: Sequence[BlockGroup], keepers: Sequence[int], partners: Partners, sites: Sequence[int]
) -> list[BlockGroup]:
    """The groups, divided where needed, each with its owner and the one mirror that is wanted.

    Both are keepers, at two sites; `sites` is by candidate.
    """
    among = frozenset(keepers)
    demands = [_demand(group, tuple(sorted(group.holders & among))) for group in groups]
    return _placed(groups, demands, _capacity_of_pairs(_count(groups), keepers, partners, sites))


def share_owners(
    groups: Sequence[BlockGroup], keepers: Sequence[int], partners: Partners, mirrors: int, sites: Sequence[int]
) -> list[BlockGroup]:
    """The groups, divided where needed, each with its owner, a keeper; their mirrors are chosen afterwards.

    `partners` is empty where all others mirror, or nobody.
    """
    among = frozenset(keepers)
    demands = [
        _demand(group, _owners_for(group, among, partners, mirrors), stays)
        for group, stays in zip(groups, _stays(groups, keepers), strict=True)
    ]
    return _placed(groups, demands, _capacity_of_owners(_count(groups), keepers, mirrors, sites))


def _count(groups: Sequence[BlockGroup]) -> int:
    return sum(len(group.blocks) for group in groups)


def _demand(group: BlockGroup, holders: tuple[int, ...], stays: int = 0) -> Demand:
    was = group.previous_owner
    return Demand(len(group.blocks), holders, previous_owner=was if was in holders else NOBODY, stays=stays)


def _placed(groups: Sequence[BlockGroup], demands: Sequence[Demand], capacity: Capacity) -> list[BlockGroup]:
    shared: list[BlockGroup] = []
    for group, placed in zip(groups, place_evenly(demands, capacity), strict=True):
        pairs = list(placed)
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (pair[0] != group.previous_owner, pair))
        for (owner, mirror), piece in zip(pairs, cut(group.blocks, [placed[pair] for pair in pairs]), strict=True):
            shared.append(group.decided(owner, () if mirror == NOBODY else (mirror,), piece))
    return shared


def _owners_for(group: BlockGroup, among: frozenset[int], partners: Partners, mirrors: int) -> tuple[int, ...]:
    """Those holders of whose partners most are holders too, up to so many: they need the fewest fills of mirrors.

    And the owner before: its mirrors may only wait to be moved to its partners.
    """
    holders = group.holders & among
    if not partners or len(holders) < 2:
        return tuple(sorted(holders))
    ready = {holder: min(mirrors, len(holders.intersection(partners[holder]))) for holder in holders}
    most = max(ready.values())
    return tuple(sorted(holder for holder in holders if ready[holder] == most or holder == group.previous_owner))


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
    above = (owner for owner in owned if sizes[owner] > least)
    fullest = frozenset(sorted(above, key=lambda owner: (-sizes[owner], owner))[:spare])
    stays = [0] * len(groups)
    for owner, mine in owned.items():
        allowed = least + (owner in fullest)
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
        partners=[ALONE] * len(sites),
        site=sites,
        least=lambda _owner, _mirror: least,
        most=lambda _owner, _mirror: least + 1,
        below=[least] * len(sites),
        extra=[0] * len(sites),
        more=more,
        parts=1 + mirrors,
    )


def _capacity_of_pairs(blocks: int, keepers: Sequence[int], partners: Partners, sites: Sequence[int]) -> Capacity:
    least, more = divmod(blocks, len(keepers))
    apart = [
        [partner for partner in partners.get(worker, ()) if sites[partner] != site] for worker, site in enumerate(sites)
    ]
    others = [max(1, len(mirrors)) for mirrors in apart]
    share = [least // count for count in others]
    return Capacity(
        workers=keepers,
        partners=apart,
        site=sites,
        least=lambda owner, _mirror: share[owner],
        most=lambda owner, _mirror: share[owner] + 1,
        below=[least - least % count for count in others],
        extra=[least % count for count in others],
        more=more,
    )
