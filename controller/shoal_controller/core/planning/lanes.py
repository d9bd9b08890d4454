"""Lanes: who trains which, evenly or by speed, with one of two aims. A lane in flight stays with its worker.

`share_lanes` is for whole gradients (stages 0 and 1): a worker adds up the maximal aligned subtrees of lane numbers
that it holds whole, the workers of a host those that they hold together, and one partial is sent per subtree; so few
subtrees mean little traffic and a small stack. `share_rounds` is for shards (stages 2 and 3): a lane's gradient leaves
at once, and an owner keeps what waits for its sibling; so lanes that are trained at one time should be neighbours.
Lanes move without a byte, so nothing here looks at the plan before.

By speed, a step with whole gradients is as long as the trainer that is through last; with rounds all wait for the
slowest trainer of every round, so a slow one has no lane in the last rounds. One whose first lane alone would make the
step a tenth longer has none; it trains one for nothing now and then, so that its speed stays known. Called by
planner.py.

`judge` is asked again and again with what each trainer says a lane takes. It keeps new speeds where a step would be a
tenth shorter by them for seconds and steps on end, and then not again for some steps, for longer each time that a
change is undone: neither noise nor a clock that flaps makes worlds. What is kept is durable, so that a controller that
is started again shares as before. Lanes that are even enough are shared evenly, with the least traffic. Called by the
phase running.py. docs/lanes.md, "Slow workers". Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappush, heapreplace
from statistics import median
from typing import NamedTuple

from shoal_protos.plan import WorkerId

NONE_IN_FLIGHT = -1

Lanes = tuple[int, ...]

Crews = list[list[int]]
"""Trainers of one host, host by host."""


Paces = Sequence[float]
"""Seconds that a lane takes, one per trainer, all above 0; empty: lanes are shared evenly."""


def share_lanes(
    lanes: int, flights: Sequence[int], hosts: Sequence[int] = (), paces: Paces = (), least: int = 0
) -> list[Lanes]:
    """The lanes of each trainer, ascending. `flights` has one entry per trainer, oldest first: its lane in flight.

    `hosts` has one entry per trainer too: equal numbers share a host; empty: no two do. With fewer lanes than trainers
    the youngest without a lane in flight get none: they are standbys. By speed each other one gets `least` at least, 0
    or 1, and one with a lane in flight that lane.
    """
    return _share(lanes, flights, hosts, paces, least, rounds=False)


def share_rounds(
    lanes: int, flights: Sequence[int], hosts: Sequence[int] = (), paces: Paces = (), least: int = 0
) -> list[Lanes]:
    """As `share_lanes`, but the trainers' i-th lanes are consecutive lanes: round i. Only the last round may be short,
    and by speed the last ones are of the fast trainers alone; there a lane in flight stays where its round allows.

    After a round the lanes from 0 to some n are done, and as many whole subtrees wait as n has binary digits 1. Where
    the number of lanes has at most two such digits no rounds leave fewer, else none leave fewer by more than its other
    digits: disjoint subtrees have powers of two of lanes, but for one that ends with the last lane of all.
    """
    return _share(lanes, flights, hosts, paces, least, rounds=True)


def _share(
    lanes: int, flights: Sequence[int], hosts: Sequence[int], paces: Paces, least: int, rounds: bool
) -> list[Lanes]:
    flights = _one_trainer_each(lanes, flights)
    by_right = sorted(range(len(flights)), key=lambda trainer: (flights[trainer] == NONE_IN_FLIGHT, trainer))
    training = sorted(by_right[:lanes])
    if paces and not least:
        fast = _fast_enough(lanes, [paces[trainer] for trainer in training], rounds)
        training = [
            one for one, is_fast in zip(training, fast, strict=True) if is_fast or flights[one] != NONE_IN_FLIGHT
        ]
    known = [paces[trainer] for trainer in training] if paces else ()
    give = _give_rounds if rounds else _give
    given = give(lanes, [flights[trainer] for trainer in training], _crews(training, hosts), known)
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


def _give_rounds(lanes: int, flights: Sequence[int], crews: Crews, paces: Paces) -> list[set[int]]:
    """Whoever has a lane of a round in flight keeps it; the others get the rest of the round in one order.

    A host's trainers stand together in it, of these the ones with a lane in flight: in the first step after a loss they
    are a round behind the others, and the lanes that they lack should be neighbours too.
    """
    line = [trainer for crew in crews for trainer in sorted(crew, key=lambda t: flights[t] == NONE_IN_FLIGHT)]
    groups: list[set[int]] = [set() for _ in flights]
    start = 0
    for members in _rounds_by_speed(lanes, paces) if paces else [frozenset(line)] * -(-lanes // len(line)):
        here = [trainer for trainer in line if trainer in members]
        stop = min(start + len(here), lanes)
        keeps = {flights[trainer]: trainer for trainer in here if start <= flights[trainer] < stop}
        keepers = set(keeps.values())
        others = (trainer for trainer in here if trainer not in keepers)
        for lane in range(start, stop):
            groups[keeps[lane] if lane in keeps else next(others)].add(lane)
        start = stop
    return groups


def _rounds_by_speed(lanes: int, paces: Paces) -> list[frozenset[int]]:
    """The trainers of each round: all in the first ones, then the fastest alone, as many as make the step shortest."""
    order = sorted(range(len(paces)), key=lambda trainer: (paces[trainer], trainer))
    ascending = [paces[trainer] for trainer in order]
    whole, fast = _shortest_rounds(lanes, ascending, least=1)
    further, rest = divmod(lanes - whole * len(order), fast)
    rounds = [frozenset(order)] * whole + [frozenset(order[:fast])] * further
    return [*rounds, frozenset(order[:rest])] if rest else rounds


def _shortest_rounds(lanes: int, ascending: Paces, least: int) -> tuple[int, int]:
    """How many rounds all train, `least` at least, and how many of the fastest the others: the shortest step."""
    best = (float("inf"), 0, 0)
    for whole in range(least, lanes // len(ascending) + 1):
        left = lanes - whole * len(ascending)
        for fast in range(1, len(ascending) + 1):
            further, rest = divmod(left, fast)
            seconds = whole * ascending[-1] + further * ascending[fast - 1] + (ascending[rest - 1] if rest else 0.0)
            best = min(best, (seconds, -whole, -fast))
    return -best[1], -best[2]


# ---- few subtrees


def _give(lanes: int, flights: Sequence[int], crews: Crews, paces: Paces) -> list[set[int]]:
    """To each crew the lanes of whole subtrees, and of these to its trainers."""
    by_speed = _counts_beside_each_other(lanes, paces) if paces else []
    counts = [[by_speed[trainer] for trainer in crew] for crew in crews] if paces else _even_counts(lanes, crews)
    groups: list[set[int]] = [set() for _ in flights]
    for crew, line in _match([sum(of_crew) for of_crew in counts], crews, flights, lanes):
        parts = sorted(_lay_out(counts[crew], sorted(line)), key=min)
        seated = _seat([flights[t] for t in crews[crew]], parts, counts[crew] if paces else ())
        for trainer, part in zip(crews[crew], seated, strict=True):
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


def _seat(flights: Sequence[int], groups: list[set[int]], counts: Sequence[int]) -> list[set[int]]:
    """Each trainer gets the group with its lane in flight, as far as there is one that is free. `counts`: how many
    lanes each is to have; empty: it may be any group.
    """

    def fits(trainer: int, group: int) -> bool:
        return not counts or counts[trainer] == len(groups[group])

    group_of = {lane: index for index, group in enumerate(groups) for lane in group}
    seats: dict[int, int] = {}
    for trainer, lane in enumerate(flights):
        if lane in group_of and group_of[lane] not in seats.values() and fits(trainer, group_of[lane]):
            seats[trainer] = group_of[lane]
    free = sorted(set(range(len(groups))) - set(seats.values()))
    for trainer in range(len(flights)):
        if trainer not in seats:
            seats[trainer] = next(group for group in free if fits(trainer, group))
            free.remove(seats[trainer])
    return [groups[seats[trainer]] for trainer in range(len(flights))]


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


# ---- by speed


def counts_by_speed(lanes: int, paces: Paces, rounds: bool, least: int = 0) -> list[int]:
    """Return how many lanes each trainer is to have, so that a step is as short as can be; `least` at least, 0 or 1,
    and none only where a single one would make it a tenth longer. `lanes` are as many as `paces` at least; `rounds` as
    for `share_rounds`.
    """
    fast = [True] * len(paces) if least else _fast_enough(lanes, paces, rounds)
    counts = iter(_counts_of_all(lanes, [pace for pace, is_fast in zip(paces, fast, strict=True) if is_fast], rounds))
    return [next(counts) if is_fast else 0 for is_fast in fast]


def _fast_enough(lanes: int, paces: Paces, rounds: bool) -> list[bool]:
    """Whether each is to have any lane: all are, unless a step is a tenth shorter with none for the slowest."""
    order = sorted(range(len(paces)), key=lambda trainer: (paces[trainer], trainer))
    ascending = [paces[trainer] for trainer in order]
    if rounds:
        whole, fast = _shortest_rounds(lanes, ascending, least=0)
        count = len(order) if whole else fast
    else:
        count = _reached_beside_each_other(lanes, ascending)
    some = _counts_of_all(lanes, ascending[:count], rounds)
    seconds = seconds_of_step(some, ascending[:count], rounds)
    if seconds > (1 - GAIN) * seconds_of_step(_counts_of_all(lanes, ascending, rounds), ascending, rounds):
        count = len(order)
    fast_ones = set(order[:count])
    return [trainer in fast_ones for trainer in range(len(paces))]


def _reached_beside_each_other(lanes: int, ascending: Paces) -> int:
    """How many of the fastest come to a lane where lane after lane goes to the trainer that would be through first."""
    ends, reached = [(ascending[0], 0)], 0
    for _ in range(lanes):
        end, trainer = ends[0]
        heapreplace(ends, (end + ascending[trainer], trainer))
        if trainer == reached:
            reached += 1
            if reached < len(ascending):
                heappush(ends, (ascending[reached], reached))
    return reached


def _counts_of_all(lanes: int, paces: Paces, rounds: bool) -> list[int]:
    """Return how many lanes each trainer is to have, one at least."""
    if not rounds:
        return _counts_beside_each_other(lanes, paces)
    counts = [0] * len(paces)
    for members in _rounds_by_speed(lanes, paces):
        for trainer in members:
            counts[trainer] += 1
    return counts


def _counts_beside_each_other(lanes: int, paces: Paces) -> list[int]:
    """Lane after lane goes to the trainer that would be through with it first; so the last one is done early."""
    counts = [1] * len(paces)
    ends = [(2 * pace, trainer) for trainer, pace in enumerate(paces)]
    heapify(ends)
    for _ in range(lanes - len(paces)):
        _, trainer = ends[0]
        counts[trainer] += 1
        heapreplace(ends, ((counts[trainer] + 1) * paces[trainer], trainer))
    return counts


def seconds_of_step(counts: Sequence[int], paces: Paces, rounds: bool) -> float:
    """Return how long the lanes of a step take where the trainers have so many, in seconds."""
    if not rounds:
        return max(count * pace for count, pace in zip(counts, paces, strict=True))
    seconds, behind = 0.0, 0
    for pace, count in sorted(zip(paces, counts, strict=True), reverse=True):
        seconds += max(0, count - behind) * pace
        behind = max(behind, count)
    return seconds


# ---- whether another sharing is worth it, and since when


GAIN = 0.1
"""By this part at least a step has to become shorter."""
LEAST_GAIN_SECONDS = 0.01
"""And by so many seconds: of shorter lanes a good part is the system's own noise."""
PATIENCE_SECONDS, PATIENCE_STEPS = 3.0, 5
"""For how long it has to be so without a break, both."""
LEAST_PAUSE, LONGEST_PAUSE = 20, 1000
"""Steps between two changes: doubled where one is undone soon."""
SOON = 200
"""Steps within which a change counts as undone, or twice the pause where that is longer."""


