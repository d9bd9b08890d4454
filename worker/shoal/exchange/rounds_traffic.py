"""What travels where gradients are added up on shards: every lane's gradient to the owners, round by round.

Derived once from a world's traffic. Pure bookkeeping, as traffic.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.rounds import NO_LANE, Round, ShardTree, first_rounds, rounds, shard_tree
from shoal.exchange.piece_order import PieceOrder
from shoal.exchange.pieces import Extents, narrow_windows, windows
from shoal.exchange.traffic import Messages, Traffic


@dataclass(frozen=True, slots=True)
class RoundsTraffic:
    """One step's rounds, as one member sees them."""

    traffic: Traffic
    order: PieceOrder
    rounds: tuple[Round, ...]
    tree: ShardTree
    lanes_here: int
    """This member's lanes: one in each of the first rounds."""
    sends: tuple[Messages, ...]
    """By piece, what of a lane's gradient goes to whom."""
    receives: tuple[tuple[Extents, ...], ...]
    """By piece, what comes from each member with a lane in the round."""
    windows: tuple[int, ...]
    """By a piece's place in the order, before which place messages are posted while it is waited for."""
    narrow_windows: tuple[int, ...]
    """The same where the next one is being filled here."""

    @classmethod
    def of(cls, traffic: Traffic, is_first: bool, order: PieceOrder) -> RoundsTraffic:
        """`is_first`: of the world's first step, in which lanes that were in flight come first."""
        plan = traffic.plan
        found = tuple(first_rounds(plan) if is_first else rounds(plan))
        sends = tuple(
            tuple((owner, extents) for owner in traffic.others for extents in traffic.messages_for(owner, piece))
            for piece in range(len(traffic.pieces))
        )
        lanes_here = sum(lanes[traffic.rank] != NO_LANE for lanes in found)
        pieces = [traffic.pieces[piece] for piece in order.pieces]
        return cls(
            traffic, order, found, shard_tree(found, plan.lanes), lanes_here, sends, traffic.own_messages,
            windows(pieces), narrow_windows(pieces),
        )  # fmt: skip

    def sources(self, number: int) -> list[int]:
        """The other members with a lane in a round."""
        return [peer for peer in self.traffic.others if self.rounds[number][peer] != NO_LANE]
