"""What a worker's training thread does, as its heartbeats tell it: the controller's progress watch judges by this.

A wait in a group has an end only when the peer does its part, so whoever knows where all members stand knows which
connections are broken. Pure: standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from shoal_protos.plan import WorkerId

MOST_NAMED = 64
"""Peers that one activity names."""


LANES_BEGIN = 1 << 40
"""`Activity.bucket` in the phase of lanes from where members exchange what lanes have summed up."""


class StepPhase(IntEnum):
    """Where a member stands between two votes, in the order of a step (docs/architecture.md, "A step")."""

    BUILDING = 0
    """The group is being built."""
    BUILT = 1
    """It is kept until its world begins."""
    CATCHING_UP = 2
    """A world made from inventories: what is stale is handed out."""
    LANES = 3
    """In the user's code; `bucket` counts how far it has come."""
    REDUCTION = 4
    FILLS = 5
    BUFFERS = 6
    SENDS = 7
    """The slices sent after the last commit must have left."""
    VOTE = 8
    HAND_OUT = 9

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class Activity:
    """What a worker does in one group: the one that it trains in, or one that it builds or keeps for a plan."""

    generation: int = 0
    boundary: int = 0
    """Votes passed in the world, and 1; 0: before the world begins."""
    phase: StepPhase = StepPhase.BUILDING
    bucket: int = 0
    waits_for: tuple[WorkerId, ...] = ()
    """Empty in the group that it trains in: it is in the user's code."""
    seconds: float = 0.0
    """Since when it stands there, or since a message or a piece of one from those it waits for was last complete."""
    slowest_piece_seconds: float = 0.0
    """The longest time that a piece of a message (at most 4 MiB) took after the one before it."""

    @property
    def position(self) -> tuple[int, int, int, int]:
        """It only grows."""
        return self.generation, self.boundary, self.phase, self.bucket
