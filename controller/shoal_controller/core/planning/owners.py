"""Owners: who is to own which block in the end, even to one block, and who is to be its first mirror.

The two are decided together, because a choice of owners alone may cost transfers of mirrors. Owners stay where evenness
allows, else a holder is promoted, else the block has to be filled. The copies of one owner are even to one block over
all others (over those in other failure domains, where there are any). Called by planner.py before mirrors.py. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shoal_controller.core.planning.block_groups import NOBODY, Lot, cut
from shoal_controller.core.planning.placement import Demand, Placing, Room


def share_owners(lots: Sequence[Lot], keepers: Sequence[int], mirrors: int, sites: Sequence[int]) -> list[Lot]:
    """The lots, divided where needed, each with its owner and, where one mirror is wanted, that mirror.

    Both are keepers, at two sites; `sites` is by candidate.
    """
    among = frozenset(keepers)
    stays = _stays(lots, keepers)
    demands = [
        Demand(
            count=len(lot.blocks),
            holders=tuple(sorted(lot.holders & among)),
            was=lot.was if lot.was in among else NOBODY,
            stays=count,
        )
        for lot, count in zip(lots, stays, strict=True)
    ]
    blocks = sum(demand.count for demand in demands)
    room = _room_of_pairs(blocks, keepers, sites) if mirrors == 1 else _room_of_owners(blocks, keepers, mirrors, sites)
    shared: list[Lot] = []
    for lot, placed in zip(lots, Placing(demands, room).run(), strict=True):
        pairs = sorted(placed, key=lambda pair: (pair[0] != lot.was, pair))
        for (owner, mirror), piece in zip(pairs, cut(lot.blocks, [placed[pair] for pair in pairs]), strict=True):
            shared.append(lot.decided(owner, () if mirror == NOBODY else (mirror,), piece))
    return shared


def _stays(lots: Sequence[Lot], keepers: Sequence[int]) -> list[int]:
    """How many blocks of each lot should stay with their owner: evenly of an owner's lots, down to what it may have.

    What goes then comes evenly from all who mirror them. The owners that may have one more are those with most.
    """
    least, spare = divmod(sum(len(lot.blocks) for lot in lots), len(keepers))
    owned: dict[int, list[int]] = {keeper: [] for keeper in keepers}
    for index, lot in enumerate(lots):
        if lot.was in owned:
            owned[lot.was].append(index)
    sizes = {owner: sum(len(lots[index].blocks) for index in mine) for owner, mine in owned.items()}
    fullest = sorted((owner for owner in owned if sizes[owner] > least), key=lambda owner: (-sizes[owner], owner))
    stays = [0] * len(lots)
    for owner, mine in owned.items():
        allowed = least + (owner in fullest[:spare])
        for index, count in zip(mine, level([len(lots[index].blocks) for index in mine], allowed), strict=True):
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


def _room_of_owners(blocks: int, keepers: Sequence[int], mirrors: int, sites: Sequence[int]) -> Room:
    least, more = divmod(blocks, len(keepers))
    return Room(
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


def _room_of_pairs(blocks: int, keepers: Sequence[int], sites: Sequence[int]) -> Room:
    least, more = divmod(blocks, len(keepers))
    crowd = Counter(sites[keeper] for keeper in keepers)
    others = [max(1, len(keepers) - crowd[site]) for site in sites]
    share = [least // count for count in others]
    return Room(
        workers=keepers,
        mirrors=keepers,
        site=sites,
        least=lambda owner, _mirror: share[owner],
        most=lambda owner, _mirror: share[owner] + 1,
        below=[least - least % count for count in others],
        extra=[least % count for count in others],
        more=more,
    )
