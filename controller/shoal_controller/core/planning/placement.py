"""Placement: gives alike blocks an owner and a mirror each, evenly, with as few transfers as can be.

A *demand* is a number of alike blocks; each of them wants a *pair* of an owner and a mirror, which costs one transfer
for each of the two that does not hold the block. `Capacity` says what is even. That is a minimum-cost flow: here are
its state and the simple part; flow.py has the rest, and the whole in `place_evenly`. owners.py places all blocks so,
and mirrors.py further mirrors of blocks whose owner is given. Knows nothing of plans. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeVar

from shoal_controller.core.planning.block_groups import NOBODY

Pair = tuple[int, int]
"""An owner and a mirror."""

EXACT_PAIRS = 64
"""With so many pairs or fewer the placement is the cheapest that there is; beyond, blocks only take what is free."""

ALONE = (NOBODY,)
"""The partners of all where only owners are placed."""


class Reach(Enum):
    """Which pairs a demand may seek."""

    STAY = 0
    """The owner before, and a holder as mirror."""
    SHARE = 1
    """Two holders; nobody gets more than a fair share of one demand (see `Capacity.parts`)."""
    FREE = 2
    """Two holders."""
    ANY = 3


class Demand(NamedTuple):
    """Alike blocks."""

    size: int
    """How many."""
    holders: tuple[int, ...]
    """Workers who take blocks and hold these already."""
    previous_owner: int = NOBODY
    """The owner before, if it is a holder."""
    owner: int = NOBODY
    """The owner where it is given."""
    barred: frozenset[int] = frozenset()
    """Sites where no mirror may be, besides the owner's."""
    stays: int = 0
    """How many of the blocks should stay with the owner before, if not all can."""

    @property
    def owners(self) -> tuple[int, ...]:
        """Who may own these without a transfer, the owner before first."""
        if self.owner != NOBODY:
            return (self.owner,)
        return tuple(sorted(self.holders, key=lambda holder: holder != self.previous_owner))


@dataclass(frozen=True, slots=True)
class Capacity:
    """What is even. All together it is exactly the blocks that there are.

    An owner has at least `least` blocks with each mirror, one more with `extra` of them (`most` says with whom that may
    be), and `more` owners have one block beyond that.
    """

    workers: Sequence[int]
    """Who takes blocks."""
    partners: Sequence[Sequence[int]]
    """Who may mirror the blocks of each worker; where no mirrors are placed, `ALONE`."""
    site: Sequence[int]
    """Site of each worker: owner and mirror of a block are never at one site."""
    least: Callable[[int, int], int]
    most: Callable[[int, int], int]
    """The bound `least`, or one more."""
    below: Sequence[int]
    """Sum of `least` of each owner."""
    extra: Sequence[int]
    """Extra blocks of each owner."""
    more: int
    copies: int = 1
    """How many mirrors each block gets here; with more than one the owners are given."""
    apart: bool = False
    """Whether a block must not have two of them at one site (where sites are workers that goes without saying)."""
    parts: int = 1
    """How many copies a block has in all: its owner should have this part of all that it holds."""

    @property
    def has_mirrors(self) -> bool:
        """Whether mirrors are placed at all."""
        return self.partners[self.workers[0]] != ALONE


def is_small(partners: Iterable[Sequence[int]]) -> bool:
    """Whether there are so few pairs that the cheapest placement is looked for."""
    return sum(map(len, partners)) <= EXACT_PAIRS


