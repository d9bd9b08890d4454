"""Placing: divides alike blocks among workers evenly, moving as few of them as can be.

A minimum-cost flow by shortest augmenting paths over an implicit graph: parcels (alike blocks) want places at workers;
a place at a worker that holds the blocks already is free, any other costs one transfer. Workers have room, a few of
them for one more than the rest; `limit` bounds what one worker takes of one group; a block never gets two places at one
site. Used by owners.py (a place is ownership) and mirrors.py (a place is a copy). Knows nothing of plans. Pure.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class Parcel:
    """Alike blocks, each of which wants `copies` places at different sites."""

    count: int
    homes: tuple[int, ...]
    """Workers where a place is free."""
    group: int = -1
    """Whose copies these are: limits are per group and worker."""
    barred: frozenset[int] = frozenset()
    """Sites where no place may be."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a placing keeps to. Lists are indexed by worker."""

    workers: Sequence[int]
    """Who takes places."""
    least: Sequence[int]
    """How many places each takes at least, and, but for the spare ones, at most."""
    spare: int
    """How many workers take one more than their least."""
    copies: int
    site: Sequence[int]
    limit: Callable[[int, int], int] = field(default=lambda _group, _worker: NO_LIMIT)
    """How many places of a group one worker takes at most."""


Node = tuple[int, int, int]
"""A node of the search: `(kind, a, b)`, see the kinds."""

_PARCEL = 0
"""Parcel `a` seeks a place anywhere."""
_AT_SITE = 1
"""Parcel `a` gave up a place at site `b` and seeks another there, or anywhere."""
_FULL = 2
"""Worker `a` has no room: it must give up a place of anybody."""
_LIMITED = 3
"""Worker `a` is at the limit of group `b`: it must give up a place of that group."""
_HAS_ROOM = 4
"""Worker `a` has room: the end of a path."""

_NOTHING, _LIMITS, _ROOMS = range(3)
"""What has been waived because the rules cannot be met together."""


