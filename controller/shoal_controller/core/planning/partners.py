"""Partners: the few workers who are to mirror the blocks of one owner.

Two workers lost at once lose blocks only where one was the other's partner, so sets are small, and mutual where they
can be. They change only when a partner is gone: a joiner chooses its own and is chosen when others miss one. Partners
lie in other failure domains, and the workers of a domain choose from the same few. Called by planner.py before
owners.py. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

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
        """Adds partners until the set is full, or nobody is left who would be a good one."""
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
        """Whoever is in the fewest sets, of the nearest domain on the ring that has somebody."""
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
        """Whoever of a domain is in the fewest sets and may become this owner's partner."""
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
