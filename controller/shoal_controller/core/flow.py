"""Flow: the part of a placing that has to displace others, by the cheapest ways there are.

A minimum-cost flow by phases: label the nodes with their distance from all parcels that still want a pair, then push
along shortest paths until none is left, until nobody wants anything. The graph is never written down (there may be a
million pairs): `_arcs` says where one can go from a node, as things stand. Called by placing.py. Pure.

    parcel -> pair                     its holders own and mirror: free
    parcel -> site -> pair             the same where a block must not have two copies at a site
    parcel -> with a worker -> pair    one of the two is a holder: one transfer
    parcel -> any -> pair              two transfers
    pair -> sink                       up to its least
    pair -> extra of its owner -> sink, or -> more -> sink    one beyond, if the owner may have one
    pair -> parcel (or its site)       one of its parcels seeks another pair; what it cost is saved
    extra -> pair, more -> extra       another gives up the one beyond
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING

from shoal_controller.core.lots import NOBODY

if TYPE_CHECKING:
    from shoal_controller.core.placing import Pair, Placing

Node = tuple[int, int]
"""A pair `(owner, mirror)`, or one of these:"""

_PARCEL = -2  # (_PARCEL, index)
_WITH = -3  # (_WITH, worker)
_EXTRA = -4  # (_EXTRA, owner)
_SITE = -5  # (_SITE, index * count of workers + site)
_ANY = (-6, 0)
_MORE = (-7, 0)
_SINK = (-8, 0)

_TRANSFER = 1 << 32
"""A distance is `transfers * _TRANSFER + hops`: the cheapest paths first, the shortest of them."""
_ENDLESS = 1 << 62


class Reach(Enum):
    """Which pairs a parcel may seek."""

    STAY = 0
    """The owner before, and a holder as mirror."""
    SHARE = 1
    """Two holders; nobody gets more than a fair share of one parcel (see `Room.parts`)."""
    FREE = 2
    """Two holders."""
    ANY = 3


class Flow:
    """One run to the end, for the placing's present reach."""

    def __init__(self, placing: Placing) -> None:
        self._placing = placing
        self._anywhere = placing.reach is Reach.ANY
        self._sites = len(placing.room.site)
        self._cheapest = int(self._anywhere)
        """No path costs fewer transfers than the one before: the first that cheap is among the shortest."""
        self._distance: dict[Node, int] = {}
        self._ways: dict[Node, list[Node]] = {}

    def run(self) -> None:
        """Places all that can be placed within this reach."""
        while waiting := [index for index, wanted in enumerate(self._placing.wanted) if wanted]:
            if not self._any_hope() or not self._label(waiting):
                return
            self._ways = {}
            for index in waiting:
                while self._placing.wanted[index] and (path := self._descend(index)):
                    self._push(index, path)

    def _any_hope(self) -> bool:
        """Spares a search of the whole graph that must fail: room is only with owners whom no parcel may have."""
        placing = self._placing
        open_owners = {owner for owner in placing.room.workers if placing.is_open(owner)}
        return self._anywhere or any(not open_owners.isdisjoint(parcel.holders) for parcel in placing.parcels)

    # ---- a phase

    def _label(self, waiting: list[int]) -> bool:
        """The distance of every node that may lie on a shortest path to the sink. False: there is none."""
        self._distance = distance = {(_PARCEL, index): 0 for index in waiting}
        queue = deque(distance)
        while queue:
            node = queue.popleft()
            reached, found = distance[node], distance.get(_SINK, _ENDLESS)
            if node == _SINK or (reached >= found and found // _TRANSFER <= self._cheapest):
                continue
            for to, transfers in self._arcs(node):
                further = reached + transfers * _TRANSFER + 1
                if further < distance.get(to, _ENDLESS):
                    distance[to] = further
                    queue.append(to)
        self._cheapest = distance.get(_SINK, 0) // _TRANSFER
        return _SINK in distance

    def _descend(self, index: int) -> list[Node]:
        """A shortest path from a parcel to the sink; empty when there is none left. Never looks at a way twice."""
        path: list[Node] = [(_PARCEL, index)]
        while path and path[-1] != _SINK:
            node = path[-1]
            ways = self._ways.get(node)
            if ways is None:
                ways = self._ways[node] = self._shortest_ways(node)
            while ways and not self._capacity(node, ways[-1]):
                ways.pop()
            if ways:
                path.append(ways[-1])
            else:
                path.pop()
                if path:
                    self._ways[path[-1]].pop()
        return path

    def _shortest_ways(self, node: Node) -> list[Node]:
        here = self._distance[node]
        ways = [
            to for to, transfers in self._arcs(node)
            if self._distance.get(to) == here + transfers * _TRANSFER + 1
        ]  # fmt: skip
        return ways[::-1]

    def _push(self, index: int, path: list[Node]) -> None:
        """Moves as many blocks along a path as it takes."""
        placing = self._placing
        steps = list(pairwise(path))
        count = min([placing.wanted[index], *(self._capacity(node, to) for node, to in steps)])
        for node, to in steps:
            if node[0] in (_PARCEL, _SITE):
                index = self._parcel_of(node)
            if node[0] >= 0 and to[0] in (_PARCEL, _SITE):
                placing.place(self._parcel_of(to), node, -count)
            elif to[0] >= 0 and (node[0] in (_PARCEL, _SITE, _WITH) or node == _ANY):
                placing.place(index, to, count)

    def _parcel_of(self, node: Node) -> int:
        return node[1] if node[0] == _PARCEL else node[1] // self._sites

    def _site_of(self, index: int, mirror: int) -> Node:
        return _SITE, index * self._sites + self._placing.room.site[mirror]

    # ---- the graph

    def _arcs(self, node: Node) -> Iterator[tuple[Node, int]]:
        """Where one can go from a node, and the transfers that it costs."""
        kind, which = node
        if kind >= 0:
            yield from self._from_pair(node)
        elif kind == _PARCEL:
            yield from self._from_parcel(which)
        elif kind == _SITE:
            yield from self._from_site(which)
        elif kind == _EXTRA:
            if self._placing.room_extra(which) > 0:
                yield _SINK, 0
            if self._placing.room_extra(which) == 0:
                yield _MORE, 0
            yield from ((pair, 0) for pair in self._placing.over[which])
        elif node == _MORE:
            if len(self._placing.rich) < self._placing.room.more:
                yield _SINK, 0
            yield from (((_EXTRA, owner), 0) for owner in self._placing.rich)
        else:
            yield from ((pair, 0) for pair in self._pairs_of_hub(node))

    def _from_pair(self, pair: Pair) -> Iterator[tuple[Node, int]]:
        below = self._placing.room_below(pair)
        if below > 0:
            yield _SINK, 0
        if self._placing.may_exceed(pair):
            yield (_EXTRA, pair[0]), 0
        apart = self._placing.room.apart
        for index in self._placing.users[pair]:
            to = self._site_of(index, pair[1]) if apart else (_PARCEL, index)
            yield to, -self._transfers(index, pair)

    def _from_parcel(self, index: int) -> Iterator[tuple[Node, int]]:
        pairs = [pair for pair in self._pairs_in_reach(index) if self._placing.room_of_parcel(index, pair) > 0]
        if self._placing.room.apart:
            yield from dict.fromkeys((self._site_of(index, mirror), 0) for _, mirror in pairs)
            return
        yield from ((pair, self._transfers(index, pair)) for pair in pairs)
        parcel = self._placing.parcels[index]
        if self._anywhere and parcel.owner == NOBODY:
            if self._placing.room.mirrors[0] == NOBODY:
                yield _ANY, 1
            else:
                yield from (((_WITH, holder), 1) for holder in parcel.holders)
                yield _ANY, 2

    def _from_site(self, which: int) -> Iterator[tuple[Node, int]]:
        index, site = divmod(which, self._sites)
        if self._placing.at_site[index, site]:
            yield (_PARCEL, index), 0
        for pair in self._pairs_in_reach(index):
            if self._placing.room.site[pair[1]] == site:
                yield pair, self._transfers(index, pair)

    def _pairs_in_reach(self, index: int) -> Iterator[Pair]:
        """The pairs that a parcel may seek by itself."""
        parcel, mirrors = self._placing.parcels[index], self._placing.room.mirrors
        everyone = mirrors[0] == NOBODY or (parcel.owner != NOBODY and self._anywhere)
        for owner in self._placing.owners_in_reach(index):
            for mirror in mirrors if everyone else parcel.holders:
                yield owner, mirror

    def _pairs_of_hub(self, hub: Node) -> Iterator[Pair]:
        room = self._placing.room
        if hub == _ANY:
            pairs = ((owner, mirror) for owner in room.workers for mirror in room.mirrors)
            yield from (pair for pair in pairs if pair[1] == NOBODY or room.site[pair[0]] != room.site[pair[1]])
            return
        worker = hub[1]
        for other in room.workers:
            if room.site[other] != room.site[worker]:
                yield worker, other
                yield other, worker

    def _transfers(self, index: int, pair: Pair) -> int:
        owner, mirror = pair
        holders = self._placing.parcels[index].holders
        return (owner not in holders) + (mirror != NOBODY and mirror not in holders)

    def _capacity(self, node: Node, to: Node) -> int:
        """How many blocks can go this way as things stand now: what `_arcs` yields has some when it is yielded."""
        placing = self._placing
        if to == _SINK:
            if node == _MORE:
                return placing.room.more - len(placing.rich)
            return placing.room_extra(node[1]) if node[0] == _EXTRA else placing.room_below(node)
        if to[0] == _EXTRA:
            return int(to[1] in placing.rich if node == _MORE else placing.may_exceed(node))
        if to == _MORE:
            return int(placing.room_extra(node[1]) == 0)
        if node[0] == _SITE and to[0] == _PARCEL:
            return placing.at_site[divmod(node[1], self._sites)]
        if to[0] in (_PARCEL, _SITE) and node[0] >= 0:
            return placing.placed[self._parcel_of(to)].get(node, 0)
        if to[0] == _SITE:
            return placing.parcels[node[1]].count - placing.at_site[divmod(to[1], self._sites)]
        if node[0] == _PARCEL and to[0] >= 0:
            return placing.room_of_parcel(node[1], to)
        if node[0] == _EXTRA:
            return int(to in placing.over[node[1]])
        return _ENDLESS
