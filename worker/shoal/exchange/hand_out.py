"""The hand-out: owners send updated parameters to whoever does not replay the block, piece by piece.

Posted only after the vote has passed: a hand-out received early would tear the parameters of a step that is run again.
What is updated leaves while the rest is updated.
"""

from __future__ import annotations

from shoal_protos.activity import StepPhase

from shoal.blocks.values import RangeValues
from shoal.exchange.packing import PackedReceive, Posted, send_packed
from shoal.exchange.traffic import HANDED, PieceTraffic, Traffic
from shoal.group.group import Group, WorldChanged


class HandOut:
    """One hand-out: made before the update, which calls `on_updated`; then `finish`.

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
        self._pieces, self._windows = traffic.pieces, traffic.windows
        self._receives: list[list[PackedReceive]] = []
        self._sends: list[list[Posted]] = []
        self._broken = False

    def on_updated(self, bucket: int) -> None:
        """This bucket and those before it are updated: they leave, but for the last piece. `finish` raises."""
        try:
            while not self._broken and self._is_updated(len(self._sends), bucket):
                self._post()
        except WorldChanged:
            self._broken = True

    def _is_updated(self, piece: int, bucket: int) -> bool:
        """Not the last piece: nobody is through with a step while an owner is not, whose `on_step` would be lost with
        it.
        """
        early = min(self._windows[0], len(self._pieces) - 1)
        return piece < early and self._pieces[piece].last_bucket <= bucket

    def _post(self) -> None:
        """The next piece."""
        piece = len(self._sends)
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

    def finish(self) -> int:
        """Returns when all that this member receives is in place and all that it sends has left: the bytes received.

        Raises `WorldChanged`.
        """
        if self._broken:
            raise WorldChanged("the group broke while the update ran")
        received = 0
        for piece, until in enumerate(self._windows):
            while len(self._sends) < until:
                self._post()
            self._group.progress.reach(StepPhase.HAND_OUT, piece)
            receives, sends = self._receives[piece], self._sends[piece]
            self._group.wait([one.work for one in receives] + [work for work, _ in sends])
            for one in receives:
                one.unpack()
            received += sum(one.bytes for one in receives)
            self._receives[piece], self._sends[piece] = [], []
        self._group.progress.reach(StepPhase.HAND_OUT, len(self._windows))
        return received
