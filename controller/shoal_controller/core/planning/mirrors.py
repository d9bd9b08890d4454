"""Mirrors: who is to mirror which block in the end.

Copies lie in as many failure domains as there are; those of one owner are spread over its partners, even to one block,
so that after its loss each of them promotes its share. Within that, copies stay where they are. Called by planner.py
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
from shoal_controller.core.planning.partners import Partners
from shoal_controller.core.planning.placement import Capacity, Demand, Pair


def share_mirrors(
    groups: Sequence[BlockGroup], partners: Partners, mirrors: int, domains: Sequence[int]
) -> list[BlockGroup]:
    """The owned groups, divided where needed, each with so many mirrors. `domains` is by candidate."""
    shared = list(groups)
    members = Counter(domains[keeper] for keeper in partners)
    apart = min(mirrors, len(members) - 1)
    # Copies in domains of their own come first, because no later copy may push one of them out; where each worker is a
    # domain by itself, that is so anyway, and one round will do.
    if apart and max(members.values()) > 1:
        shared = _more(shared, Spread(partners, domains, apart, apart), domains)
    return _more(shared, Spread(partners, domains, apart, mirrors), range(len(domains)))


def mirror_everywhere(groups: Sequence[BlockGroup], keepers: Sequence[int]) -> list[BlockGroup]:
    """The owned groups, each mirrored by all others."""
    return [
        group.decided(group.owner, tuple(keeper for keeper in keepers if keeper != group.owner), group.blocks)
        for group in groups
    ]


def leave_mirrors(groups: Sequence[BlockGroup], partners: Partners, domains: Sequence[int]) -> list[BlockGroup]:
    """The groups with partners that hold them in place of mirrors to be filled, where there are enough of those."""
    return [
        group.decided(group.owner, _holders_instead(group, partners[group.owner], domains), group.blocks)
        for group in groups
    ]


def _holders_instead(group: BlockGroup, partners: Sequence[int], domains: Sequence[int]) -> tuple[int, ...]:
    held = [mirror for mirror in group.mirrors if mirror in group.holders]
    if len(held) == len(group.mirrors):
        return group.mirrors
    seen = {domains[worker] for worker in (group.owner, *held)}
    others = sorted(
        group.holders.intersection(partners).difference(held), key=lambda worker: (domains[worker] in seen, worker)
    )
    instead = (*held, *others)[: len(group.mirrors)]
    return instead if len(instead) == len(group.mirrors) else group.mirrors


def let_mirrors_wait(groups: Sequence[BlockGroup], partners: Partners, domains: Sequence[int]) -> list[BlockGroup]:
    """The groups, the mirrors of a joiner's blocks where they are while anything else is to be filled.

    Such blocks have copies enough, only with none of their owner's partners: it gets the blocks sooner so, and where
    several join one after another its mirrors are moved once.
    """
    keepers = frozenset(partners)
    waiting = [_where_they_are(group, partners[group.owner], keepers, domains) for group in groups]
    is_rest_filled = all(group.holders.issuperset(group.keepers) for group in waiting)
    return list(groups) if is_rest_filled else waiting


def _where_they_are(
    group: BlockGroup, partners: Sequence[int], keepers: frozenset[int], domains: Sequence[int]
) -> BlockGroup:
    """Blocks that no partner of their owner holds, mirrored by who does, if as far apart; others as they are."""
    if not group.holders.isdisjoint(group.mirrors):
        return group
    elsewhere = (group.holders & keepers) - {group.owner}
    if not elsewhere.isdisjoint(partners):
        return group
    waiting = group.decided(group.owner, _holders_instead(group, sorted(elsewhere), domains), group.blocks)
    apart = {domains[keeper] for keeper in waiting.keepers}
    return waiting if len(apart) >= len({domains[keeper] for keeper in group.keepers}) else group


def _more(groups: Sequence[BlockGroup], spread: Spread, sites: Sequence[int]) -> list[BlockGroup]:
    """Adds mirrors to those that the groups have, as many as are missing."""
    missing = [spread.copies - len(group.mirrors) for group in groups]
    if not any(missing):
        return list(groups)
    among = frozenset(spread.partners)
    demands = [
        Demand(
            size=len(group.blocks),
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
    least, most = dict[Pair, int](), dict[Pair, int]()
    below = [0] * len(sites)
    for owner, partners in spread.partners.items():
        for mirror, part in spread.parts(owner).items():
            # The part is a fraction of blocks that cannot be divided: whole blocks first, then one more for some, but
            # not for who has one more already from the round before.
            share, pair = floor(owned[owner] * part), (owner, mirror)
            least[pair] = max(0, share - mirrored[pair])
            most[pair] = least[pair] + (mirrored[pair] <= share)
        below[owner] = sum(least[owner, mirror] for mirror in partners if sites[mirror] != sites[owner])
    copies = spread.copies - len(groups[0].mirrors)
    extra = [copies * owned[owner] - count for owner, count in enumerate(below)]
    return Capacity(
        workers=tuple(spread.partners),
        partners=[spread.partners.get(worker, ()) for worker in range(len(sites))],
        site=sites,
        least=lambda owner, mirror: least[owner, mirror],
        most=lambda owner, mirror: most[owner, mirror],
        below=below,
        extra=extra,
        more=0,
        copies=copies,
        apart=copies > 1 and not isinstance(sites, range),
    )


class Spread:
    """What part of an owner's blocks each of its partners should mirror: even, and as the failure domains demand.

    `copies` of each block are placed, `apart` of them in domains of their own. The part is the same level for all
    partners, within the bounds that the number of them in a domain sets.
    """

    def __init__(self, partners: Partners, domains: Sequence[int], apart: int, copies: int) -> None:
        self.partners = partners
        self.copies = copies
        self._domains = domains
        self._apart = apart
        self._level = cache(self._level_of)

    def parts(self, owner: int) -> dict[int, Fraction]:
        """The part of each partner."""
        own = self._domains[owner]
        members = Counter(self._domains[partner] for partner in self.partners[owner])
        crowds = {partner: (members[self._domains[partner]], self._domains[partner] == own)
                  for partner in self.partners[owner]}  # fmt: skip
        level = self._level(tuple(sorted(crowds.values())))
        bounds = {crowd: self._bounds(*crowd) for crowd in set(crowds.values())}
        return {partner: min(max(level, bounds[crowd][0]), bounds[crowd][1]) for partner, crowd in crowds.items()}

    def _bounds(self, size: int, same: bool) -> tuple[Fraction, Fraction]:
        """At most one copy in each other domain while there are enough domains, else at least one in each."""
        if self.copies == self._apart:
            return Fraction(0), Fraction(0) if same else Fraction(1, size)
        return Fraction(0) if same or not self._apart else Fraction(1, size), Fraction(1)

    def _level_of(self, crowds: tuple[tuple[int, bool], ...]) -> Fraction:
        """Where the level must be for all parts together to make the copies.

        `crowds` has one entry per partner: how many partners are in its domain, and whether that is the owner's.
        """
        bounds = [(*self._bounds(*crowd), count) for crowd, count in Counter(crowds).items()]

        # Copies rise with the level, in straight lines between the bounds at which somebody begins or has enough. So
        # the level lies on the line that begins at the highest bound with no copy too many; fractions keep it exact.
        def copies(level: Fraction) -> Fraction:
            return sum((min(max(level, low), high) * count for low, high, count in bounds), Fraction(0))

        steps = {edge for low, high, _ in bounds for edge in (low, high)}
        below = max(step for step in steps if copies(step) <= self.copies)
        rising = sum(count for low, high, count in bounds if low <= below < high)
        missing = self.copies - copies(below)
        return below + missing / rising if missing else below
