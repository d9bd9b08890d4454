"""The order in which pieces leave where gradients are sharded: that in which buckets were last seen to fill.

A backward need not fill buckets in the order of the layout: a parameter may be used late, or in some lanes not at all,
and all that stood behind it would wait here. Nobody can add up a piece before the last lane of its round has filled it,
so the order goes by the latest time at which any lane of this world has. Times are counted in what was filled before
and agreed on in the vote: all members send and receive in one order, and nothing has to be said beside the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from shoal_protos.runs import Span
from torch import Tensor

from shoal.exchange.pieces import ExchangePiece

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