@dataclass(frozen=True, slots=True)
class LaneSharing:
    """By what lanes are shared: a part of what is durable of a job."""

    seconds: Mapping[WorkerId, float] = field(default_factory=dict)
    """What a lane took on each worker when the sharing was chosen; empty: lanes are shared evenly."""
    usual: float = 0.0
    """The median of these: what somebody who has come since is taken for."""
    changed_at: int = 0
    """The step at which it was last chosen."""
    pause_steps: int = LEAST_PAUSE
    """For so many steps from then on it stays."""
    more: tuple[WorkerId, ...] = ()
    """Who got lanes by the last choice."""
    fewer: tuple[WorkerId, ...] = ()
    """Who lost lanes by it."""
    replaced_at: float | None = None
    """When a slow worker was last drained for another one."""


EVENLY = LaneSharing()


class MeasuredTrainer(NamedTuple):
    """A worker that could have lanes, or a cell of them."""

    workers: tuple[WorkerId, ...]
    """The slowest first."""
    lanes: int
    seconds: float
    """What a lane takes, measured without waits: of the slowest member."""


class Look(NamedTuple):
    """The trainers of a world at a moment."""

    now: float
    """Time in seconds."""
    step: int
    lanes: int
    rounds: bool
    """Whether gradients are added up round by round."""
    trainers: Sequence[MeasuredTrainer]

    @property
    def seconds_now(self) -> float:
        """How long the lanes of a step take."""
        return self.seconds_with([one.lanes for one in self.trainers])

    def seconds_with(self, counts: Sequence[int]) -> float:
        """How long they would take with other numbers of lanes."""
        return seconds_of_step(counts, [one.seconds for one in self.trainers], self.rounds)

    @property
    def best(self) -> list[int]:
        """How many lanes each would have at best. A cell has some at least: nobody trains one for nothing there."""
        least = int(any(len(one.workers) > 1 for one in self.trainers))
        return counts_by_speed(self.lanes, [one.seconds for one in self.trainers], self.rounds, least)

    @property
    def has_recovered(self) -> bool:
        """Whether somebody without lanes is about as fast as those with some: among many a step gains little by it."""
        usual = median(one.seconds for one in self.trainers if one.lanes)
        gains = [one for one, count in zip(self.trainers, self.best, strict=True) if count and not one.lanes]
        return any((1 - GAIN) * one.seconds <= usual for one in gains)

    @property
    def longest_evenly(self) -> float:
        """How long they take at most with even lanes, any trainers having the odd ones."""
        return -(-self.lanes // len(self.trainers)) * max(one.seconds for one in self.trainers)


class Since(NamedTuple):
    """When another sharing was first seen to be worth it, without a break since."""

    time: float
    step: int


def judge(sharing: LaneSharing, since: Since | None, look: Look) -> tuple[LaneSharing, Since | None]:
    """Return the sharing from now on, the same object where nothing is to change, and since when another one would be
    worth it; None: it would not.
    """
    best, seconds_now = look.best, look.seconds_now
    is_shorter = look.seconds_with(best) <= min((1 - GAIN) * seconds_now, seconds_now - LEAST_GAIN_SECONDS)
    if not (is_shorter or look.has_recovered):
        return sharing, None
    since = since if since is not None and since.step <= look.step else Since(look.now, look.step)
    changed_at = min(sharing.changed_at, look.step)  # the job may have gone back
    is_long = look.now - since.time >= PATIENCE_SECONDS and look.step - since.step >= PATIENCE_STEPS
    if not is_long or (sharing.changed_at and look.step - changed_at < sharing.pause_steps):
        return sharing, since
    return _chosen(sharing, look, best), None


def _chosen(sharing: LaneSharing, look: Look, best: Sequence[int]) -> LaneSharing:
    changes = [(one.workers, count - one.lanes) for one, count in zip(look.trainers, best, strict=True)]
    more = tuple(worker for workers, change in changes if change > 0 for worker in workers)
    fewer = tuple(worker for workers, change in changes if change < 0 for worker in workers)
    is_undone = not {*more}.isdisjoint(sharing.fewer) or not {*fewer}.isdisjoint(sharing.more)
    is_soon = look.step - sharing.changed_at <= max(SOON, 2 * sharing.pause_steps)
    pause = min(LONGEST_PAUSE, 2 * sharing.pause_steps) if is_undone and is_soon else LEAST_PAUSE
    seconds = {worker: one.seconds for one in look.trainers for worker in one.workers}
    if (1 - GAIN) * look.longest_evenly <= look.seconds_with(best):
        seconds = {}
    return replace(
        sharing, seconds=seconds, usual=median(seconds.values()) if seconds else 0.0, changed_at=max(1, look.step),
        pause_steps=pause, more=more, fewer=fewer,
    )  # fmt: skip


def without(sharing: LaneSharing, here: frozenset[WorkerId]) -> LaneSharing:
    """Return the sharing without the speeds of workers that are gone, the same object where none is. Those who are left
    may be of one speed.
    """
    left = {worker: seconds for worker, seconds in sharing.seconds.items() if worker in here}
    if len(left) == len(sharing.seconds):
        return sharing
    if not left or min(left.values()) >= (1 - GAIN) * max(left.values()):
        return replace(sharing, seconds={}, usual=0.0)
    return replace(sharing, seconds=left, usual=median(left.values()))
