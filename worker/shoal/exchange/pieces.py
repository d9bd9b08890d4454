"""Pieces: what is exchanged at one time, and in which order. Every owner has its part of each, so all links are busy.

A bucket is a piece; small ones of one dtype that follow each other are one together, and a large one is several, in
each of which an owner has a part of what it owns there. So the memory that a member needs for one piece is bounded for
a parameter of any size, and so is the number of messages.

Where gradients are sharded, pieces leave in the order in which buckets were last seen to fill (`PieceOrder`,
`FillTimes`): a backward may use a parameter late, or in some lanes not at all, and all that stood behind it would wait.
A piece cannot be added up before the last lane of its round has filled it, so the order goes by the latest time of any
lane in this world. Times are counted in buckets that filled before and agreed on in the vote, so all members send and
receive in one order without further messages. Element ranges only: all members come to the same pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from shoal_protos.runs import Span
from torch import Tensor

from shoal.core.cell_part import COMMON, Division
from shoal.core.layout import Bucket, Layout
from shoal.core.tree import HostSums

PIECE_BYTES = 8 << 20
"""What the partial sums of a piece may take on one member, in a world of up to 16; beyond it grows with the world."""
JOINED_BYTES = 2 << 20
"""Buckets are joined up to so much: larger ranges are better sent from where they lie, and early."""
HOST_PIECE_BYTES = 32 << 20
"""Both on one host with whole gradients: nothing waits for links, and a piece has its price, whatever it holds."""
JOINED_TO_LARGEST = 2
"""Where gradients are sharded, on one host, buckets are joined up to this multiple of the largest one, for which there
is room anyway: pieces become fewer by half.
"""
MESSAGE_BYTES = 512 << 10
"""A smaller message to each peer costs more to send than to have sent."""
IN_FLIGHT_BYTES = 16 << 20
"""What may be on its way beyond the piece that is waited for: enough for 10 Gbit/s × 13 ms."""
ALONE_BYTES = 256 << 10
"""An extent of this size is a message of its own: to copy it, here and there, costs more than one message more."""
ROW = 4_096
"""Elements; ranges are cut at multiples of it, as kernels like them."""
CACHED_ELEMENTS = 64 * ROW
"""So many of a range are added up, divided and looked at before the next: a processor's cache has them until then."""


class Extent(NamedTuple):
    """Elements `[start, stop)` of a bucket."""

    bucket: int
    start: int
    stop: int


Extents = tuple[Extent, ...]


def elements_in(extents: Sequence[Extent]) -> int:
    return sum(stop - start for _, start, stop in extents)


def cached(extents: Sequence[Extent], on_host: bool) -> Iterator[Extent]:
    """The same elements in the same order, cut where a processor computes; a device has better ways."""
    for bucket, start, stop in extents:
        size = CACHED_ELEMENTS if on_host else stop - start
        for at in range(start, stop, size):
            yield Extent(bucket, at, min(at + size, stop))


def in_messages(extents: Extents, itemsize: int) -> tuple[Extents, ...]:
    """What goes to one peer for a piece, by message: large extents alone, all small ones together at the end.

    `itemsize`: bytes of an element; the extents are of one dtype.
    """
    large = [(one,) for one in extents if is_alone(one.stop - one.start, itemsize)]
    small = tuple(one for one in extents if not is_alone(one.stop - one.start, itemsize))
    return (*large, small) if small else tuple(large)


def is_alone(elements: int, itemsize: int) -> bool:
    return elements * itemsize >= ALONE_BYTES


@dataclass(frozen=True, slots=True)
class ExchangePiece:
    """`owned`: by rank, in ascending order. It can leave once `last_bucket` is filled."""

    last_bucket: int
    bytes: int
    """What its messages take on the member that holds most of them."""
    owned: tuple[Extents, ...]
    division: Division = COMMON
    """Among which places of a cell its parameters are divided."""


