"""The hand-out: owners send updated parameters to members that do not replay the block, piece by piece; all to joiners.

The last piece comes first: a forward begins with the parameters of the last buckets. Posted only after the vote has
passed: a hand-out received early would tear the parameters of a step that is run again. What is updated leaves while
the rest is updated, and what has come can be used while the rest comes.
"""

from __future__ import annotations

import torch
from shoal_protos.activity import StepPhase

from shoal.blocks.values import RangeValues
from shoal.exchange.packing import PackedReceive, Posted, send_packed
from shoal.exchange.traffic import HANDED, PieceTraffic, Traffic
from shoal.group.group import Group, WorldChanged

POISON = False
"""Set by tests: where anything comes it is NaN before."""


class HandOut:
    """One hand-out: made before the update, which calls `on_updated`; then `bring`, as often as needed, or `finish`.

    `flow`: what is handed out, of this traffic.
    """

    def __init__(
        self,
        group: Group,
        parameters: RangeValues,
        traffic: Traffic,
        flow: PieceTraffic,
    ) -> None:
        self._group, self._parameters, self._flow = group, parameters, flow
        self._order, self._pieces = traffic.backwards, len(traffic.pieces)
        self._receives: list[list[PackedReceive]] = []
        self._sends: list[list[Posted]] = []
        self._here = 0
        """So many of the pieces, in that order, are here, and have left."""
        self._broken = False
        self.bytes = 0
        """Received so far."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing comes to this member, and nothing leaves it."""
        return not (any(self._flow.sends) or any(self._flow.receives))

    @property
    def coming(self) -> frozenset[int]:
        """The buckets of which something comes from others."""
        return self._flow.coming

    def on_updated(self, bucket: int) -> None:
        """This bucket and those after it are updated: they leave, but for the last piece. `finish` raises."""
        try:
            while not self._broken and self._is_updated(len(self._sends), bucket):
                self._post()
        except WorldChanged:
            self._broken = True

    def _is_updated(self, at: int, bucket: int) -> bool:
        """Not the last piece: nobody is through with a step while an owner is not, whose `on_step` would be lost with
        it.
        """
        early = min(self._order.windows[0], self._pieces - 1)
        return at < early and self._order.first_buckets[at] >= bucket

    def _post(self) -> None:
        """The next piece."""
        piece = self._order.numbers[len(self._sends)]
        for _, extents in self._flow.receives[piece] if POISON else ():
            for extent in extents:
                self._parameters.range(*extent).fill_(torch.nan)
        self._receives.append(
            [
                PackedReceive(self._group, peer, HANDED, self._parameters, extents)
                for peer, extents in self._flow.receives[piece]
            ]
        )
        self._sends.append(
            [
                send_packed(self._group, peer, HANDED, self._parameters, extents)
                for peer, extents in self._flow.sends[piece]
            ]
        )

    def begin(self) -> None:
        """All is updated: what the window allows is on its way. Raises `WorldChanged`."""
        self._check()
        until = self._pieces if self.is_over else self._order.windows[self._here]
        while len(self._sends) < until:
            self._post()

    def _check(self) -> None:
        if self._broken:
            raise WorldChanged("the group broke while the update ran")

    def is_here(self, bucket: int) -> bool:
        """Whether all of it has come."""
        return self.is_over or self._order.last_buckets[self._here] < bucket

    @property
    def is_over(self) -> bool:
        """Whether all that this member receives is in place, and all that it sends has left."""
        return self._here == self._pieces

    def bring(self, bucket: int) -> None:
        """Returns when all of this bucket is in place. Raises `WorldChanged`."""
        while not self.is_here(bucket):
            self._finish_next()

    def finish(self) -> int:
        """Returns when all that this member receives is in place and all that it sends has left: the bytes received.

        Raises `WorldChanged`.
        """
        self._check()
        while not self.is_over:
            self._finish_next()
        self._group.progress.reach(StepPhase.HAND_OUT, self._pieces)
        return self.bytes

    def _finish_next(self) -> None:
        self.begin()
        at = self._here
        self._group.progress.reach(StepPhase.HAND_OUT, at)
        receives, sends = self._receives[at], self._sends[at]
        self._group.wait([one.work for one in receives] + [work for work, _ in sends])
        for one in receives:
            one.unpack()
        self.bytes += sum(one.bytes for one in receives)
        self._receives[at], self._sends[at] = [], []
        self._here += 1
