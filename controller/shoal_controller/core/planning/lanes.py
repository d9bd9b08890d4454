"""Lanes: who trains which, even to one lane, with one of two aims. A lane in flight stays with its worker.

`share_lanes` is for whole gradients (stages 0 and 1): a worker adds up the maximal aligned subtrees of lane numbers
that it holds whole, the workers of a host those that they hold together, and one partial is sent per subtree; so few
subtrees mean little traffic and a small stack. `share_rounds` is for shards (stages 2 and 3): a lane's gradient leaves
at once, and an owner keeps what waits for its sibling; so lanes that are trained at one time should be neighbours.
Lanes move without a byte, so nothing here looks at the plan before. Called by planner.py. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

NONE_IN_FLIGHT = -1

Lanes = tuple[int, ...]

Crews = list[list[int]]
"""Trainers of one host, host by host."""


def share_lanes(lanes: int, flights: Sequence[int], hosts: Sequence[int] = ()) -> list[Lanes]:
    """The lanes of each trainer, ascending. `flights` has one entry per trainer, oldest first: its lane in flight.

    `hosts` has one entry per trainer too: equal numbers share a host; empty: no two do. With fewer lanes than trainers
    the youngest without a lane in flight get none: they are standbys.
    """
    return _share(lanes, flights, hosts, _give)


def share_rounds(lanes: int, flights: Sequence[int], hosts: Sequence[int] = ()) -> list[Lanes]:
    """As `share_lanes`, but the trainers' i-th lanes are consecutive lanes: round i. Only the last round may be short.

    After a round the lanes from 0 to some n are done, and as many whole subtrees wait as n has binary digits 1. Where
    the number of lanes has at most two such digits no rounds leave fewer, else none leave fewer by more than its other
    digits: disjoint subtrees have powers of two of lanes, but for one that ends with the last lane of all.
    """
    return _share(lanes, flights, hosts, _give_rounds)


Give = Callable[[int, Sequence[int], Crews], list[set[int]]]
"""Lanes, the lane in flight of each trainer, the trainers host by host → each one's lanes."""


def _share(lanes: int, flights: Sequence[int], hosts: Sequence[int], give: Give) -> list[Lanes]:
    flights = _one_trainer_each(lanes, flights)
    by_right = sorted(range(len(flights)), key=lambda trainer: (flights[trainer] == NONE_IN_FLIGHT, trainer))
    training = sorted(by_right[:lanes])
    given = give(lanes, [flights[trainer] for trainer in training], _crews(training, hosts))
    shares: list[Lanes] = [()] * len(flights)
    for trainer, share in zip(training, given, strict=True):
        shares[trainer] = tuple(sorted(share))
    return shares


def _one_trainer_each(lanes: int, flights: Sequence[int]) -> list[int]:
    """A lane that two say to have in flight is the older one's."""
    seen: set[int] = set()
    kept: list[int] = []
    for lane in flights:
        good = 0 <= lane < lanes and lane not in seen
        kept.append(lane if good else NONE_IN_FLIGHT)
        seen.add(lane)
    return kept


def _crews(training: Sequence[int], hosts: Sequence[int]) -> Crews:
    """Trainers are numbered among themselves. All are one crew where each would be one of its own, or all are one."""
    by_host: dict[int, list[int]] = {}
    for number, trainer in enumerate(training):
        by_host.setdefault(hosts[trainer] if hosts else 0, []).append(number)
    return list(by_host.values()) if len(by_host) < len(training) else [list(range(len(training)))]


# ---- rounds


def _give_rounds(lanes: int, flights: Sequence[int], crews: Crews) -> list[set[int]]:
    """Whoever has a lane of a round in flight keeps it; the others get the rest of the round in one order.

    A host's trainers stand together in it, of these the ones with a lane in flight: in the first step after a loss they
    are a round behind the others, and the lanes that they lack should be neighbours too.
    """
    line = [trainer for crew in crews for trainer in sorted(crew, key=lambda t: flights[t] == NONE_IN_FLIGHT)]
    groups: list[set[int]] = [set() for _ in flights]
    for start in range(0, lanes, len(line)):
        stop = min(start + len(line), lanes)
        keeps = {flights[trainer]: trainer for trainer in line if start <= flights[trainer] < stop}
        keepers = set(keeps.values())
        others = (trainer for trainer in line if trainer not in keepers)
        for lane in range(start, stop):
            groups[keeps[lane] if lane in keeps else next(others)].add(lane)
    return groups


