"""Mirrors: who is to mirror which block in the end.

Copies lie in as many failure domains as there are; those of one owner are spread over all others, even to one block, so
that after its loss each survivor promotes its share. Within that, copies stay where they are. Called by planner.py
after owners.py, which has placed the mirror already where there is to be only one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from math import floor

from shoal_controller.core.planning.block_groups import BlockGroup, cut, lay
from shoal_controller.core.planning.flow import place_evenly
from shoal_controller.core.planning.placement import Capacity, Demand, Pair


def share_mirrors(
    groups: Sequence[BlockGroup], keepers: Sequence[int], mirrors: int, domains: Sequence[int]
) -> list[BlockGroup]:
    """The owned groups, divided where needed, each with so many mirrors. `domains` is by candidate."""
    if mirrors >= len(keepers) - 1:
        return [
            group.decided(group.owner, tuple(keeper for keeper in keepers if keeper != group.owner), group.blocks)
            for group in groups
        ]
    shared = list(groups)
    members = Counter(domains[keeper] for keeper in keepers)
    apart = min(mirrors, len(members) - 1)
    if apart and max(members.values()) > 1:
        shared = _more(shared, Spread(keepers, domains, apart, apart), domains)
    return _more(shared, Spread(keepers, domains, apart, mirrors), range(len(domains)))


def leave_mirrors(groups: Sequence[BlockGroup], keepers: Sequence[int], domains: Sequence[int]) -> list[BlockGroup]:
    """The groups with holders in place of mirrors that would have to be filled, where there are enough holders."""
    among = frozenset(keepers)
    return [
        group
        if group.holders.issuperset(group.mirrors) or len(group.holders & among) < len(group.keepers)
        else group.decided(group.owner, _holders_instead(group, among, domains), group.blocks)
        for group in groups
    ]


def _holders_instead(group: BlockGroup, among: frozenset[int], domains: Sequence[int]) -> tuple[int, ...]:
    held = [mirror for mirror in group.mirrors if mirror in group.holders]
    seen = {domains[worker] for worker in (group.owner, *held)}
    others = sorted(
        (group.holders & among).difference(held, (group.owner,)), key=lambda worker: (domains[worker] in seen, worker)
    )
    return (*held, *others)[: len(group.mirrors)]


def _more(groups: Sequence[BlockGroup], spread: Spread, sites: Sequence[int]) -> list[BlockGroup]:
    """Adds mirrors to those that the groups have, as many as are missing."""
    missing = [spread.copies - len(group.mirrors) for group in groups]
    if not any(missing):
        return list(groups)
    among = frozenset(spread.keepers)
    demands = [
        Demand(
            count=len(group.blocks),
            holders=(group.owner, *sorted((group.holders & among).difference(group.keepers))),
            previous_owner=group.owner,
            owner=group.owner,
            barred=frozenset(sites[mirror] for mirror in group.mirrors),
        )
        for group in groups
    ]
    shared: list[BlockGroup] = []
    for group, placed in zip(groups, place_evenly(demands, _capacity(groups, spread, sites)), strict=True):
        order = sorted(placed, key=lambda pair: (sites[pair[1]], pair))
        pieces = lay(len(group.blocks), [(pair[1], placed[pair]) for pair in order])
        for (_, mirrors), blocks in zip(pieces, cut(group.blocks, [count for count, _ in pieces]), strict=True):
            shared.append(group.decided(group.owner, group.mirrors + mirrors, blocks))
    return shared


def _capacity(groups: Sequence[BlockGroup], spread: Spread, sites: Sequence[int]) -> Capacity:
    """What the copies so far leave of everybody's share."""
    owned, mirrored = Counter[int](), Counter[Pair]()
    for group in groups:
        owned[group.owner] += len(group.blocks)
        for mirror in group.mirrors:
            mirrored[group.owner, mirror] += len(group.blocks)

    def share(owner: int, mirror: int) -> int:
        return spread.whole_blocks(owned[owner], owner, mirror)

    def least(owner: int, mirror: int) -> int:
        return max(0, share(owner, mirror) - mirrored[owner, mirror])

    def most(owner: int, mirror: int) -> int:
        return least(owner, mirror) + (mirrored[owner, mirror] <= share(owner, mirror))

    below = [0] * len(sites)
    for owner in spread.keepers:
        if not spread.is_thin(owned[owner], owner):
            below[owner] = sum(least(owner, mirror) for mirror in spread.keepers if sites[mirror] != sites[owner])
    copies = spread.copies - len(groups[0].mirrors)
    extra = [copies * owned[owner] - count for owner, count in enumerate(below)]
    return Capacity(
        workers=spread.keepers,
        mirrors=spread.keepers,
        site=sites,
        least=least,
        most=most,
        below=below,
        extra=extra,
        more=0,
        copies=copies,
        apart=copies > 1 and not isinstance(sites, range),
    )


class Spread:
    """What part of an owner's blocks each other worker should mirror: even, and as the failure domains demand.

    `copies` of each block are placed, `apart` of them in domains of their own. A worker's part depends only on the
    sizes of the two domains: it is the same level for all, within the bounds of each.
    """

    def __init__(self, keepers: Sequence[int], domains: Sequence[int], apart: int, copies: int) -> None:
        self.keepers = keepers
        self._domains = domains
        self._apart = apart
        self.copies = copies
        members = Counter(domains[keeper] for keeper in keepers)
        self._size = [members[domain] for domain in domains]
        self._domains_of_size = Counter(members.values())
        self._level = cache(self._level_of)
        self._whole = cache(self._whole_of)

    def whole_blocks(self, blocks: int, owner: int, mirror: int) -> int:
        """How many of so many blocks of an owner a worker should mirror, rounded down."""
        if owner == mirror:
            return 0
        same = self._domains[owner] == self._domains[mirror]
        return self._whole(blocks, self._size[owner], self._size[mirror], same)

    def is_thin(self, blocks: int, owner: int) -> bool:
        """Whether no worker should mirror even one whole block of this owner's: there are more workers than that."""
        sizes = self._domains_of_size
        return not any(self._whole(blocks, self._size[owner], size, same) for size in sizes for same in (False, True))

    def _whole_of(self, blocks: int, owner_size: int, size: int, same: bool) -> int:
        return floor(blocks * self._part_of(owner_size, size, same))

    def _part_of(self, owner_size: int, size: int, same: bool) -> Fraction:
        low, high = self._bounds(size, same)
        return min(max(self._level(owner_size), low), high)

    def _bounds(self, size: int, same: bool) -> tuple[Fraction, Fraction]:
        """At most one copy in each other domain while there are enough domains, else at least one in each."""
        if self.copies == self._apart:
            return Fraction(0), Fraction(0) if same else Fraction(1, size)
        return Fraction(0) if same or not self._apart else Fraction(1, size), Fraction(1)

    def _level_of(self, owner_size: int) -> Fraction:
        """Where the level must be for all parts together to make the copies."""
        counts = {(owner_size, True): owner_size - 1}
        for size, domains in self._domains_of_size.items():
            counts[size, False] = size * (domains - (size == owner_size))
        bounds = [(*self._bounds(*which), count) for which, count in counts.items()]

        def copies(level: Fraction) -> Fraction:
            return sum((min(max(level, low), high) * count for low, high, count in bounds), Fraction(0))

        steps = {edge for low, high, _ in bounds for edge in (low, high)}
        below = max(step for step in steps if copies(step) <= self.copies)
        rising = sum(count for low, high, count in bounds if low <= below < high)
        missing = self.copies - copies(below)
        return below + missing / rising if missing else below
