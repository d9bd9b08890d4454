"""Mirrors: which few partners an owner has, and who is to mirror which block in the end.

Two workers lost at once lose blocks only where one was the other's partner, so sets of partners are small, and mutual
where they can be. They change only when a partner is gone: a joiner chooses its own and is chosen when others miss one.
Partners lie in other failure domains, and the workers of a domain choose from the same few.

Copies lie in as many failure domains as there are; those of one owner are spread over its partners, even to one block,
so that after its loss each of them promotes its share. Within that, copies stay where they are.

Called by planner.py: partners are chosen before owners.py, and copies are placed after it, which has placed the mirror
already where there is to be only one. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from heapq import heapify, heappop, heappush
from math import floor

from shoal_controller.core.planning.block_groups import BlockGroup, cut, lay
from shoal_controller.core.planning.flow import place_evenly
from shoal_controller.core.planning.placement import Capacity, Demand, Pair

Partners = Mapping[int, tuple[int, ...]]
"""By owner; workers are the planner's indexes."""

GOLDEN = 0.381966
"""Of the ring: how far apart those are put whose names follow each other, for such hosts often fail together."""


@dataclass(frozen=True, slots=True)
class PartnerTerms:
    """What is wanted of every set."""

    count: int
    """Partners of one owner, where there are so many others."""
    mirrors: int
    """Copies of each block beside the owner's, at most `count`."""


def choose_partners(
    before: Partners, keepers: Sequence[int], domains: Sequence[int], terms: PartnerTerms
) -> dict[int, tuple[int, ...]]:
    """The partners of every keeper: those of before who are still there, and new ones for those who miss some.

    `domains` is by worker, `before` may name workers who are gone. In a world too small all others are partners.
    """
    if len(keepers) - 1 <= terms.count:
        return {keeper: tuple(other for other in keepers if other != keeper) for keeper in keepers}
    choice = _Choice(keepers, domains, terms)
    for keeper in keepers:
        choice.keep(keeper, before.get(keeper, ()))
    for keeper in choice.in_ring_order():
        choice.complete(keeper)
    return {keeper: tuple(sorted(chosen)) for keeper, chosen in choice.chosen.items()}


class _Choice:
    """All sets as they grow. A *free* worker is in fewer sets than there are places in one."""

    def __init__(self, keepers: Sequence[int], domains: Sequence[int], terms: PartnerTerms) -> None:
        self.chosen: dict[int, list[int]] = {keeper: [] for keeper in keepers}
        self._chosen_by: dict[int, list[int]] = {keeper: [] for keeper in keepers}
        self._domains = domains
        self._terms = terms
        members: defaultdict[int, list[int]] = defaultdict(list)
        for keeper in keepers:
            members[domains[keeper]].append(keeper)
        self._members = members
        self._ring = _scattered(sorted(members))
        self._place = {domain: place for place, domain in enumerate(self._ring)}
        self._apart = min(terms.mirrors, len(members) - 1)
        self._heaps: dict[int, list[tuple[int, int]]] = {}
        self._free_places: list[int] = []

    def keep(self, owner: int, before: Sequence[int]) -> None:
        """Takes over the partners of before, but for those who are gone or would leave copies in too few domains."""
        here = [partner for partner in before if partner in self.chosen and partner != owner][: self._terms.count]
        kept = [partner for partner in here if self._domains[partner] != self._domains[owner]]
        beside = [partner for partner in here if partner not in kept]
        kept += beside[: max(0, self._terms.mirrors - len(kept))]
        while self._lacking_domains(owner, kept) > self._terms.count - len(kept):
            kept.pop(self._first_duplicate(owner, kept))
        for partner in kept:
            self._add(owner, partner)

    def in_ring_order(self) -> Iterator[int]:
        """All who choose, in an order in which neighbours on the ring of domains choose one after another."""
        for domain, members in self._members.items():
            heap = [(len(self._chosen_by[member]), member) for member in members]
            heapify(heap)
            self._heaps[domain] = heap
        self._free_places = list(range(len(self._ring)))
        for domain in self._ring:
            yield from self._members[domain]

    def complete(self, owner: int) -> None:
        """Add partners until the set is full or no good one is left."""
        while len(self.chosen[owner]) < self._terms.count and (partner := self._next(owner)) is not None:
            self._add(owner, partner)
            heappush(self._heaps[self._domains[partner]], (len(self._chosen_by[partner]), partner))

    # ---- the next partner

    def _next(self, owner: int) -> int | None:
        chosen, own = self.chosen[owner], self._domains[owner]
        covered = {own, *(self._domains[partner] for partner in chosen)}
        places_left = self._terms.count - len(chosen)
        must_be_new = self._lacking_domains(owner, chosen) >= places_left
        if (mutual := self._mutual(owner, covered if must_be_new else {own})) is not None:
            return mutual
        any_new = len(covered) < len(self._ring)
        if any_new and (new := self._nearest(owner, covered, free=True)) is not None:
            return new
        if not must_be_new and (old := self._nearest(owner, {own}, free=True)) is not None:
            return old
        if any_new:
            return self._nearest(owner, covered, free=False)
        if (other := self._nearest(owner, {own}, free=False)) is not None:
            return other
        return self._best_of(owner, own) if len(chosen) < self._terms.mirrors else None

    def _mutual(self, owner: int, barred: set[int]) -> int | None:
        """Somebody free who has chosen this owner."""
        for other in self._chosen_by[owner]:
            if other not in self.chosen[owner] and self._domains[other] not in barred and self._is_free(other):
                return other
        return None

    def _nearest(self, owner: int, barred: set[int], free: bool) -> int | None:
        """Return the worker in the fewest sets, of the nearest domain on the ring that has a worker."""
        places: Sequence[int] = self._free_places if free else range(len(self._ring))
        used_up: list[int] = []
        found = None
        for place in _outward(places, self._place[self._domains[owner]]):
            domain = self._ring[place]
            if free and not self._has_free(domain):
                used_up.append(place)
            elif domain not in barred and (found := self._best_of(owner, domain, free)) is not None:
                break
        for place in used_up:
            del self._free_places[bisect_left(self._free_places, place)]
        return found

    def _best_of(self, owner: int, domain: int, free: bool = False) -> int | None:
        """Return the worker of a domain that is in the fewest sets and may become this owner's partner."""
        heap, passed, found = self._heaps[domain], [], None
        while heap and found is None:
            sets, member = heappop(heap)
            if sets != len(self._chosen_by[member]):
                continue
            passed.append((sets, member))
            if free and sets >= self._terms.count:
                break
            if member != owner and member not in self.chosen[owner]:
                found = member
        for entry in passed:
            heappush(heap, entry)
        return found

    def _has_free(self, domain: int) -> bool:
        heap = self._heaps[domain]
        while heap[0][0] != len(self._chosen_by[heap[0][1]]):
            heappop(heap)
        return heap[0][0] < self._terms.count

    def _is_free(self, worker: int) -> bool:
        return len(self._chosen_by[worker]) < self._terms.count

    def _lacking_domains(self, owner: int, chosen: Sequence[int]) -> int:
        """In how many more domains there must be partners, for copies to lie in as many as can be."""
        return self._apart - len({self._domains[partner] for partner in chosen} - {self._domains[owner]})

    def _first_duplicate(self, owner: int, partners: Sequence[int]) -> int:
        seen = {self._domains[owner]}
        for index, partner in enumerate(partners):
            if self._domains[partner] in seen:
                return index
            seen.add(self._domains[partner])
        raise AssertionError("partners that lack a domain share one")

    def _add(self, owner: int, partner: int) -> None:
        self.chosen[owner].append(partner)
        self._chosen_by[partner].append(owner)


