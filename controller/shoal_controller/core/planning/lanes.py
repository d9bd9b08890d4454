"""Lanes: who trains which, even to one lane, in as few aligned subtrees as can be, for a worker and for a host.

A worker adds up the maximal aligned subtrees of lane numbers that it holds whole, the workers of a host those that they
hold together, and one partial is sent per subtree: so few subtrees mean little traffic and a small stack. Lanes move
without a byte, so nothing here looks at the plan before; only a lane in flight stays with its worker. Called by
planner.py. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

NONE_IN_FLIGHT = -1

Lanes = tuple[int, ...]

Crews = list[list[int]]
"""Trainers of one host, host by host."""


def share_lanes(lanes: int, flights: Sequence[int], hosts: Sequence[int] = ()) -> list[Lanes]:
    """The lanes of each trainer, ascending. `flights` has one entry per trainer, oldest first: its lane in flight.

    `hosts` has one entry per trainer too: equal numbers share a host; empty: no two do. With fewer lanes than trainers
    the youngest without a lane in flight get none: they are standbys.
    """
    flights = _one_trainer_each(lanes, flights)
    by_right = sorted(range(len(flights)), key=lambda trainer: (flights[trainer] == NONE_IN_FLIGHT, trainer))
    training = sorted(by_right[:lanes])
    given = _give(lanes, [flights[trainer] for trainer in training], _crews(training, hosts))
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
