"""Mirrors: who is to mirror which block in the end.

Copies lie in as many failure domains as there are; those of one owner are spread over all others, so that after its
loss each survivor promotes its share; what each worker mirrors is even. Within that, copies stay where they are. Called
by planner.py after owners.py. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import ceil

from shoal_controller.core.lots import Lot, cut, lay
from shoal_controller.core.placing import Parcel, Placing, Rules


def share_mirrors(lots: Sequence[Lot], keepers: Sequence[int], mirrors: int, domains: Sequence[int]) -> list[Lot]:
    """The owned lots, divided where needed, each with its mirrors. `domains` is by candidate.

    First one copy in each of as many other domains as wanted; what is wanted beyond that lies anywhere.
    """
    if mirrors >= len(keepers) - 1:
        return [lot.mirrored_by(tuple(k for k in keepers if k != lot.owner), lot.blocks) for lot in lots]
    apart = min(mirrors, len({domains[keeper] for keeper in keepers}) - 1)
    shared = list(lots)
    if apart:
        shared = _place(shared, _copies_apart(apart, domains), keepers, domains)
    if mirrors > apart:
        shared = _place(shared, _copies_anywhere(mirrors, apart, len(domains)), keepers, domains)
    return shared


@dataclass(frozen=True, slots=True)
class _Layer:
    """Some of the copies of every block: each lies at another site, and each site has at most one of a block."""

    copies: int
    """How many of each block this layer places."""
    total: int
    """How many there are then."""
    site: Sequence[int]
    bounds: Callable[[int, bool], tuple[Fraction, Fraction]]
    """What part of an owner's blocks a worker should mirror at least (it does before this layer) and at most: by the
    number of workers in its domain, and whether that is the owner's too."""


def _copies_apart(copies: int, domains: Sequence[int]) -> _Layer:
    def bounds(size: int, same: bool) -> tuple[Fraction, Fraction]:
        return Fraction(0), Fraction(0) if same else Fraction(1, size)

    return _Layer(copies, copies, domains, bounds)


def _copies_anywhere(mirrors: int, apart: int, workers: int) -> _Layer:
    def bounds(size: int, same: bool) -> tuple[Fraction, Fraction]:
        return Fraction(0) if same or not apart else Fraction(1, size), Fraction(1)

    return _Layer(mirrors - apart, mirrors, range(workers), bounds)


def _place(lots: Sequence[Lot], layer: _Layer, keepers: Sequence[int], domains: Sequence[int]) -> list[Lot]:
    spread = _Spread(lots, layer, keepers, domains)
    among = set(keepers)
    parcels = [
        Parcel(
            count=len(lot.blocks),
            homes=tuple(h for h in lot.holders if h in among and h not in lot.keepers),
            group=lot.owner,
            barred=frozenset(layer.site[keeper] for keeper in lot.keepers),
        )
        for lot in lots
    ]
    least, spare = spread.columns()
    rules = Rules(keepers, least, spare, layer.copies, layer.site, spread.limit)
    shared: list[Lot] = []
    for lot, placed in zip(lots, Placing(parcels, rules).run(), strict=True):
        order = sorted(placed.items(), key=lambda share: (layer.site[share[0]], share[0]))
        pieces = lay(len(lot.blocks), order)
        for (_, mirrors), blocks in zip(pieces, cut(lot.blocks, [count for count, _ in pieces]), strict=True):
            shared.append(lot.mirrored_by(mirrors, blocks))
    return shared


class _Spread:
    """What each worker should mirror of each owner's blocks, as exact fractions: even, and as the layer allows.

    It depends on the sizes of the two domains alone: for one owner it is the same water level for all others, within
    the bounds of each.
    """

    def __init__(self, lots: Sequence[Lot], layer: _Layer, keepers: Sequence[int], domains: Sequence[int]) -> None:
        self._layer = layer
        self._keepers = keepers
        self._domain = domains
        members = Counter(domains[keeper] for keeper in keepers)
        self._size = [members[domain] for domain in domains]
        self._domains_of_size = Counter(members.values())
        self._owned = Counter[int]()
        for lot in lots:
            self._owned[lot.owner] += len(lot.blocks)
        self._level = cache(self._level_of)
        self._share = cache(self._share_of)
        self._rounded = cache(self._rounded_of)

    def limit(self, owner: int, worker: int) -> int:
        """How many blocks of one owner a worker mirrors at most in this layer: its share, rounded up."""
        same = self._domain[owner] == self._domain[worker]
        return self._rounded(self._owned[owner], self._size[owner], self._size[worker], same)

    def columns(self) -> tuple[list[int], int]:
        """How many blocks each worker mirrors at least in this layer, and how many workers mirror one more.

        Workers in domains of one size get the same.
        """
        sums, workers = defaultdict[int, Fraction](Fraction), Counter[int]()
        in_domain, in_size = Counter[int](), Counter[int]()
        for owner, count in self._owned.items():
            in_domain[self._domain[owner]] += count
            in_size[self._size[owner]] += count
        for worker in self._keepers:
            mine, size = in_domain[self._domain[worker]], self._size[worker]
            workers[size] += 1
            sums[size] += (mine - self._owned[worker]) * self._share(size, size, True)
            for other, count in in_size.items():
                sums[size] += (count - mine * (other == size)) * self._share(other, size, False)
        least = [int(sums[size] / workers[size]) if workers[size] else 0 for size in self._size]
        total = self._layer.copies * sum(self._owned.values())
        return least, total - sum(least[worker] for worker in self._keepers)

    def _rounded_of(self, count: int, owner_size: int, size: int, same: bool) -> int:
        return ceil(count * self._share(owner_size, size, same))

    def _share_of(self, owner_size: int, size: int, same: bool) -> Fraction:
        low, high = self._layer.bounds(size, same)
        return min(max(self._level(owner_size), low), high) - low

    def _level_of(self, owner_size: int) -> Fraction:
        """The level at which the shares of all others sum to the copies wanted."""
        counts = {(owner_size, True): owner_size - 1}
        for size, domains in self._domains_of_size.items():
            counts[size, False] = size * (domains - (size == owner_size))
        bounds = [(*self._layer.bounds(*which), count) for which, count in counts.items()]

        def held(level: Fraction) -> Fraction:
            return sum((min(max(level, low), high) * count for low, high, count in bounds), Fraction(0))

        steps = sorted({edge for low, high, _ in bounds for edge in (low, high)})
        below = max(step for step in steps if held(step) <= self._layer.total)
        missing = self._layer.total - held(below)
        rising = sum(count for low, high, count in bounds if low <= below < high)
        return below + missing / rising if missing else below
