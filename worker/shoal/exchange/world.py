"""A world as one member sees it, and the number of the form in which members exchange state.

`World` is frozen: it is replaced whole when a generation begins. `PEER_FORM` covers all that goes from worker to
worker: how a group is built, tags and frames, ballots and records, digests, fills, the small state. A hello's
description says it, and the controller puts no two workers into a plan whose numbers differ: they would misread each
other, or wait for ever for what the other never sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shoal_protos.plan import Plan
from shoal_protos.runs import Runs

from shoal.core.tree import NO_LANE, first_rounds
from shoal.exchange.traffic import Traffic
from shoal.group.group import Group

PEER_FORM = 1
"""Raised as CONTRIBUTING.md, "Numbers of formats", says."""


@dataclass(frozen=True)
class World:
    plan: Plan
    rank: int
    group: Group
    traffic: Traffic

    @cached_property
    def lanes(self) -> tuple[int, ...]:
        """The lanes that this member trains; empty for a standby, and while no steps run."""
        return self.plan.lanes_of(self.rank) if self.plan.steps else ()

    @property
    def first_lanes(self) -> tuple[int, ...]:
        """The same lanes in the order of the world's first step."""
        own = (lanes[self.rank] for lanes in first_rounds(self.plan))
        return tuple(lane for lane in own if lane != NO_LANE)

    @property
    def owned(self) -> Runs:
        """The blocks that this member owns."""
        return self.plan.owned_by(self.rank)

    @property
    def kept(self) -> Runs:
        """The blocks that this member owns or mirrors."""
        return self.plan.kept_by(self.rank)

    def replays(self, boundaries: int) -> Runs:
        """The blocks that this member has as of the next vote: it updates them itself, where they are not frozen."""
        return self.traffic.held(boundaries)
