"""Flow: the part of a placing that has to displace others, by the cheapest ways there are.

A minimum-cost flow by phases: label the nodes with their distance from all demands that still want a pair, then push
along shortest paths until none is left, until nobody wants anything. The graph is never written down (there may be a
million pairs): `_arcs` says where one can go from a node, as things stand. Called by owners.py and mirrors.py. Pure.
Where there are too many pairs for it (`placement.EXACT_PAIRS`) blocks take what is free when their turn comes.

    demand -> pair                     its holders own and mirror: free
    demand -> site -> pair             the same where a block must not have two copies at a site
    demand -> with a worker -> pair    one of the two is a holder: one transfer
    demand -> any -> pair              two transfers
    pair -> sink                       there is room
    pair -> demand (or its site)       one of its demands seeks another pair; what it cost is saved
    pair -> extra of its owner -> pair      the other gives up the block beyond its least
    extra -> more -> extra of another owner
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

from shoal_controller.core.planning.block_groups import NOBODY
from shoal_controller.core.planning.placement import Capacity, Demand, Pair, Placement, Reach

Node = tuple[int, int]
"""A pair `(owner, mirror)`, or one of these:"""

_DEMAND = -2  # (_DEMAND, index)
_WITH = -3  # (_WITH, worker)
_EXTRA = -4  # (_EXTRA, owner)
_SITE = -5  # (_SITE, index * count of workers + site)
_ANY = (-6, 0)
_MORE = (-7, 0)
_SINK = (-8, 0)

_TRANSFER = 1 << 32
"""A distance is `transfers * _TRANSFER + hops`: the cheapest paths first, the shortest of them."""
_ENDLESS = 1 << 62


def place_evenly(demands: Sequence[Demand], capacity: Capacity) -> list[dict[Pair, int]]:
    """Blocks of each demand by pair. What can stay stays, then what can be free is free, then the rest, the cheapest
    first.
    """
    placing = Placement(demands, capacity)
    order = sorted(range(len(demands)), key=lambda index: demands[index].previous_owner == NOBODY)
    for reach in Reach:
        if reach is Reach.SHARE and capacity.parts == 1:
            continue
        placing.reach = reach
        for index in order:
            if placing.wanted[index]:
                placing.fill(index)
        if placing.is_exact:
            Flow(placing).run()
    for index in order:
        if placing.wanted[index]:
            placing.finish(index)
    return placing.placed


class Flow:
    """One run to the end, for the placing's present reach."""

    def __init__(self, placing: Placement) -> None:
        self._placing = placing
        self._anywhere = placing.reach is Reach.ANY
        self._sites = len(placing.capacity.site)
        self._cheapest = int(self._anywhere)
        """No path costs fewer transfers than the one before: what is dearer waits until there is none that cheap."""
        self._distance: dict[Node, int] = {}
        self._came: dict[Node, Node] = {}
        self._ways: dict[Node, list[Node]] = {}

    def run(self) -> None:
        """Places all that can be placed within this reach.

        Of what is free all shortest paths are used at once. What costs a transfer has been placed but for a few blocks,
        and the graph is large: there the first path will do.
        """
        while waiting := [index for index, wanted in enumerate(self._placing.wanted) if wanted]:
            if not self._any_hope() or not self._label(waiting):
                return
            if self._anywhere:
                path = self._way_back()
                self._push(path[0][1], path)
                continue
            self._ways = {}
            for index in waiting:
                while self._placing.wanted[index] and (path := self._descend(index)):
                    self._push(index, path)

    def _any_hope(self) -> bool:
        """Spares a search of the whole graph that must fail: room is only with owners whom no demand may have."""
        placing = self._placing
        open_owners = {owner for owner in placing.capacity.workers if placing.is_open(owner)}
        return self._anywhere or any(not open_owners.isdisjoint(demand.holders) for demand in placing.demands)

    # ---- a phase

    def _label(self, waiting: list[int]) -> bool:
        """The distance of every node that may lie on a shortest path to the sink. False: there is none."""
        self._distance = distance = {(_DEMAND, index): 0 for index in waiting}
        self._came = came = {}
        haste = 2 if self._anywhere else 0  # only one path is used then: no other as short is looked for
        queue, dearer, found = deque(distance), list[Node](), _ENDLESS
        while queue or (dearer and found == _ENDLESS):
            if not queue:
                queue, dearer = deque(dearer), []
                self._cheapest += 1
            node = queue.popleft()
            reached = distance[node]
            if reached + haste >= found:
                continue
            if reached // _TRANSFER > self._cheapest:  # most of the graph, and in vain while there is a cheaper path
                dearer.append(node)
                continue
            for to, transfers in self._arcs(node):
                further = reached + transfers * _TRANSFER + 1
                if further < distance.get(to, _ENDLESS):
                    distance[to], came[to] = further, node
                    queue.append(to)
                    if to[0] >= 0 and further + 1 < found and self._placing.room_at(to) > 0:
                        found = distance[_SINK] = further + 1
                        came[_SINK] = to
        return found < _ENDLESS

    def _way_back(self) -> list[Node]:
        """The path by which the sink was found."""
        path: list[Node] = [_SINK]
        while path[-1] in self._came:
            path.append(self._came[path[-1]])
        return path[::-1]

    def _descend(self, index: int) -> list[Node]:
        """A shortest path from a demand to the sink; empty when there is none left. Never looks at a way twice."""
        path: list[Node] = [(_DEMAND, index)]
        while path and path[-1] != _SINK:
            node = path[-1]
            ways = self._ways.get(node)
            if ways is None:
                ways = self._ways[node] = self._shortest_ways(node)
            while ways and not self._capacity(node, ways[-1]):  # an earlier path of this phase has used it up
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
            # A path that comes to a pair and leaves it through a demand displaces that one's blocks: from there on it
            # is they who look for a place.
            if node[0] in (_DEMAND, _SITE):
                index = self._demand_of(node)
            if node[0] >= 0 and to[0] in (_DEMAND, _SITE):
                placing.place(self._demand_of(to), node, -count)
            elif to[0] >= 0 and (node[0] in (_DEMAND, _SITE, _WITH) or node == _ANY):
                placing.place(index, to, count)

    def _demand_of(self, node: Node) -> int:
        return node[1] if node[0] == _DEMAND else node[1] // self._sites

    def _site_of(self, index: int, mirror: int) -> Node:
        return _SITE, index * self._sites + self._placing.capacity.site[mirror]

    # ---- the graph

    def _arcs(self, node: Node) -> Iterator[tuple[Node, int]]:
        """Where one can go from a node, and the transfers that it costs."""
        kind, which = node
        if kind >= 0:
            yield from self._from_pair(node)
        elif kind == _DEMAND:
            yield from self._from_demand(which)
        elif kind == _SITE:
            yield from self._from_site(which)
        elif kind == _EXTRA:
            yield from ((pair, 0) for pair in self._placing.over[which])
            if self._placing.room_extra(which) == 0:
                yield _MORE, 0
        elif node == _MORE:
            yield from (((_EXTRA, owner), 0) for owner in self._placing.rich)
        else:
            yield from ((pair, 0) for pair in self._pairs_of_hub(node))

    def _from_pair(self, pair: Pair) -> Iterator[tuple[Node, int]]:
        if self._placing.room_at(pair) > 0:
            yield _SINK, 0
        elif self._placing.may_exceed(pair):
            yield (_EXTRA, pair[0]), 0
        apart = self._placing.capacity.apart
        for index in self._placing.users[pair]:
            to = self._site_of(index, pair[1]) if apart else (_DEMAND, index)
            yield to, -self._transfers(index, pair)

    def _from_demand(self, index: int) -> Iterator[tuple[Node, int]]:
        pairs = [pair for pair in self._pairs_in_reach(index) if self._placing.room_for(index, pair) > 0]
        if self._placing.capacity.apart:
            yield from dict.fromkeys((self._site_of(index, mirror), 0) for _, mirror in pairs)
            return
        yield from ((pair, self._transfers(index, pair)) for pair in pairs)
        demand = self._placing.demands[index]
        if self._anywhere and demand.owner == NOBODY:
            if self._placing.capacity.has_mirrors:
                yield from (((_WITH, holder), 1) for holder in demand.holders)
                yield _ANY, 2
            else:
                yield _ANY, 1

    def _from_site(self, which: int) -> Iterator[tuple[Node, int]]:
        index, site = divmod(which, self._sites)
        if self._placing.at_site[index, site]:
            yield (_DEMAND, index), 0
        for pair in self._pairs_in_reach(index):
            if self._placing.capacity.site[pair[1]] == site:
                yield pair, self._transfers(index, pair)

    def _pairs_in_reach(self, index: int) -> Iterator[Pair]:
        """The pairs that a demand may seek by itself."""
        demand, placing = self._placing.demands[index], self._placing
        anyone = demand.owner != NOBODY and self._anywhere
        for owner in placing.owners_in_reach(index):
            for mirror in placing.capacity.partners[owner] if anyone else placing.mirrors_among_holders(index, owner):
                yield owner, mirror

    def _pairs_of_hub(self, hub: Node) -> Iterator[Pair]:
        partners, site = self._placing.capacity.partners, self._placing.capacity.site
        if hub == _ANY:
            pairs = ((owner, mirror) for owner in self._placing.capacity.workers for mirror in partners[owner])
            yield from (pair for pair in pairs if pair[1] == NOBODY or site[pair[0]] != site[pair[1]])
            return
        worker = hub[1]
        yield from ((worker, partner) for partner in partners[worker] if site[partner] != site[worker])
        owners = self._placing.owners_by_partner[worker]
        yield from ((owner, worker) for owner in owners if site[owner] != site[worker])

    def _transfers(self, index: int, pair: Pair) -> int:
        owner, mirror = pair
        holders = self._placing.demands[index].holders
        return (owner not in holders) + (mirror != NOBODY and mirror not in holders)

    def _capacity(self, node: Node, to: Node) -> int:
        """How many blocks can go this way as things stand now: what `_arcs` yields has some when it is yielded."""
        placing = self._placing
        if to == _SINK:
            return placing.room_at(node)
        if to[0] == _EXTRA:
            return int(to[1] in placing.rich if node == _MORE else placing.may_exceed(node))
        if to == _MORE:
            return int(placing.room_extra(node[1]) == 0)
        if node[0] == _SITE and to[0] == _DEMAND:
            return placing.at_site[divmod(node[1], self._sites)]
        if to[0] in (_DEMAND, _SITE) and node[0] >= 0:
            return placing.placed[self._demand_of(to)].get(node, 0)
        if to[0] == _SITE:
            return placing.demands[node[1]].size - placing.at_site[divmod(to[1], self._sites)]
        if node[0] == _DEMAND and to[0] >= 0:
            return placing.room_for(node[1], to)
        if node[0] == _EXTRA:
            return int(to in placing.over[node[1]])
        return _ENDLESS