class Placing:
    """The work of one division. `placed[parcel][worker]` is the outcome of `run`."""

    def __init__(self, parcels: Sequence[Parcel], rules: Rules) -> None:
        self.parcels = parcels
        self.rules = rules
        self.placed: list[dict[int, int]] = [{} for _ in parcels]
        self._wanted = [parcel.count * rules.copies for parcel in parcels]
        self._load = [0] * len(rules.least)
        self._spare = rules.spare
        self._of_group: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._at_site: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._users: list[dict[int, None]] = [{} for _ in rules.least]
        self._members: defaultdict[int, list[int]] = defaultdict(list)
        for worker in rules.workers:
            self._members[rules.site[worker]].append(worker)
        self._cheapest = 0
        self._waived = _NOTHING

    def run(self) -> list[dict[int, int]]:
        """First all that is free, then the rest, each the cheapest way."""
        for index, parcel in enumerate(self.parcels):
            self._share_out(index, parcel.homes)
        self._reroute_to_homes()
        self._share_out_rest()
        for index in range(len(self.parcels)):
            while self._wanted[index]:
                self._augment(index)
        return self.placed

    def place(self, index: int, worker: int, count: int) -> None:
        """Gives (or, with a negative count, takes back) places of a parcel at a worker."""
        placed, least = self.placed[index], self.rules.least[worker]
        before = self._load[worker]
        self._load[worker] = before + count
        self._spare -= max(before + count - least, 0) - max(before - least, 0)
        placed[worker] = placed.get(worker, 0) + count
        if placed[worker]:
            self._users[worker][index] = None
        else:
            del placed[worker], self._users[worker][index]
        self._of_group[self.parcels[index].group, worker] += count
        self._at_site[index, self.rules.site[worker]] += count
        self._wanted[index] -= count

    # ---- what is left

    def _room(self, worker: int) -> int:
        """How many more places this worker can take."""
        if self._waived >= _ROOMS:
            return NO_LIMIT
        left = self.rules.least[worker] - self._load[worker]
        return left + 1 if self._spare > 0 and left >= 0 else max(left, 0)

    def _room_at_site(self, index: int, site: int) -> int:
        parcel = self.parcels[index]
        return 0 if site in parcel.barred else parcel.count - self._at_site[index, site]

    def _room_in_group(self, group: int, worker: int) -> int:
        if self._waived >= _LIMITS:
            return NO_LIMIT
        return self.rules.limit(group, worker) - self._of_group[group, worker]

    def _fits(self, index: int, worker: int) -> int:
        at_site = self._room_at_site(index, self.rules.site[worker])
        return min(at_site, self._room(worker), self._room_in_group(self.parcels[index].group, worker))

    # ---- without displacing anybody

    def _share_out(self, index: int, workers: Sequence[int]) -> None:
        """Places as much of a parcel as fits at these workers: evenly, the emptiest first."""
        order = sorted(workers, key=self._room, reverse=True) if len(workers) > 1 else workers
        for shares in (range(len(order), 0, -1), [1] * len(order)):
            for among, worker in zip(shares, order, strict=True):
                if not self._wanted[index]:
                    return
                count = min(-(-self._wanted[index] // among), self._fits(index, worker))
                if count > 0:
                    self.place(index, worker, count)

    def _share_out_rest(self) -> None:
        """Places what is left where that costs a transfer: evenly, the emptiest first."""
        heap = [(-self._room(worker), worker) for worker in self.rules.workers if self._room(worker)]
        heapify(heap)
        for index, wanted in enumerate(self._wanted):
            seen: list[int] = []
            while wanted and heap:
                _, worker = heappop(heap)
                count = min(-(-wanted // (len(heap) + 1)), self._fits(index, worker))
                if count > 0:
                    self.place(index, worker, count)
                    wanted -= count
                seen.append(worker)
            for worker in seen:
                if room := self._room(worker):
                    heappush(heap, (-room, worker))

    # ---- by displacing others

    def _reroute_to_homes(self) -> None:
        """Finds a free place for all that can have one. What a failed search has seen leads nowhere ever after."""
        dead: set[Node] = set()
        for index in range(len(self.parcels)):
            while self._wanted[index] and (_PARCEL, index, 0) not in dead:
                search = _Search(index)
                end = self._find_room(search, lambda parcel: self.parcels[parcel].homes, dead)
                if end is None:
                    dead |= search.distance.keys()
                else:
                    self._follow(search, end)
        self._cheapest = 1

    def _augment(self, index: int) -> None:
        """Places some of a parcel the cheapest way; where there is none, waives the least important rule left."""
        search = _Search(index)
        end = self._find_room(search, lambda _parcel: self.rules.workers, set())
        if end is not None:
            self._cheapest = max(self._cheapest, search.distance[end])
            self._follow(search, end)
        else:
            assert self._waived < _ROOMS, f"parcel {index} has {self._wanted[index]} blocks without a place"
            self._waived += 1

    def _find_room(self, search: _Search, reach: Callable[[int], Sequence[int]], dead: set[Node]) -> Node | None:
        """The cheapest end of a path. Later paths are never cheaper than earlier ones: the first that cheap will do."""
        queue = deque([search.start])
        best: Node | None = None
        while queue:
            node = queue.popleft()
            reached = search.distance[node]
            for arc in self._arcs(node, reach):
                distance = reached + (0 if self._waived else arc.cost)
                if arc.to in dead or distance >= search.distance.get(arc.to, NO_LIMIT):
                    continue
                search.distance[arc.to] = distance
                search.came[arc.to] = node, arc.capacity
                if arc.to[0] != _HAS_ROOM:
                    queue.append(arc.to)
                elif distance <= self._cheapest:
                    return arc.to
                elif best is None or distance < search.distance[best]:
                    best = arc.to
        return best

    def _arcs(self, node: Node, reach: Callable[[int], Sequence[int]]) -> Iterator[Arc]:
        kind, first, second = node
        if kind == _PARCEL:
            for worker in reach(first):
                room = self._room_at_site(first, self.rules.site[worker])
                if room > 0:
                    yield self._seek(first, worker, room)
        elif kind == _AT_SITE:
            yield Arc((_PARCEL, first, 0), 0, NO_LIMIT)
            neighbours = self._members[second]
            if len(neighbours) > 1:
                yield from (self._seek(first, worker, NO_LIMIT) for worker in reach(first) if worker in neighbours)
        elif kind == _LIMITED:
            yield from (self._displace(user, first) for user in self._users[first]
                        if self.parcels[user].group == second)  # fmt: skip
        else:
            yield from (self._displace(user, first) for user in self._users[first])
            if self._load[first] == self.rules.least[first]:
                yield from (Arc((_FULL, other, 0), 0, 1) for other in self.rules.workers
                            if self._load[other] > self.rules.least[other])  # fmt: skip

    def _seek(self, index: int, worker: int, at_site: int) -> Arc:
        """A parcel wants a place at this worker."""
        parcel = self.parcels[index]
        cost = 0 if worker in parcel.homes else 1
        in_group = self._room_in_group(parcel.group, worker)
        if in_group <= 0:
            return Arc((_LIMITED, worker, parcel.group), cost, at_site)
        room = self._room(worker)
        if room <= 0:
            return Arc((_FULL, worker, 0), cost, min(at_site, in_group))
        return Arc((_HAS_ROOM, worker, 0), cost, min(at_site, in_group, room))

    def _displace(self, index: int, worker: int) -> Arc:
        """A parcel gives up places at this worker."""
        cost = 0 if worker in self.parcels[index].homes else -1
        return Arc((_AT_SITE, index, self.rules.site[worker]), cost, self.placed[index][worker])

    def _follow(self, search: _Search, end: Node) -> None:
        """Carries out a path, for as many blocks as it has capacity."""
        path = search.path(end)
        count = min([self._wanted[search.index], *(capacity for _, _, capacity in path)])
        for node, to, _ in path:
            if node[0] in (_PARCEL, _AT_SITE) and to[0] != _PARCEL:
                self.place(node[1], to[1], count)
            elif to[0] == _AT_SITE:
                self.place(to[1], node[1], -count)


@dataclass(frozen=True, slots=True)
class Arc:
    to: Node
    cost: int
    """Transfers that it adds."""
    capacity: int


class _Search:
    """One search for room for a parcel."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.start: Node = (_PARCEL, index, 0)
        self.distance: dict[Node, int] = {self.start: 0}
        self.came: dict[Node, tuple[Node, int]] = {}

    def path(self, end: Node) -> list[tuple[Node, Node, int]]:
        """The arcs from the end back to the start, each with its capacity."""
        arcs: list[tuple[Node, Node, int]] = []
        while end != self.start:
            node, capacity = self.came[end]
            arcs.append((node, end, capacity))
            end = node
        return arcs