def _scattered(domains: Sequence[int]) -> list[int]:
    """The domains in an order in which neighbours are far apart in the order given."""
    size = len(domains)
    return [domains[place] for place in sorted(range(size), key=lambda place: (place * GOLDEN % 1.0, place))]


def _outward(places: Sequence[int], start: int) -> Iterator[int]:
    """The places of a ring, ascending, from those beside `start` outward to both sides."""
    right, size = bisect_right(places, start), len(places)
    for distance in range((size + 1) // 2):
        yield places[(right + distance) % size]
        if 2 * distance + 1 < size:
            yield places[(right - 1 - distance) % size]


NOWHERE = -1
"""No domain."""


def share_mirrors(
    groups: Sequence[BlockGroup], partners: Partners, mirrors: int, domains: Sequence[int], taken: int = NOWHERE
) -> list[BlockGroup]:
    """The owned groups, divided where needed, each with so many mirrors. `domains` is by candidate; `taken`: one that
    has a copy of all these blocks already, so that others come first.
    """
    shared = list(groups)
    elsewhere = {
        owner: tuple(one for one in several if domains[one] != taken)
        for owner, several in partners.items()
        if domains[owner] != taken
    }
    members = Counter(domains[worker] for worker in _workers_of(elsewhere))
    apart = min(mirrors, len(members) - 1)
    # Copies in domains of their own come first, because no later copy may push one of them out; where each worker is a
    # domain by itself, that is so anyway, and one round will do.
    if apart and (max(members.values()) > 1 or len(elsewhere) < len(partners)):
        shared = _more(shared, Spread(elsewhere, domains, apart, apart), domains)
    return _more(shared, Spread(partners, domains, apart, mirrors), range(len(domains)))


def _workers_of(partners: Partners) -> frozenset[int]:
    return frozenset(partners).union(*partners.values())


def mirror_on_spares(
    groups: Sequence[BlockGroup],
    partners: Partners,
    beside: Partners,
    spares: Sequence[int],
    mirrors: int,
    domains: Sequence[int],
) -> list[BlockGroup]:
    """The owned groups, each with its first mirror on a spare in another domain than its owner's, and the others with
    the owner's partners `beside`, which are trainers, in further domains. Where those have too few, spares in domains
    of their own mirror more. Where no spare is in another domain, all are with `partners`; and copies stay where they
    are then, for the next spare takes them over. `domains` is by candidate, each its own where all share one.
    """  # fmt: skip
    of_trainers = {domains[trainer] for trainer in beside}
    alone = [spare for spare in spares if domains[spare] not in of_trainers]
    lacking = min(mirrors + 1 - len(of_trainers), len({domains[spare] for spare in alone}))
    chosen, copies = (alone, lacking) if lacking > 0 else (spares, 1)
    elsewhere = {owner: tuple(one for one in chosen if domains[one] != domains[owner]) for owner in beside}
    apart = {owner: several for owner, several in elsewhere.items() if several}
    served = [group for group in groups if group.owner in apart]
    others = [group for group in groups if group.owner not in apart]
    mirrored: list[BlockGroup] = []
    if others:
        everyone = {owner: tuple(one for one in partners if one != owner) for owner in partners}
        mirrored += leave_mirrors(share_mirrors(others, partners, mirrors, domains), everyone, domains)
    if served:
        first = share_mirrors(served, apart, copies, domains)
        left = tuple(spare for spare in spares if spare not in chosen)
        pool = {owner: (*trainers, *left) for owner, trainers in beside.items()}
        mirrored += _more_beside(first, pool, mirrors - copies, domains) if mirrors > copies else first
    return mirrored


def _more_beside(
    groups: Sequence[BlockGroup], partners: Partners, mirrors: int, domains: Sequence[int]
) -> list[BlockGroup]:
    """The groups, mirrored by spares, with so many mirrors more: in other domains than those while there are such."""
    known = {domains[worker] for worker in _workers_of(partners)}
    by_domain: defaultdict[int, list[BlockGroup]] = defaultdict(list)
    for group in groups:
        by_domain[next((domains[one] for one in group.mirrors if domains[one] in known), NOWHERE)].append(group)
    mirrored: list[BlockGroup] = []
    for taken, mine in by_domain.items():
        bare = [group.decided(group.owner, (), group.blocks) for group in mine]
        more: defaultdict[int, list[BlockGroup]] = defaultdict(list)
        for one in share_mirrors(bare, partners, mirrors, domains, taken):
            more[one.owner].append(one)
        mirrored += (
            group.decided(group.owner, group.mirrors + one.mirrors, both)
            for group in mine
            for one in more[group.owner]
            if (both := group.blocks & one.blocks)
        )
    return mirrored


def leave_beside_spares(
    groups: Sequence[BlockGroup], keepers: Sequence[int], spares: Sequence[int], domains: Sequence[int]
) -> list[BlockGroup]:
    """The groups as `leave_mirrors` has them, of any keepers; but for those that a spare is to be filled with."""
    waits = frozenset(spares)
    return [
        group if waits.intersection(group.mirrors) - group.holders else _with_holders(group, keepers, domains)
        for group in groups
    ]


def mirror_everywhere(groups: Sequence[BlockGroup], keepers: Sequence[int]) -> list[BlockGroup]:
    """The owned groups, each mirrored by all others."""
    return [
        group.decided(group.owner, tuple(keeper for keeper in keepers if keeper != group.owner), group.blocks)
        for group in groups
    ]


def leave_mirrors(groups: Sequence[BlockGroup], partners: Partners, domains: Sequence[int]) -> list[BlockGroup]:
    """The groups with partners that hold them in place of mirrors to be filled, where there are enough of those and
    they are in as many domains.
    """
    return [_with_holders(group, partners[group.owner], domains) for group in groups]


def _with_holders(group: BlockGroup, partners: Sequence[int], domains: Sequence[int]) -> BlockGroup:
    held = [mirror for mirror in group.mirrors if mirror in group.holders]
    if len(held) == len(group.mirrors):
        return group
    seen = {domains[worker] for worker in (group.owner, *held)}
    others = sorted(
        group.holders.intersection(partners).difference((group.owner, *held)),
        key=lambda worker: (domains[worker] in seen, worker),
    )
    instead = group.decided(group.owner, (*held, *others)[: len(group.mirrors)], group.blocks)
    apart, wanted = ({domains[keeper] for keeper in one.keepers} for one in (instead, group))
    return instead if len(instead.mirrors) == len(group.mirrors) and len(apart) >= len(wanted) else group


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
        return group  # as nearly all; at a start all workers hold all blocks
    elsewhere = (group.holders & keepers) - {group.owner}
    if not elsewhere.isdisjoint(partners):
        return group
    return _with_holders(group, sorted(elsewhere), domains)


def _more(groups: Sequence[BlockGroup], spread: Spread, sites: Sequence[int]) -> list[BlockGroup]:
    """Adds mirrors to those that the groups have, as many as are missing."""
    missing = [spread.copies - len(group.mirrors) for group in groups]
    if not any(missing):
        return list(groups)
    among = _workers_of(spread.partners)
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
