"""Missed updates: how many of them each trained parameter was not used in, and how an update is cut by that.

A parameter that no lane of a step uses is left alone: values, state and count of steps stay. Blocks count as if all of
their parameters were always used; what a parameter has missed is a number of the job, the same on all workers. Where
parameters of a bucket differ in it, the update takes the bucket in pieces. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

from shoal_protos.runs import Span

from shoal.core.layout import Bucket, Layout, numbered

MissRun = tuple[int, int, bool]
"""So many parameters that follow each other, the updates that each has missed, and whether none has used it."""


@dataclass(frozen=True, slots=True)
class Missed:
    """Of one parameter."""

    updates: int = 0
    """Those of its group that it was not used in."""
    is_new: bool = False
    """Whether it was used in none: it has no optimizer state yet."""

    def after(self, is_used: bool) -> Missed:
        """As an update leaves it."""
        if is_used and not self.is_new:
            return self
        return Missed(self.updates + (not is_used), self.is_new and not is_used)


@dataclass(frozen=True, slots=True)
class UpdatePiece:
    """Elements `[start, stop)` of a bucket that an update takes as one: all of them are used."""

    start: int
    stop: int
    missed: Missed


USED_ALWAYS = Missed()


@dataclass(frozen=True)
class Misses:
    """Of all trained parameters of the job, by number (`numbered`)."""

    of: tuple[Missed, ...]

    @cached_property
    def _are_none(self) -> bool:
        """As in most jobs."""
        return all(one == USED_ALWAYS for one in self.of)

    def after(self, layout: Layout, unused: int, turns: Sequence[bool]) -> Misses:
        """As an update leaves them. `unused`: the parameters that it left out, as bits; `turns`: by optimizer group,
        whether it was one of the group.
        """
        if not unused and (self._are_none or not any(one.is_new for one in self.of)):
            return self
        return Misses(
            tuple(
                one.after(not unused >> number & 1) if turns[group] else one
                for number, (one, group) in enumerate(zip(self.of, layout.groups, strict=True))
            )
        )

    def cuts(self, layout: Layout, unused: int) -> dict[int, tuple[UpdatePiece, ...]]:
        """By bucket the pieces that the next update takes; none of a bucket that it takes as it lies."""
        if not unused and (self._are_none or not any(one.updates for one in self.of)):
            return {}
        found = {}
        for bucket, numbers in zip(layout.buckets, layout.parameter_numbers[layout.part.coordinate], strict=True):
            used = [None if unused >> number & 1 else self._counted(number) for number in numbers]
            if any(one != USED_ALWAYS for one in used):
                found[bucket.index] = tuple(_pieces(bucket, used))
        return found

    def _counted(self, number: int) -> Missed:
        """Before a first update all are new, and there is no state that could be another's."""
        found = self.of[number]
        return found if found.updates else USED_ALWAYS

    def runs(self) -> tuple[MissRun, ...]:
        """Run-length coded; empty where no parameter has missed anything, and all have been used. Parameters that all
        differ from the one before take a run each.
        """
        if self._are_none:
            return ()
        return tuple((len([*run]), one.updates, one.is_new) for one, run in groupby(self.of))

    def by_place(self, layout: Layout) -> dict[tuple[int, str], Missed]:
        """By place of the experts, 0 for what all places have, and name."""
        every = zip(numbered(layout), self.of, strict=True)
        return {(place, slot.parameter.name): its for (_, place, slot), its in every}

    @classmethod
    def from_runs(cls, layout: Layout, runs: Iterable[Sequence[int]]) -> Misses:
        """The inverse of `runs`. Raises `ValueError` for runs that are not of so many parameters."""
        wanted, found = len(layout.groups), list[Missed]()
        for count, updates, is_new in runs:
            if count < 1 or updates < 0 or len(found) + count > wanted:
                raise ValueError(f"{count} parameters have missed {updates} updates, after {len(found)} of {wanted}")
            found += [Missed(updates, bool(is_new))] * count
        if found and len(found) != wanted:
            raise ValueError(f"the missed updates of {len(found)} parameters are there, of {wanted}")
        return cls(tuple(found) or (USED_ALWAYS,) * wanted)


def every_one(layout: Layout) -> int:
    """All parameters, as bits by their number."""
    return (1 << len(layout.groups)) - 1


def all_at(layout: Layout, coordinate: int) -> int:
    """Those of a coordinate."""
    return sum(((1 << len(numbers)) - 1) << numbers.start for numbers in layout.parameter_numbers[coordinate])


def _pieces(bucket: Bucket, used: Sequence[Missed | None]) -> Iterator[UpdatePiece]:
    """Neighbours of one kind are one piece, with the gaps behind them. None: not used.

    Worlds cut a bucket at any block, so a border within a block makes pieces of that block alone, and what lies between
    is whole blocks: a kernel gives every element the same bits wherever a world cuts.
    """
    size, starts = bucket.block_elements, [slot.start for slot in bucket.slots]
    numbered = groupby(zip(starts, used, strict=True), key=lambda one: one[1])
    runs = [(next(run)[0], missed) for missed, run in numbered]
    stops = [start for start, _ in runs[1:]] + [bucket.elements]
    for (start, missed), stop in zip(runs, stops, strict=True):
        if missed is None:
            continue
        first_whole, last_whole = -(-start // size) * size, stop // size * size
        borders = [start, first_whole, last_whole, stop] if first_whole <= last_whole else [start, stop]
        for begin, end in pairwise(borders):
            if begin < end:
                yield UpdatePiece(begin, end, missed)


def within(pieces: Iterable[UpdatePiece], start: int, stop: int) -> Iterator[tuple[Span, Missed]]:
    """What of the pieces lies in elements `[start, stop)` of their bucket, counted from `start`."""
    for piece in pieces:
        first, last = max(piece.start, start), min(piece.stop, stop)
        if first < last:
            yield (first - start, last - start), piece.missed
