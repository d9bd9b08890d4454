"""The hand-out: owners send updated parameters to whoever does not replay the block, piece by piece.

Posted only after the vote has passed: a hand-out received early would tear the parameters of a step that is run again.
"""

from __future__ import annotations

from shoal_protos.activity import StepPhase

from shoal.blocks.flat import Flats
from shoal.exchange.packing import PackedReceive, Posted, send_packed
from shoal.exchange.traffic import HANDED, PieceTraffic, Traffic
from shoal.group.group import Group


def hand_out(
    group: Group,
    parameters: Flats,  # per bucket (elements,) of its dtype
    traffic: Traffic,
    flow: PieceTraffic,
) -> int:
    """Returns when all that this member receives is in place and all that it sends has left: the bytes received.

    `flow`: what is handed out, of this traffic.
    """
    receives: list[list[PackedReceive]] = []
    sends: list[list[Posted]] = []
    received = 0
    for piece, until in enumerate(traffic.windows):
        while len(sends) < until:
            messages = flow.receives[len(sends)]
            receives.append([PackedReceive(group, peer, HANDED, parameters, extents) for peer, extents in messages])
            messages = flow.sends[len(sends)]
            sends.append([send_packed(group, peer, HANDED, parameters, extents) for peer, extents in messages])
        group.progress.reach(StepPhase.HAND_OUT, piece)
        group.wait([one.work for one in receives[piece]] + [work for work, _ in sends[piece]])
        for one in receives[piece]:
            one.unpack()
        received += sum(one.bytes for one in receives[piece])
        receives[piece], sends[piece] = [], []
    group.progress.reach(StepPhase.HAND_OUT, len(traffic.windows))
    return received
