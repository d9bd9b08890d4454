"""Owners: who is to own which block in the end, even to one block.

Owners stay where evenness allows. What has to go is taken evenly from blocks that are mirrored in different places (the
copies of one owner stay spread), and goes to a worker that holds it already where there is one. Called by planner.py
before mirrors.py. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from shoal_controller.core.lots import NOBODY, Lot, cut
from shoal_controller.core.placing import Parcel, Placing, Rules


def share_owners(lots: Sequence[Lot], keepers: Sequence[int], workers: int) -> list[Lot]:
    """The lots, divided where needed, each with its owner: one of the keepers. `workers` counts the candidates."""
    least, spare = divmod(sum(len(lot.blocks) for lot in lots), len(keepers))
    among = set(keepers)
    parcels = [Parcel(len(lot.blocks), tuple(holder for holder in lot.holders if holder in among)) for lot in lots]
    rules = Rules(keepers, least=[least] * workers, spare=spare, copies=1, site=range(workers))
    placing = Placing(parcels, rules)
    for index, owner, count in _stay(lots, among, least, spare):
        placing.place(index, owner, count)
    shared: list[Lot] = []
    for lot, placed in zip(lots, placing.run(), strict=True):
        order = sorted(placed, key=lambda worker: (worker != lot.was, worker))
        for owner, blocks in zip(order, cut(lot.blocks, [placed[owner] for owner in order]), strict=True):
            shared.append(lot.owned_by(owner, blocks))
    return shared


def _stay(lots: Sequence[Lot], among: set[int], least: int, spare: int) -> list[tuple[int, int, int]]:
    """What each owner keeps, as `(lot, owner, blocks)`: evenly of its lots. The spare ones are for those with most."""
    owned: defaultdict[int, list[int]] = defaultdict(list)
    for index, lot in enumerate(lots):
        if lot.was != NOBODY and lot.was in among:
            owned[lot.was].append(index)
    sizes = {owner: sum(len(lots[index].blocks) for index in mine) for owner, mine in owned.items()}
    fullest = sorted((owner for owner in owned if sizes[owner] > least), key=lambda owner: (-sizes[owner], owner))
    stay: list[tuple[int, int, int]] = []
    for owner, mine in owned.items():
        allowed = least + (owner in fullest[:spare])
        for index, count in zip(mine, level([len(lots[index].blocks) for index in mine], allowed), strict=True):
            if count:
                stay.append((index, owner, count))
    return stay


def level(counts: Sequence[int], total: int) -> list[int]:
    """Cuts the highest counts down until their sum is `total` at most; of equal ones the first stay higher."""
    left, kept = total, [0] * len(counts)
    order = sorted(range(len(counts)), key=lambda index: (counts[index], -index))
    for behind, index in enumerate(order):
        kept[index] = min(counts[index], left // (len(order) - behind))
        left -= kept[index]
    return kept