# ---- few subtrees


def _give(lanes: int, flights: Sequence[int], crews: Crews) -> list[set[int]]:
    """To each crew the lanes of whole subtrees, and of these to its trainers."""
    counts = _even_counts(lanes, crews)
    groups: list[set[int]] = [set() for _ in flights]
    for crew, line in _match([sum(of_crew) for of_crew in counts], crews, flights, lanes):
        parts = sorted(_lay_out(counts[crew], sorted(line)), key=min)
        for trainer, part in zip(crews[crew], _seat([flights[t] for t in crews[crew]], parts), strict=True):
            groups[trainer] = part
    return _swap(flights, groups)


def _even_counts(lanes: int, crews: Crews) -> list[list[int]]:
    """How many lanes each trainer gets, by crew. The odd ones go where a crew's lanes then are the fewest subtrees."""
    least, more = divmod(lanes, sum(map(len, crews)))
    extra = [0] * len(crews)
    for _ in range(more):
        totals = [least * len(crew) + also for crew, also in zip(crews, extra, strict=True)]
        open_crews = [index for index, crew in enumerate(crews) if extra[index] < len(crew)]
        extra[min(open_crews, key=lambda c: (totals[c] + 1).bit_count() - totals[c].bit_count())] += 1
    return [[least + (n < also) for n in range(len(crew))] for crew, also in zip(crews, extra, strict=True)]


def _match(totals: Sequence[int], crews: Crews, flights: Sequence[int], lanes: int) -> list[tuple[int, set[int]]]:
    """Each crew with its lanes: of those with equally many the one that has most of them in flight."""
    waiting = dict.fromkeys(range(len(crews)))
    matched = []
    for line in sorted(_lay_out(totals, range(lanes)), key=min):
        fitting = [crew for crew in waiting if totals[crew] == len(line)]
        crew = max(fitting, key=lambda crew: sum(flights[trainer] in line for trainer in crews[crew]))
        del waiting[crew]
        matched.append((crew, line))
    return matched


def _lay_out(counts: Sequence[int], line: Sequence[int]) -> list[set[int]]:
    """Shares of a line of lanes, each cut into powers of two and laid out largest first, so that every piece is an
    aligned subtree wherever the line's own pieces are, and lie in the same way.

    Within one size those who need more pieces come last, next to the smaller pieces: a ragged end joins to one subtree.
    """
    groups: list[set[int]] = [set() for _ in counts]
    ends = [0] * len(counts)
    at = 0
    for bit in reversed(range(len(line).bit_length())):
        size = 1 << bit
        takers = [taker for taker, count in enumerate(counts) if count & size]
        needs_more = {taker: counts[taker] & (size - 1) for taker in takers}
        for taker in sorted(takers, key=lambda t: (needs_more[t] != 0, -ends[t] if ends[t] == at else 0, t)):
            groups[taker].update(line[at : at + size])
            at = ends[taker] = at + size
    return groups


def _seat(flights: Sequence[int], groups: list[set[int]]) -> list[set[int]]:
    """Each trainer gets the group with its lane in flight, as far as there is one that is free."""
    group_of = {lane: index for index, group in enumerate(groups) for lane in group}
    seats: dict[int, int] = {}
    for trainer, lane in enumerate(flights):
        if lane in group_of and group_of[lane] not in seats.values():
            seats[trainer] = group_of[lane]
    free = iter(sorted(set(range(len(groups))) - set(seats.values())))
    return [groups[seats[trainer] if trainer in seats else next(free)] for trainer in range(len(flights))]


def _swap(flights: Sequence[int], given: list[set[int]]) -> list[set[int]]:
    """A lane in flight that another got is swapped for one that is not."""
    flying = set(flights)
    for trainer, lane in enumerate(flights):
        if lane != NONE_IN_FLIGHT and lane not in given[trainer]:
            other = next(index for index, share in enumerate(given) if lane in share)
            swapped = min(given[trainer], key=lambda mine: (mine in flying, mine))
            given[trainer] ^= {lane, swapped}
            given[other] ^= {lane, swapped}
    return given