class PieceLimits(NamedTuple):
    """Bytes that a piece may take on any member."""

    joined: int
    """Buckets that follow each other are joined up to so much."""
    cut: int
    """A bucket that takes more is several pieces."""
    joined_to_largest: int = 0
    """Or up to this multiple of the largest bucket, but no more than `cut`."""


def piece_limits(members: int, on_one_host: bool, by_rounds: bool) -> PieceLimits:
    """In a world of so many members. `by_rounds`: gradients are sharded."""
    least = MESSAGE_BYTES * members
    if on_one_host and not by_rounds:
        most = max(HOST_PIECE_BYTES, least)
        return PieceLimits(most, most)
    joined_to_largest = JOINED_TO_LARGEST if on_one_host else 0
    return PieceLimits(max(JOINED_BYTES, least // 4), max(PIECE_BYTES, least), joined_to_largest)


class CellSums:
    """Those of a world whose lanes are trained by cells: coordinates with the same part of the model add up together.

    `of`: by part, who adds up what of each contributor, and the ranks that have the part.
    """

    def __init__(self, of: Sequence[tuple[Sequence[HostSums], Collection[int]]]) -> None:
        self._of = of

    def most_held(self, sizes: Sequence[int], scattered: Sequence[int]) -> int:
        """As `HostSums.most_held`, on the member of any part that holds most."""
        most = 0
        for contributors, ranks in self._of:
            own = [[one * (rank in ranks) for rank, one in enumerate(of)] for of in (sizes, scattered)]
            most = max(most, *map(sum, zip(*(sums.held(*own) for sums in contributors), strict=True)))
        return most


Owned = Sequence[Sequence[Sequence[Span]]]
"""Element ranges by rank and bucket."""


def cut_into_pieces(
    layout: Layout, owned: Owned, sums: HostSums | CellSums, limits: PieceLimits, elsewhere: Sequence[Owned] = ()
) -> tuple[ExchangePiece, ...]:
    """`owned`: by whom. `sums`: who sends which partial sums of them. `elsewhere`: what members own of each other part
    of the model, which is cut as this one, by what is largest of any.

    What is common to a cell is cut alike at all its coordinates, which hand it out to each other: no piece has
    something of it and of what is divided.
    """
    pieces: list[ExchangePiece] = []
    by_bucket = [[of_rank[bucket.index] for of_rank in owned] for bucket in layout.buckets]
    sizes = [
        max(_most_bytes(bucket, [of_rank[bucket.index] for of_rank in one], sums) for one in (owned, *elsewhere))
        for bucket in layout.buckets
    ]
    largest = Counter[Division]()
    for bucket, size in zip(layout.buckets, sizes, strict=True):
        largest[bucket.division] = max(largest[bucket.division], size)
    for bucket, ranges, size in zip(layout.buckets, by_bucket, sizes, strict=True):
        most = max(limits.joined, min(limits.cut, limits.joined_to_largest * largest[bucket.division]))
        if (
            pieces
            and pieces[-1].bytes + size <= most
            and _kind(layout.buckets[pieces[-1].last_bucket]) == _kind(bucket)
        ):
            extents = (_extents(bucket, one, 0, 1) for one in ranges)
            joined = tuple(before + more for before, more in zip(pieces[-1].owned, extents, strict=True))
            pieces[-1] = ExchangePiece(bucket.index, pieces[-1].bytes + size, joined, bucket.division)
            continue
        parts = max(1, -(-size // limits.cut))
        for part in range(parts):
            extents_of = tuple(_extents(bucket, one, part, parts) for one in ranges)
            pieces.append(ExchangePiece(bucket.index, -(-size // parts), extents_of, bucket.division))
    return tuple(pieces)


def _most_bytes(bucket: Bucket, ranges: Sequence[Sequence[Span]], sums: HostSums | CellSums) -> int:
    sizes = [sum(stop - start for start, stop in spans) for spans in ranges]
    scattered = [size if len(spans) > 1 else 0 for size, spans in zip(sizes, ranges, strict=True)]
    return bucket.wide_dtype.itemsize * sums.most_held(sizes, scattered)


def _kind(bucket: Bucket) -> tuple[torch.dtype, Division, bool]:
    """A piece is of one: of what is complete only when a lane's backward is over nothing else waits with it."""
    return bucket.dtype, bucket.division, bucket.is_summed


def _extents(bucket: Bucket, spans: Sequence[Span], part: int, parts: int) -> Extents:
    """The part of an owner's ranges of a bucket that is in one of its pieces."""
    rows = sum(stop - start for start, stop in spans) // ROW
    first, last = rows * part // parts * ROW, rows * (part + 1) // parts * ROW
    found, at = [], 0
    for start, stop in spans:
        low, high = max(first, at), min(last, at + stop - start)
        if low < high:
            found.append(Extent(bucket.index, start + low - at, start + high - at))
        at += stop - start
    return tuple(found)


def windows(pieces: Sequence[ExchangePiece], in_flight: int = IN_FLIGHT_BYTES) -> tuple[int, ...]:
    """For each piece, before which one messages are posted while it is waited for: at least the next is."""
    until, stop, ahead = [], 1, 0
    for index, piece in enumerate(pieces):
        ahead -= piece.bytes if index else 0
        while stop < len(pieces) and (stop <= index + 1 or ahead + pieces[stop].bytes <= in_flight):
            ahead += pieces[stop].bytes
            stop += 1
        until.append(stop)
    return tuple(until)


@dataclass(frozen=True, slots=True)
class Backwards:
    """Pieces from the last to the first. Each tuple is in that order."""

    numbers: tuple[int, ...]
    first_buckets: tuple[int, ...]
    """The first bucket that a piece has something of."""
    last_buckets: tuple[int, ...]
    windows: tuple[int, ...]
    """As those of `windows`."""

    @classmethod
    def of(cls, pieces: Sequence[ExchangePiece]) -> Backwards:
        lasts = [piece.last_bucket for piece in pieces]
        firsts = [last if last == before else before + 1 for before, last in zip([-1, *lasts], lasts, strict=False)]
        numbers = tuple(range(len(pieces))[::-1])
        return cls(numbers, tuple(firsts[::-1]), tuple(lasts[::-1]), windows(pieces[::-1]))


def narrow_windows(pieces: Sequence[ExchangePiece]) -> tuple[int, ...]:
    """`windows` where what is on its way takes memory besides: with the piece that is waited for no more than the
    largest piece.
    """
    most, until = max(piece.bytes for piece in pieces), list[int]()
    for index, piece in enumerate(pieces):
        stop, ahead = index + 1, piece.bytes
        while stop < len(pieces) and ahead + pieces[stop].bytes <= most:
            ahead += pieces[stop].bytes
            stop += 1
        until.append(stop)
    return tuple(until)


def split(pieces: Sequence[ExchangePiece], owner: int, wanted: Sequence[Sequence[Span]]) -> dict[int, Extents]:
    """By piece, what of an owner's elements is wanted. `wanted`: element ranges by bucket, all of them the owner's."""
    found: dict[int, list[Extent]] = {}
    ranges = (Extent(bucket, *span) for bucket, spans in enumerate(wanted) for span in spans)
    rest = next(ranges, None)
    for index, extent in _in_order(pieces, owner):
        while rest is not None and rest < (extent.bucket, extent.stop):
            found.setdefault(index, []).append(Extent(extent.bucket, rest.start, min(rest.stop, extent.stop)))
            if rest.stop > extent.stop:
                rest = Extent(rest.bucket, extent.stop, rest.stop)
                break
            rest = next(ranges, None)
    assert rest is None, f"{rest} is not rank {owner}'s"
    return {index: tuple(extents) for index, extents in found.items()}


def _in_order(pieces: Sequence[ExchangePiece], owner: int) -> Iterator[tuple[int, Extent]]:
    for index, piece in enumerate(pieces):
        for extent in piece.owned[owner]:
            yield index, extent


WORD = 8
"""What stands beside it in a vote is read in such words."""
NEVER = 255
"""The time of what a lane has not filled by itself."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Buckets that share a piece, or the one bucket of several pieces: they keep together."""

    buckets: Span
    pieces: Span


def portions(pieces: Sequence[ExchangePiece]) -> list[Portion]:
    """In the layout's order."""
    found: list[Portion] = []
    for number, piece in enumerate(pieces):
        if found and found[-1].buckets[1] == piece.last_bucket + 1:
            found[-1] = Portion(found[-1].buckets, (found[-1].pieces[0], number + 1))
        else:
            first = found[-1].buckets[1] if found else 0
            found.append(Portion((first, piece.last_bucket + 1), (number, number + 1)))
    return found


@dataclass(frozen=True, slots=True)
class PieceOrder:
    """Of one step, on all members."""

    pieces: tuple[int, ...]
    """Numbers of pieces, as they leave."""
    buckets: tuple[int, ...]
    """As they are waited for."""
    places: tuple[int, ...]
    """By bucket, its place among those."""
    until: tuple[int, ...]
    """By place of a piece: it leaves once so many of the first buckets are filled."""

    @classmethod
    def of(cls, ordered: Sequence[Portion]) -> PieceOrder:
        pieces = [piece for portion in ordered for piece in range(*portion.pieces)]
        buckets = [bucket for portion in ordered for bucket in range(*portion.buckets)]
        until, filled = list[int](), 0
        for portion in ordered:
            filled += portion.buckets[1] - portion.buckets[0]
            until += [filled] * (portion.pieces[1] - portion.pieces[0])
        places = sorted(range(len(buckets)), key=buckets.__getitem__)
        return cls(tuple(pieces), tuple(buckets), tuple(places), tuple(until))


class FillTimes:
    """Of the pieces of one world: when the lanes here fill them, and the latest times of all members' lanes."""

    def __init__(self, pieces: Sequence[ExchangePiece]) -> None:
        self._portions = portions(pieces)
        self._of_bucket = [number for number, portion in enumerate(self._portions) for _ in range(*portion.buckets)]
        self._times = [0] * -(-len(self._portions) // WORD * WORD)
        """The latest of this worker's lanes, by portion; zeros fill the last word up."""
        self._agreed = self.row
        self._lacking: list[int] | None = None
        """By portion, buckets that are not filled, while a lane's backward runs."""
        self._filled = 0
        self.order = PieceOrder.of(self._portions)

    def begin_lane(self) -> None:
        """The backward begins that fills buckets for good."""
        self._lacking, self._filled = [portion.buckets[1] - portion.buckets[0] for portion in self._portions], 0

    def on_whole(self, bucket: int) -> None:
        """It has filled this one."""
        if self._lacking is None:
            return
        portion = self._of_bucket[bucket]
        self._lacking[portion] -= 1
        if not self._lacking[portion]:
            self._see(portion, min(self._filled, NEVER - 1))
            self._filled += 1

    def end_lane(self) -> None:
        """It has come to its end."""
        lacking, self._lacking = self._lacking or [], None
        for portion, count in enumerate(lacking):
            if count:
                self._see(portion, NEVER)

    def _see(self, portion: int, time: int) -> None:
        self._times[portion] = max(self._times[portion], time)

    # ---- the vote

    @property
    def row(self) -> Tensor:  # (portions, to the end of the last word) uint8
        """What this worker votes."""
        return torch.tensor(self._times, dtype=torch.uint8, device="cpu")

    def agree(
        self,
        rows: Tensor,  # (members, as many as in `row`) uint8
    ) -> None:
        """The vote has passed: the next step goes by what all have seen."""
        latest = rows.amax(0).maximum(self._agreed)
        if not latest.equal(self._agreed):
            self._agreed, times = latest, latest[: len(self._portions)].tolist()
            ordered = sorted(range(len(times)), key=lambda portion: (times[portion], portion))
            self.order = PieceOrder.of([self._portions[portion] for portion in ordered])
