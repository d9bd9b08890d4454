"""Lanes: who trains which, even to one lane, in as few aligned subtrees as can be.

A worker adds up the maximal aligned subtrees of lane numbers that it holds whole and sends one partial per subtree, so
few subtrees mean little traffic and a small stack. Lanes move without a byte, so nothing here looks at the plan before;
only a lane in flight stays with its worker. Called by planner.py. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

NONE_IN_FLIGHT = -1

Lanes = tuple[int, ...]


def share_lanes(lanes: int, flights: Sequence[int]) -> list[Lanes]:
    """The lanes of each trainer, ascending. `flights` has one entry per trainer, oldest first: its lane in flight.

    With fewer lanes than trainers the youngest without a lane in flight get none: they are standbys.
    """
    flights = _one_trainer_each(lanes, flights)
    by_right = sorted(range(len(flights)), key=lambda trainer: (flights[trainer] == NONE_IN_FLIGHT, trainer))
    training = sorted(by_right[:lanes])
    groups = _aligned_groups(lanes, len(training))
    given = _seat([flights[trainer] for trainer in training], groups)
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


def _aligned_groups(lanes: int, trainers: int) -> list[set[int]]:
    """Even shares, each cut into powers of two and laid out largest first, so that every piece is an aligned subtree.

    Within one size those who need more pieces come last, next to the smaller pieces: a ragged end joins to one subtree.
    """
    least, more = divmod(lanes, trainers)
    counts = [least + 1] * more + [least] * (trainers - more)
    groups: list[set[int]] = [set() for _ in counts]
    ends = [0] * trainers
    at = 0
    for bit in reversed(range(lanes.bit_length())):
        size = 1 << bit
        takers = [trainer for trainer, count in enumerate(counts) if count & size]
        needs_more = {trainer: counts[trainer] & (size - 1) for trainer in takers}
        for trainer in sorted(takers, key=lambda t: (needs_more[t] != 0, -ends[t] if ends[t] == at else 0, t)):
            groups[trainer].update(range(at, at + size))
            at = ends[trainer] = at + size
    return sorted(groups, key=min)


def _seat(flights: Sequence[int], groups: list[set[int]]) -> list[set[int]]:
    """Each trainer gets the group with its lane in flight; where two meet in one group, single lanes are swapped."""
    group_of = {lane: index for index, group in enumerate(groups) for lane in group}
    seats: dict[int, int] = {}
    for trainer, lane in enumerate(flights):
        if lane != NONE_IN_FLIGHT and group_of[lane] not in seats.values():
            seats[trainer] = group_of[lane]
    free = iter(sorted(set(range(len(groups))) - set(seats.values())))
    for trainer in range(len(flights)):
        if trainer not in seats:
            seats[trainer] = next(free)
    given = [set(groups[seats[trainer]]) for trainer in range(len(flights))]
    for trainer, lane in enumerate(flights):
        if lane != NONE_IN_FLIGHT and lane not in given[trainer]:
            other = next(index for index, share in enumerate(given) if lane in share)
            swapped = min(set(given[trainer]) - set(flights))
            given[trainer] ^= {lane, swapped}
            given[other] ^= {lane, swapped}
    return given
