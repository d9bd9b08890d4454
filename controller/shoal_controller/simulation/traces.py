"""How many machines a cloud had at which time, and which of a job's machines come and go by that.

A trace is a list of (seconds since its start, machines there), one for each change. Two formats are read: the CSV of
the papers on Bamboo and Parcae (`milliseconds,machines`) and the JSON of SkyPilot's spot traces
(`metadata.gap_seconds`, `data`). `p3.csv` has 11 hours of 32 AWS p3 spot machines, from the artifacts of
Parcae's paper (MIT licence, https://github.com/JF-D/Parcae), recorded for Bamboo (NSDI '23). `harsh` is made here; like
SkyPilot's traces it has no machine at all for two fifths of the time.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shoal_protos.errors import UserError

SHIPPED = Path(__file__).resolve().parent / "p3.csv"
HARSH_MACHINES = 16
HARSH_TICK_SECONDS = 300.0
HARSH_TICKS = 12 * 24 * 2
HARSH_GONE = 0.4
"""Part of the time without a machine."""
MOST_MACHINES = 100_000

Counts = list[tuple[float, int]]


class BadTrace(UserError):
    """A file that is no trace, or has nothing in the time that is asked for."""


@dataclass(frozen=True)
class Move:
    """A machine comes or goes."""

    at: float
    """Seconds since the window's start."""
    machine: int
    comes: bool


@dataclass(frozen=True)
class TraceWindow:
    """A part of a trace, as few machines see it."""

    first: frozenset[int]
    """The machines that are there when it starts."""
    moves: tuple[Move, ...]
    seconds: float

    def faster(self, speed: float) -> TraceWindow:
        moves = tuple(Move(move.at / speed, move.machine, move.comes) for move in self.moves)
        return TraceWindow(self.first, moves, self.seconds / speed)

    def spans(self) -> list[tuple[int, float, float]]:
        """(machine, from, to) of each time that a machine is there without a break."""
        began, found = dict.fromkeys(self.first, 0.0), []
        for move in self.moves:
            if move.comes:
                began[move.machine] = move.at
            else:
                found.append((move.machine, began.pop(move.machine), move.at))
        return found + [(machine, since, self.seconds) for machine, since in began.items()]

    def counts(self) -> Iterator[tuple[int, float]]:
        """(machines, seconds) of each time between two moves."""
        there = len(self.first)
        edges = [0.0, *(move.at for move in self.moves), self.seconds]
        for (since, until), move in zip(pairwise(edges), [*self.moves, None], strict=True):
            yield there, until - since
            there += 0 if move is None else 1 if move.comes else -1

    def mean(self) -> float:
        """Machines, over time."""
        return sum(there * seconds for there, seconds in self.counts()) / self.seconds


def read(place: Path) -> Counts:
    """The trace in a file, its last count of each time; raises `BadTrace`."""
    try:
        text = place.read_text()
        counts = _of_skypilot(text) if text.lstrip().startswith("{") else _of_lines(text)
    except OSError as error:
        raise BadTrace(f"{place}: {error.strerror}; name a file of milliseconds,machines or SkyPilot's JSON") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BadTrace(
            f"{place} is no trace ({error}): lines of milliseconds,machines were expected, or JSON with "
            "metadata.gap_seconds and data"
        ) from None
    for at, there in counts:
        if not 0 <= at < math.inf:
            raise BadTrace(f"{place} has a count at {at:g} s; expected times from 0 s on")
        if not 0 <= there <= MOST_MACHINES:
            raise BadTrace(f"{place} names {there} machines at {at:.0f} s; expected 0 to {MOST_MACHINES:,}")
    if not any(there for _, there in counts):
        raise BadTrace(f"{place} names no machine at any time")
    for (before, _), (after, _) in pairwise(counts):
        if after < before:
            raise BadTrace(f"{place} is not sorted: {after:.0f} s comes after {before:.0f} s; sort its lines by time")
    if counts[-1][0] <= 0:
        raise BadTrace(f"{place} has counts at 0 s only; expected a later one, where the trace ends")
    return list(dict(counts).items())