class Placement:
    """One division of all demands, as far as it has come: `placed[demand][pair]` blocks."""

    def __init__(self, demands: Sequence[Demand], capacity: Capacity) -> None:
        self.demands = demands
        self.capacity = capacity
        self.placed: list[dict[Pair, int]] = [{} for _ in demands]
        self.wanted = [demand.size * capacity.copies for demand in demands]
        self.reach = Reach.STAY
        self.users: defaultdict[Pair, dict[int, None]] = defaultdict(dict)
        """Demands that each pair has blocks of, where somebody may be displaced."""
        self.load: defaultdict[Pair, int] = defaultdict(int)
        self.over: list[dict[Pair, None]] = [{} for _ in capacity.site]
        """Pairs of each owner with one more than their least."""
        self.rich: dict[int, None] = {}
        """Owners with one more than their extra pairs."""
        self.at_site: Counter[tuple[int, int]] = Counter()
        """Copies by demand and site, where copies must lie apart."""
        self._short = list(capacity.below)
        self._open = deque(capacity.workers)
        """Among them all owners that can take more, once nothing is taken back from any."""
        self._mirrored = [0] * (len(capacity.site) + 1)
        self.is_exact = not capacity.has_mirrors or is_small(capacity.partners)
        self._owners: dict[int, tuple[int, ...]] = {}
        self._held = [frozenset(demand.holders) for demand in demands]
        self.owners_by_partner: list[list[int]] = [[] for _ in (*capacity.site, NOBODY)]
        """Of each worker: who may have blocks mirrored by it."""
        for owner in capacity.workers:
            for partner in capacity.partners[owner]:
                self.owners_by_partner[partner].append(owner)

    def place(self, index: int, pair: Pair, count: int) -> None:
        """Gives (or, with a negative count, takes back) blocks of a demand to a pair."""
        owner, mirror = pair
        least, before = self.capacity.least(owner, mirror), self.load[pair]
        after = self.load[pair] = before + count
        # Up to its least a pair fills its owner's even share; beyond that it uses up one of the owner's extra blocks.
        if before < least or after < least:
            self._short[owner] -= min(after, least) - min(before, least)
        if (before > least) != (after > least):
            _keep(self.over[owner], pair, after > least)
            _keep(self.rich, owner, len(self.over[owner]) > self.capacity.extra[owner])
        placed = self.placed[index]
        if now := placed.get(pair, 0) + count:
            placed[pair] = now
        else:
            del placed[pair]  # an empty entry would become a group without blocks
        if self.is_exact:
            _keep(self.users[pair], index, now > 0)
        self._mirrored[mirror] += count
        if self.capacity.apart:
            self.at_site[index, self.capacity.site[mirror]] += count
        self.wanted[index] -= count

    # ---- without displacing anybody

    def fill(self, index: int) -> None:
        """Places as much of a demand as fits within the present reach, one transfer away at most."""
        demand = self.demands[index]
        if self.reach is not Reach.ANY:
            for owner in self.owners_in_reach(index):
                if not self.wanted[index]:
                    return
                self._fill_pairs_of(index, owner, self.mirrors_among_holders(index, owner))
            return
        for owner in self.owners_in_reach(index):
            self._fill_pairs_of(index, owner, self.capacity.partners[owner])
        if demand.owner == NOBODY:
            self._fill_beside_holders(index)

    def _fill_beside_holders(self, index: int) -> None:
        """Places what is left of a demand with owners for whom a holder may mirror it."""
        if self.capacity.has_mirrors:
            for holder in self.demands[index].holders:
                for owner in self.owners_by_partner[holder]:
                    if not self.wanted[index]:
                        return
                    self._fill_pairs_of(index, owner, (holder,))
        else:
            self._fill_anywhere(index)

    def _fill_anywhere(self, index: int) -> None:
        """Places what is left of a demand wherever there is room."""
        passed: list[int] = []
        while self.wanted[index] and self._open:
            owner = self._open[0]
            self._fill_pairs_of(index, owner, self.capacity.partners[owner])
            if self.wanted[index]:
                # Full for good, or open but not to this demand: then it stands first in the line for the next one.
                self._open.popleft()
                if self.is_open(owner):
                    passed.append(owner)
        self._open.extendleft(reversed(passed))

    def owners_in_reach(self, index: int) -> tuple[int, ...]:
        """Who may own this demand without a transfer."""
        if self.reach is Reach.STAY:
            was = self.demands[index].previous_owner
            return (was,) if was != NOBODY else ()
        if (owners := self._owners.get(index)) is None:
            owners = self._owners[index] = self.demands[index].owners
        return owners

    def _fill_pairs_of(self, index: int, owner: int, mirrors: Sequence[int]) -> None:
        """Places as much of a demand as fits with this owner and these mirrors; who mirrors least comes first."""
        if self._short[owner] > 0:
            self._fill_each(index, owner, mirrors, self.room_below)
        if self.wanted[index] and self.is_open(owner):
            self._fill_each(index, owner, mirrors, self.room_beyond)

    def _fill_each(self, index: int, owner: int, mirrors: Sequence[int], room: Callable[[Pair], int]) -> None:
        """Places as much of a demand as there is such room for."""
        if len(mirrors) > 1:
            mirrors = sorted(mirrors, key=self._mirrored.__getitem__)
        for mirror in mirrors:
            pair = (owner, mirror)
            count = min(self.wanted[index], room(pair))
            if count > 0 and (count := min(count, self.room_for(index, pair))) > 0:
                self.place(index, pair, count)
                if not self.wanted[index]:
                    return

    def mirrors_among_holders(self, index: int, owner: int) -> Sequence[int]:
        """Those partners of the owner who hold a demand; nobody where no mirrors are placed."""
        if not self.capacity.has_mirrors:
            return ALONE
        return [partner for partner in self.capacity.partners[owner] if partner in self._held[index]]

    def is_open(self, owner: int) -> bool:
        return self._short[owner] > 0 or self.room_extra(owner) > 0 or self.room_more(owner) > 0

    def finish(self, index: int) -> None:
        """Places what no flow has placed: anywhere, and if that must be unevenly."""
        if self.demands[index].owner == NOBODY:
            self._fill_anywhere(index)
        self._force(index)

    def _force(self, index: int) -> None:
        """Where sites leave no even way, further mirrors go to those who mirror least."""
        owner = self.demands[index].owner
        assert owner != NOBODY or not self.wanted[index], f"{self.wanted[index]} blocks of demand {index} have no owner"
        while self.wanted[index]:
            partners = self.capacity.partners[owner]
            mirrors = [mirror for mirror in partners if self.room_for(index, (owner, mirror)) > 0]
            self.place(index, (owner, min(mirrors, key=self._mirrored.__getitem__)), 1)

    # ---- room

    def room_for(self, index: int, pair: Pair) -> int:
        """How many blocks of this demand the pair may have, besides those that it has."""
        demand, (owner, mirror) = self.demands[index], pair
        most = demand.size
        if mirror == NOBODY:
            # Owners alone are placed, and mirrors follow. A holder that owned a whole demand would leave the other
            # holders only copies of it to mirror, and evenness would then cost transfers.
            if self.reach is Reach.STAY:
                most = demand.stays
            elif self.reach is Reach.SHARE and owner != demand.previous_owner:
                most = -(-demand.size // self.capacity.parts)
        else:
            site = self.capacity.site[mirror]
            if mirror == owner or site == self.capacity.site[owner] or site in demand.barred:
                return 0
            if self.capacity.apart:  # a site may have each block once, whichever of its workers mirrors it
                return most - self.at_site[index, site]
        return most - self.placed[index].get(pair, 0)

    def room_below(self, pair: Pair) -> int:
        """How many blocks a pair can take up to its least."""
        return self.capacity.least(*pair) - self.load[pair]

    def room_beyond(self, pair: Pair) -> int:
        """Whether it can take the one beyond."""
        free = self.room_extra(pair[0]) > 0 or self.room_more(pair[0]) > 0
        return int(free and self.may_exceed(pair))

    def room_at(self, pair: Pair) -> int:
        """How many it can take as things stand, up to its least or the one beyond."""
        below = self.room_below(pair)
        return below if below > 0 else self.room_beyond(pair)

    def may_exceed(self, pair: Pair) -> bool:
        """Whether it has its least, and one more is not too much."""
        return self.load[pair] == self.capacity.least(*pair) < self.capacity.most(*pair)

    def room_extra(self, owner: int) -> int:
        return self.capacity.extra[owner] - len(self.over[owner])

    def room_more(self, owner: int) -> int:
        """Whether this owner may have one more extra pair than others."""
        return int(self.room_extra(owner) == 0 and len(self.rich) < self.capacity.more)


_T = TypeVar("_T")


def _keep(members: dict[_T, None], member: _T, wanted: bool) -> None:
    if wanted:
        members[member] = None
    else:
        members.pop(member, None)
