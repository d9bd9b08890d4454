"""Seats: which coordinate a new process is to have, which processes go where a job has too many, and which joiners
have room. Pure; asked by the job machine (`phases/seating.py`, `scaling.py`, `planned_changes.py`).

A process has its coordinate for life, so what is lacking is decided when it comes, and not when a world is planned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal_protos.plan import WorkerId
from shoal_protos.shape import Shape


@dataclass(frozen=True, slots=True)
class Seated:
    """One process that has a coordinate."""

    worker: WorkerId
    coordinate: int
    host: str = ""
    has_joined: bool = True
    """Whether it has said hello; one that has not may have died while it built its model."""


def best_seat(cell: Shape, here: Iterable[Seated], host: str, wish: int = -1) -> int:
    """The coordinate with the fewest processes; before it those that complete what this host has of a part that must
    share a host, and of the others those of the part that the fewest hosts have begun: they are to complete it.
    Ties: the one that was wished for, then that with the fewest that have joined, then by number.
    """
    everywhere, joined, by_host = Counter[int](), Counter[int](), dict[str, Counter[int]]()
    for one in here:
        everywhere[one.coordinate] += 1
        joined[one.coordinate] += one.has_joined
        by_host.setdefault(one.host, Counter())[one.coordinate] += 1
    on_host = by_host.get(host, Counter[int]())
    incomplete = [place for part in cell.tight_parts for place in _lacking(part, on_host)]
    begun = dict(everywhere)
    for part in (part for part in cell.tight_parts if len(part) > 1):
        begun |= dict.fromkeys(part, sum(max(counts[place] for place in part) for counts in by_host.values()))
    places = incomplete or cell.coordinates
    return min(places, key=lambda place: (begun.get(place, 0), everywhere[place], place != wish, joined[place], place))


def _lacking(part: Sequence[int], on_host: Counter[int]) -> list[int]:
    """The coordinates of a tight part at which a host has fewer processes than at another one of it."""
    most = max(on_host[place] for place in part)
    return [place for place in part if on_host[place] < most]


def first_to_stay(
    cell: Shape, oldest_first: Sequence[Seated], cells: Sequence[Sequence[WorkerId]], wanted: int
) -> list[WorkerId]:
    """All of these in the order in which they stay: whole cells, the oldest first, as many as are wanted; then the
    others, evenly over the coordinates. `cells`: those that train now.
    """
    age = {one.worker: place for place, one in enumerate(oldest_first)}
    whole = [sorted(members, key=age.__getitem__) for members in cells if all(member in age for member in members)]
    whole.sort(key=lambda members: age[members[-1]])
    kept = [member for members in whole[: wanted // cell.processes] for member in members]
    counts, turns = Counter[int](), dict[WorkerId, int]()
    for one in oldest_first:
        if one.worker not in kept:
            turns[one.worker] = counts[one.coordinate]
            counts[one.coordinate] += 1
    return [*kept, *sorted(turns, key=lambda worker: (turns[worker], age[worker]))]


def with_room(joiners: Iterable[Seated], members: Iterable[Seated], each: int) -> list[WorkerId]:
    """Those of the joiners, in their order, with whom no coordinate has more than `each`."""
    counts = Counter(one.coordinate for one in members)
    admitted: list[WorkerId] = []
    for one in joiners:
        if counts[one.coordinate] < each:
            counts[one.coordinate] += 1
            admitted.append(one.worker)
    return admitted
