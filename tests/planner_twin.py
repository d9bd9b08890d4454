"""The planner's twins: the fewest transfers that any plan can do with, found without any of the planner's ideas.

What the wishes above "few bytes" demand is written down here once more, plainly (`sound`): full copies, in as many
domains as there are, owners even to one block, the copies of one owner even to one block over its partners.
`fewest_transfers` tries everything; `cheapest_flow` is another's network simplex, for one mirror and larger worlds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

import networkx

Choice = tuple[int, ...]
"""The owner of a block, then its mirrors."""

Holders = Sequence[frozenset[int]]
"""By block."""

# ---- every possible plan


def choices(domains: list[str], mirrors: int) -> list[Choice]:
    """Every owner with every set of mirrors, in as many domains as can be."""
    workers = range(len(domains))
    all_of_them = [
        (owner, *others)
        for owner in workers
        for others in combinations([worker for worker in workers if worker != owner], mirrors)
    ]
    wanted = min(mirrors + 1, len(set(domains)))
    return [choice for choice in all_of_them if len({domains[worker] for worker in choice}) == wanted]


def sound(chosen: Counter[Choice], domains: list[str], blocks: int) -> bool:
    """Whether a count of blocks per choice meets all the wishes above "few bytes"."""
    owned, copies = Counter[int](), Counter[tuple[int, int]]()
    for (owner, *mirrors), count in chosen.items():
        owned[owner] += count
        for mirror in mirrors:
            copies[owner, mirror] += count
    workers = range(len(domains))
    if any(not blocks // len(domains) <= owned[worker] <= -(-blocks // len(domains)) for worker in workers):
        return False
    for owner in workers:
        spread = [copies[owner, other] for other in workers if _may_mirror(owner, other, domains)]
        if max(spread) - min(spread) > 1:
            return False
    return True


def _may_mirror(owner: int, other: int, domains: list[str]) -> bool:
    return owner != other and (len(set(domains)) == 1 or domains[owner] != domains[other])


def fewest_transfers(held: Holders, domains: list[str], mirrors: int) -> int:
    """Tries everything, block by block; only how many blocks have which choice matters."""
    possible = choices(domains, mirrors)
    most = -(-len(held) // len(domains))
    cost: dict[Choice, int] = {(0,) * len(possible): 0}
    for holders in held:
        further: dict[Choice, int] = {}
        for counts, so_far in cost.items():
            for index, choice in enumerate(possible):
                owned = sum(count for count, other in zip(counts, possible, strict=True) if other[0] == choice[0])
                if owned < most:
                    added = (*counts[:index], counts[index] + 1, *counts[index + 1 :])
                    total = so_far + sum(worker not in holders for worker in choice)
                    further[added] = min(total, further.get(added, total))
        cost = further
    return min(
        total
        for counts, total in cost.items()
        if sound(Counter(dict(zip(possible, counts, strict=True))), domains, len(held))
    )


# ---- a network simplex of somebody else's

FORCED = 1 << 20


def _edges(
    held: Holders, domains: list[str], partners: Sequence[Sequence[int]]
) -> Iterator[tuple[object, object, dict[str, int]]]:
    """Blocks flow from those with equal holders to pairs, to owners, to the end. What must be full pays to be so."""
    workers = range(len(domains))
    least = len(held) // len(domains)
    for owner in workers:
        mirrors = [other for other in partners[owner] if _may_mirror(owner, other, domains)]
        share = least // len(mirrors)
        for mirror in mirrors:
            for holders in set(held):
                cost = (owner not in holders) + (mirror not in holders)
                yield ("alike", holders), ("pair", owner, mirror), {"weight": cost}
            yield ("pair", owner, mirror), ("least", owner, mirror), {"capacity": share, "weight": -FORCED}
            yield ("least", owner, mirror), ("owner", owner), {"weight": 0}
            yield ("pair", owner, mirror), ("one more", owner, mirror), {"capacity": 1, "weight": 0}
            yield ("one more", owner, mirror), ("owner", owner), {"weight": 0}
        yield ("owner", owner), ("least", owner), {"capacity": least, "weight": -FORCED}
        yield ("least", owner), "end", {"weight": 0}
        yield ("owner", owner), "end", {"capacity": 1, "weight": 0}


def cheapest_flow(held: Holders, domains: list[str], partners: Sequence[Sequence[int]]) -> int:
    """`partners`: who may mirror the blocks of each worker."""
    graph = networkx.DiGraph()
    graph.add_node("end", demand=len(held))
    for holders, count in Counter(held).items():
        graph.add_node(("alike", holders), demand=-count)
    graph.add_edges_from(_edges(held, domains, partners))
    cost: int = networkx.min_cost_flow_cost(graph)
    return cost % FORCED
