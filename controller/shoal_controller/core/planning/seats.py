"""Seats: which coordinate a new process is to have, which processes go where a job has too many, and which joiners
have room. Pure; asked by the job machine (`phases/seating.py`, `scaling.py`, `planned_changes.py`).

A process has its coordinate for life, so what is lacking is decided when it comes, and not when a world is planned.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

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


def with_room(cell: Shape, joiners: Iterable[Seated], members: Sequence[Seated], each: int) -> list[WorkerId]:
    """Those of the joiners with whom no coordinate has more than `each`: first those that a tight part lacks on its
    host, all in their order. `members`: the oldest first.
    """
    joiners = list(joiners)
    chosen = _in_tight_parts(cell, members, joiners, each)
    counts = Counter(one.coordinate for one in members)
    admitted: list[WorkerId] = []
    for one in sorted(joiners, key=lambda one: one not in chosen):
        if counts[one.coordinate] < each:
            counts[one.coordinate] += 1
            admitted.append(one.worker)
    return admitted


def first_to_give_way(
    cell: Shape, joiners: Sequence[Seated], members: Sequence[Seated], each: int
) -> tuple[Seated, Seated] | None:
    """A joiner that a tight part lacks on its host and for whom its coordinate has no room, and the member there that
    is in no such part; None where there is no such joiner. `members`: those that are to stay longest first.
    """
    chosen = _in_tight_parts(cell, members, joiners, each)
    counts = Counter(one.coordinate for one in members)
    kept_out = (one for one in joiners if one in chosen and counts[one.coordinate] >= each)
    joiner = next(kept_out, None)
    others = (one for one in reversed(members) if one not in chosen)
    member = next((one for one in others if joiner is not None and one.coordinate == joiner.coordinate), None)
    return (joiner, member) if joiner is not None and member is not None else None


def _in_tight_parts(
    cell: Shape, members: Iterable[Seated], joiners: Collection[Seated], each: int
) -> frozenset[Seated]:
    """Those that make up tight parts, each on one host: as many of every part as all can have, `each` at most, and of
    those with the fewest joiners. Of no coordinate where none must share a host.
    """
    by_place: dict[tuple[int, str], list[Seated]] = defaultdict(list)
    for one in chain(members, joiners):
        by_place[one.coordinate, one.host].append(one)
    hosts = dict.fromkeys(host for _, host in by_place)
    new = frozenset(joiners)
    made: list[list[tuple[Seated, ...]]] = []
    for part in (part for part in cell.tight_parts if len(part) > 1):
        lines = ([by_place.get((place, host), []) for place in part] for host in hosts)
        groups = chain.from_iterable(zip(*of_host, strict=False) for of_host in lines)
        made.append(sorted(groups, key=lambda group: len(new.intersection(group))))
    most = min([each, *map(len, made)])
    return frozenset(chain.from_iterable(group for groups in made for group in groups[:most]))
