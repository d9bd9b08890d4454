"""What travels where gradients are added up on shards: every lane's gradient to the owners, round by round.

Derived once from a world's traffic. Pure bookkeeping, as traffic.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.rounds import NO_LANE, Round, ShardTree, first_rounds, rounds, shard_tree
from shoal.exchange.pieces import Extents, narrow_windows
from shoal.exchange.traffic import Messages, Traffic


@dataclass(frozen=True, slots=True)
class RoundsTraffic:
    """One step's rounds, as one member sees them."""

    traffic: Traffic
    rounds: tuple[Round, ...]
    tree: ShardTree
    lanes_here: int
    """This member's lanes: one in each of the first rounds."""
    sends: tuple[Messages, ...]
    """By piece, what of a lane's gradient goes to whom."""
    receives: tuple[tuple[Extents, ...], ...]
    """By piece, what comes from each member with a lane in the round."""
    windows: tuple[int, ...]
    """For each piece, before which one messages are posted while it is waited for and the next is being filled."""

    @classmethod
    def of(cls, traffic: Traffic, is_first: bool) -> RoundsTraffic:
        """`is_first`: of the world's first step, in which lanes that were in flight come first."""
        plan = traffic.plan
        found = tuple(first_rounds(plan) if is_first else rounds(plan))
        sends = tuple(
            tuple((owner, extents) for owner in traffic.others for extents in traffic.messages_for(owner, piece))
            for piece in range(len(traffic.pieces))
        )
        lanes_here = sum(lanes[traffic.rank] != NO_LANE for lanes in found)
        until = narrow_windows(traffic.pieces)
        return cls(traffic, found, shard_tree(found, plan.lanes), lanes_here, sends, traffic.own_messages, until)

    def sources(self, number: int) -> list[int]:
        """The other members with a lane in a round."""
        return [peer for peer in self.traffic.others if self.rounds[number][peer] != NO_LANE]
