"""How a step's gradients come to their owners while the user's loop runs: whole or as shards, by residency.

Whole (stages 0 and 1): lanes are added up here, and what is left of them leaves with the step's last backward. Shards
(stages 2 and 3): every lane's gradient leaves with its own. Called by the training loop and by `Step.make`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from shoal.blocks.bucket_hooks import BucketHooks
from shoal.blocks.lane_sums import LaneSums
from shoal.blocks.shard_sums import ShardSums
from shoal.exchange.canonical import CanonicalReduction
from shoal.exchange.pieces import FillTimes, PieceOrder
from shoal.exchange.round_reduction import RoundReduction
from shoal.exchange.traffic import RoundsTraffic
from shoal.exchange.world import World
from shoal.training.context import TrainingContext


class Reducing(Protocol):
    """The reduction of the step at hand, as the loop drives it."""

    keeps_lanes: bool
    """Whether lanes that are done stay done when the world breaks."""

    @property
    def fill_times(self) -> FillTimes | None:
        """What of it the vote of a step carries: the same kind on all members."""

    @property
    def is_next(self) -> bool:
        """Whether gradients leave while the next backward runs."""

    def begin(self) -> None:
        """Before such a backward: receives are posted. Raises `WorldChanged`."""

    def backward(self, loss: Tensor) -> None:
        """Such a backward. Raises `WorldChanged` where the lane is void."""

    def backward_here(self, loss: Tensor) -> None:
        """Any other: nothing leaves."""

    def skip(self) -> None:
        """The micro-batch at hand has no gradient. Raises `WorldChanged`."""

    def stand_by(self) -> None:
        """A step without a lane here begins."""

    def take(self) -> CanonicalReduction | RoundReduction:
        """The reduction that the step's backwards have begun; of a standby, a new one. Raises `WorldChanged`."""

    def forget(self) -> None:
        """Another world begins."""


class WholeReducing:
    """All gradients are here until the step's last backward."""

    keeps_lanes, fill_times = True, None

    def __init__(self, context: TrainingContext, sums: LaneSums, on_reduced: Callable[[], None]) -> None:
        self._context, self._sums, self._on_reduced = context, sums, on_reduced
        self._hooks = BucketHooks(context.state.layout, context.state.parameters, sums)
        self._reduction: CanonicalReduction | None = None

    @property
    def is_next(self) -> bool:
        return self._context.loop.at_last_backward

    def begin(self) -> None:
        self._reduction = self._new()

    def _new(self) -> CanonicalReduction:
        context, world = self._context, _world(self._context)
        return CanonicalReduction(
            world.group, world.traffic, self._sums, context.boundaries, self._on_reduced, context.state.scale
        )

    def backward(self, loss: Tensor) -> None:
        """Buckets leave for their owners as soon as it has filled them, and are reduced and mirrored as soon as all
        have come.
        """
        assert self._reduction is not None
        context = self._context
        arriving = _world(context).traffic.arriving(context.boundaries)
        self._sums.begin_push(context.loop.lane)
        with self._hooks.armed(self._reduction.on_filled):
            context.loop.backward(loss, context.state, arriving)
        self._sums.end_push()

    def backward_here(self, loss: Tensor) -> None:
        with self._hooks.armed_to_take():
            self._context.loop.backward(loss, self._context.state)

    def skip(self) -> None:
        if self._context.loop.at_last_backward:
            self._sums.push(self._context.loop.lane)

    def stand_by(self) -> None:
        self._sums.live.zero()

    def take(self) -> CanonicalReduction:
        reduction, self._reduction = self._reduction or self._new(), None
        return reduction

    def forget(self) -> None:
        self._reduction = None


class ShardReducing:
    """A lane's gradient leaves bucket by bucket with the lane's last backward."""

    keeps_lanes = False

    def __init__(
        self,
        context: TrainingContext,
        sums: ShardSums,
        on_reduced: Callable[[], None],
        on_gradients: Callable[[int], None],
    ) -> None:
        self._context, self._sums, self._on_reduced = context, sums, on_reduced
        self._on_gradients = on_gradients
        self._hooks = BucketHooks(context.state.layout, context.state.parameters, sums, self._on_whole)
        self._reduction: RoundReduction | None = None
        self._rounds: tuple[World, bool, PieceOrder, RoundsTraffic] | None = None
        self._times: FillTimes | None = None

    @property
    def fill_times(self) -> FillTimes:
        """Of the world at hand."""
        if self._times is None:
            self._times = FillTimes(_world(self._context).traffic.pieces)
        return self._times

    def _on_whole(self, bucket: int) -> None:
        if self._times is not None:
            self._times.on_whole(bucket)
        self._on_gradients(bucket)

    @property
    def is_next(self) -> bool:
        return self._context.loop.at_lanes_last_backward

    def begin(self) -> None:
        """With the step's first lane; later ones go on with it."""
        if self._reduction is None:
            self._reduction = self._new()

    def _new(self) -> RoundReduction:
        context, world = self._context, _world(self._context)
        return RoundReduction(
            world.group, self._rounds_of(world), self._sums, context.boundaries, self._on_reduced,
            context.state.scale,
        )  # fmt: skip

    def _rounds_of(self, world: World) -> RoundsTraffic:
        is_first, order = self._context.is_first_step, self.fill_times.order
        known = self._rounds
        if known is None or known[0] is not world or known[1] != is_first or known[2] is not order:
            known = self._rounds = world, is_first, order, RoundsTraffic.of(world.traffic, is_first, order)
        return known[3]

    def backward(self, loss: Tensor) -> None:
        assert self._reduction is not None
        times = self.fill_times
        times.begin_lane()
        with self._hooks.armed(self._reduction.on_filled, times.order.buckets):
            self._context.loop.backward(loss, self._context.state)
        times.end_lane()
        self._reduction.end_lane()

    def backward_here(self, loss: Tensor) -> None:
        """A micro-batch of several, or of a warm-up: what that makes is thrown away bucket by bucket."""
        warming_up = self._context.loop.is_warming_up
        with self._hooks.armed(self._throw_away) if warming_up else self._hooks.armed_to_take():
            self._context.loop.backward(loss, self._context.state)

    def _throw_away(self, bucket: int) -> None:
        self._sums.live.release(bucket)

    def skip(self) -> None:
        if self.is_next:
            self.begin()
            assert self._reduction is not None
            self._reduction.end_lane()

    def stand_by(self) -> None:
        self._sums.clear()

    def take(self) -> RoundReduction:
        reduction, self._reduction = self._reduction or self._new(), None
        return reduction

    def forget(self) -> None:
        self._reduction = self._times = None


def _world(context: TrainingContext) -> World:
    assert context.world is not None
    return context.world