def _of_lines(text: str) -> Counts:
    return [(int(at) / 1000, int(there)) for at, there in (line.split(",") for line in text.split())]


def _of_skypilot(text: str) -> Counts:
    trace = json.loads(text)
    gap = float(trace["metadata"]["gap_seconds"])
    return [(number * gap, int(there)) for number, there in enumerate(trace["data"])]


def harsh(seed: int = 0) -> Counts:
    """Two days of 16 machines: hours with most of them and some moves, and hours with none, in turns."""
    drawn, counts, tick = random.Random(seed), Counts(), 0
    while tick < HARSH_TICKS:
        there, spell = drawn.randint(HARSH_MACHINES // 2, HARSH_MACHINES), drawn.randint(6, 30)
        for number in range(spell):
            there = max(1, min(HARSH_MACHINES, there + drawn.choice((-3, -1, 0, 0, 0, 1, 3))))
            counts.append(((tick + number) * HARSH_TICK_SECONDS, there))
        gone = round(spell * HARSH_GONE / (1 - HARSH_GONE))
        counts.append(((tick + spell) * HARSH_TICK_SECONDS, 0))
        tick += spell + gone
    return counts


def moves(counts: Counts, seed: int) -> list[Move]:
    """Which machine each change of the count concerns: any, as clouds reclaim them, drawn by the seed."""
    drawn, gone = random.Random(seed), list(range(max(there for _, there in counts)))  # both lists stay sorted
    there, found = list[int](), list[Move]()
    for at, wanted in counts:
        while len(there) != wanted:
            comes = len(there) < wanted
            machine = drawn.choice(gone if comes else there)
            source, target = (gone, there) if comes else (there, gone)
            del source[bisect_left(source, machine)]
            insort(target, machine)
            found.append(Move(at, machine, comes))
    return found


def window(changes: Sequence[Move], machines: int, start: float, seconds: float, least: int) -> TraceWindow:
    """What the first `machines` of a trace see from `start` on.

    A departure that would leave fewer than `least` is left out, and so is the return of that machine.
    """
    there: set[int] = set()
    first: frozenset[int] = frozenset()
    found: list[Move] = []
    for move in changes:
        if move.machine >= machines or move.at >= start + seconds:
            continue
        if move.at > start and not found:
            first = frozenset(there)
        if move.comes == (move.machine in there) or (move.at > start and not move.comes and len(there) <= least):
            continue
        (there.add if move.comes else there.discard)(move.machine)
        if move.at > start:
            found.append(Move(move.at - start, move.machine, move.comes))
    return TraceWindow(first if found else frozenset(there), tuple(found), seconds)


def scaled(counts: Counts, machines: int) -> Counts:
    """The trace of so many machines at most, where it has fewer: each of its machines then stands for several."""
    peak = max(there for _, there in counts)
    return [(at, round(there * machines / peak)) for at, there in counts] if machines > peak else counts


def repeated(counts: Counts, seconds: float) -> Counts:
    """The trace again and again, until it is so long: what comes after its last change is its first count."""
    last = counts[-1][0]
    if last <= 0:
        return counts
    return [(number * last + at, there) for number in range(int(seconds // last) + 1) for at, there in counts]


def typical(counts: Counts, machines: int, seconds: float, least: int, seed: int) -> TraceWindow:
    """The window with as many moves as the trace has on average in that time; raises `BadTrace` where none has a move.

    Looks at starts ten minutes apart that have most machines at first; of equally good ones it takes the one with all,
    whose first move comes soonest.
    """
    changes, last = moves(counts, seed), counts[-1][0]
    own = sum(move.machine < machines and move.at > 0 for move in changes)
    usual = own * min(1.0, seconds / last) if last else 0.0
    starts = range(0, max(1, int(last - seconds)), 600)
    found = [window(changes, machines, start, seconds, least) for start in starts]
    found = [one for one in found if one.moves and len(one.first) > max(least, machines // 2)]
    if not found:
        raise BadTrace(
            f"no {seconds / 3600:.1f} hours of the trace have a machine that comes or goes; take a longer window"
        )
    return min(found, key=lambda one: (abs(len(one.moves) - usual), -len(one.first), one.moves[0].at))
