"""How a step's gradients come to their owners while the user's loop runs: whole or as shards, by residency.

Whole (stages 0 and 1): lanes are added up here, and what is left of them leaves with the step's last backward. Shards
(stages 2 and 3): every lane's gradient leaves with its own. Called by the training loop and by `Step.make`.

`BucketHooks` tells which buckets a backward has filled, so that they leave for their owners while it still runs: one
hook per parameter, armed for one backward at a time. Buckets become ready in one order only, that in which every worker
sends and receives: the layout's, or one that was agreed on. Gradients that autograd does not add up where they leave
from are taken from their parameters there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import takewhile
from typing import Protocol
from weakref import ReferenceType, ref

from shoal_protos.errors import UserError
from torch import nn

from shoal.blocks.flat import refuse_hooks
from shoal.blocks.lane_sums import LaneSums
from shoal.blocks.shard_sums import ShardSums
from shoal.core.layout import Layout
from shoal.exchange.canonical import CanonicalReduction
from shoal.exchange.pieces import Extent, FillTimes, PieceOrder
from shoal.exchange.round_reduction import RoundReduction
from shoal.exchange.traffic import RoundsTraffic
from shoal.exchange.world import World
from shoal.training.context import TrainingContext
from shoal.training.equal_gradients import EqualGradients

OWN_HOOKS = 1
"""On each parameter's accumulated gradient: the one that is made here."""


Backward = Callable[[Iterable[Extent]], None]
"""What makes a backward, or all of a lane's in a pipeline, given where the reduction may write to from then on."""


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

    def backward(self, make: Backward) -> None:
        """Such a backward. Raises `WorldChanged` where the lane is void."""

    def backward_here(self, make: Backward) -> None:
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

    fill_times = None

    def __init__(self, context: TrainingContext, sums: LaneSums, on_reduced: Callable[[], None]) -> None:
        self._context, self._sums, self._on_reduced = context, sums, on_reduced
        self._hooks = BucketHooks(context.state.layout, context.state.parameters, sums)
        self._early = [bucket.index for bucket in context.state.layout.buckets if not bucket.is_summed]
        """The first buckets, which can leave while a backward runs: what is added up over a cell comes later."""
        self._reduction: CanonicalReduction | None = None
        self.keeps_lanes = context.hub is None  # members of a cell may be at different places in a lane
        self._equal = _over_cell(context, sums)

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

    def backward(self, make: Backward) -> None:
        """Buckets leave for their owners as soon as it has filled them, and are reduced and mirrored as soon as all
        have come.
        """
        assert self._reduction is not None
        context = self._context
        arriving = _world(context).traffic.arriving(context.boundaries)
        self._sums.begin_push(context.loop.lane)
        with self._hooks.armed(_noted(self._equal, self._sums, self._reduction.on_filled), self._early):
            make(arriving)
        if self._equal is not None:
            self._equal.end_lane(self._sums.live.made)
        self._sums.end_push()

    def backward_here(self, make: Backward) -> None:
        loop = self._context.loop
        with self._hooks.armed_to_take():
            make(())
        if self._equal is not None and loop.at_lanes_last_backward:
            self._equal.end_lane(self._sums.live.made)

    def skip(self) -> None:
        if self._context.loop.at_last_backward:
            self._sums.push(self._context.loop.lane)

    def stand_by(self) -> None:
        self._sums.live.zero()

    def take(self) -> CanonicalReduction:
        _compare(self._equal, self._context)
        reduction, self._reduction = self._reduction or self._new(), None
        return reduction

    def forget(self) -> None:
        self._reduction = None
        if self._equal is not None:
            self._equal.begin_world()


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
        self._is_summed = [bucket.is_summed for bucket in context.state.layout.buckets]
        """By bucket, whether a lane's gradient of it is complete only when its backward is over."""
        self._equal = _over_cell(context, sums)
        self._hooks = BucketHooks(context.state.layout, context.state.parameters, sums, self._on_whole)
        self._reduction: RoundReduction | None = None
        self._rounds: tuple[World, bool, PieceOrder, RoundsTraffic] | None = None
        self._times: FillTimes | None = None

    @property
    def fill_times(self) -> FillTimes | None:
        """None for a pipeline: a schedule's gradients leave together, and stages have other pieces."""
        return self._times_here if self._context.state.layout.part.stages == 1 else None

    @property
    def _times_here(self) -> FillTimes:
        """Of the world at hand."""
        if self._times is None:
            self._times = FillTimes(_world(self._context).traffic.pieces)
        return self._times

    def _on_whole(self, bucket: int) -> None:
        if self._times is not None and not self._is_summed[bucket]:
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
        is_first, order = self._context.is_first_step, self._times_here.order
        known = self._rounds
        if known is None or known[0] is not world or known[1] != is_first or known[2] is not order:
            known = self._rounds = world, is_first, order, RoundsTraffic.of(world.traffic, is_first, order)
        return known[3]

    def backward(self, make: Backward) -> None:
        assert self._reduction is not None
        times = self._times_here
        times.begin_lane()
        early = list(takewhile(lambda bucket: not self._is_summed[bucket], times.order.buckets))
        with self._hooks.armed(_noted(self._equal, self._sums, self._reduction.on_filled), early):
            make(())
        times.end_lane()
        if self._equal is not None:
            self._equal.end_lane(self._sums.live.made)
        self._reduction.end_lane()

    def backward_here(self, make: Backward) -> None:
        """A micro-batch of several, or of a warm-up: what that makes is thrown away bucket by bucket."""
        warming_up = self._context.loop.is_warming_up
        with self._hooks.armed(self._throw_away) if warming_up else self._hooks.armed_to_take():
            make(())

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
        _compare(self._equal, self._context)
        reduction, self._reduction = self._reduction or self._new(), None
        return reduction

    def forget(self) -> None:
        self._reduction = self._times = None
        if self._equal is not None:
            self._equal.begin_world()


def _over_cell(context: TrainingContext, sums: LaneSums | ShardSums) -> EqualGradients | None:
    """Has gradients that are spread over a cell added up, where it divides layers. Returns the check of those that are
    said to be equal over it, where bits are exact.
    """
    hub = context.hub
    if hub is None:
        return None
    sums.over_cell = hub.reduce_sum
    is_divided = hub.shape.tensor > 1
    return EqualGradients(context.state.layout, hub) if is_divided and context.config.exact else None


def _noted(
    equal: EqualGradients | None, sums: LaneSums | ShardSums, on_filled: Callable[[int], None]
) -> Callable[[int], None]:
    """What is called with a bucket whose gradients are all there, before they leave: the check notes them first."""
    if equal is None:
        return on_filled

    def on_whole(bucket: int) -> None:
        equal.note(bucket, sums.live.made)
        on_filled(bucket)

    return on_whole


def _compare(equal: EqualGradients | None, context: TrainingContext) -> None:
    """All lanes of the step are done here. Raises as `EqualGradients.compare`."""
    if equal is not None and _world(context).lanes:
        equal.compare()


def _world(context: TrainingContext) -> World:
    assert context.world is not None
    return context.world


class BucketHooks:
    """`armed` around a backward."""

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        sums: LaneSums | ShardSums,
        on_whole: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_whole`: called with a bucket when all its gradients are there, in whatever order backward makes them."""
        self._on_whole = on_whole
        self._slots, self._sums = [len(bucket.slots) for bucket in layout.buckets], sums
        self._numbers = layout.parameter_numbers[layout.part.coordinate]
        self._names = [slot.parameter.name for bucket in layout.buckets for slot in bucket.slots]
        self._on_filled: Callable[[int], None] | None = None
        self._repeats = layout.part.stages > 1
        """Whether parameters get gradients of several micro-batches in what is armed for."""
        self._awaited = [
            {at for at, slot in enumerate(one.slots) if slot.parameter.tie is None} for one in layout.buckets
        ]
        """By bucket, the places of those that may be unused; a copy of what another stage has is not asked."""
        self._missing: list[set[int]] = []
        self._order: Sequence[int] = range(len(self._slots))
        self._next = 0
        owners = [(b, s) for b, count in enumerate(self._slots) for s in range(count)]
        on_gradient = _weakly(ref(self))
        for number, ((bucket, slot), parameter) in enumerate(zip(owners, parameters, strict=True)):
            parameter.register_post_accumulate_grad_hook(partial(on_gradient, number, bucket, slot))

    @contextmanager
    def armed(self, on_filled: Callable[[int], None], order: Sequence[int] | None = None) -> Iterator[None]:
        """Calls `on_filled(bucket)` for each bucket, in order, as soon as it and all before it are whole. Buckets with
        unused parameters never come; whoever arms sees to them. `order`: None: the layout's.
        """
        self._missing = [set(places) for places in self._awaited]
        self._order = range(len(self._slots)) if order is None else order
        self._next, self._on_filled = 0, on_filled
        try:
            yield
            self._note_used()
        finally:
            self._on_filled = None

    def _note_used(self) -> None:
        """The backward has come to its end: what it has made no gradient of, it has not used."""
        if self._sums.unused:
            each = zip(self._numbers, self._missing, strict=True)
            self._sums.unused &= sum(1 << numbers[slot] for numbers, missing in each for slot in missing)

    def armed_to_take(self) -> AbstractContextManager[None]:
        """For a backward that fills no bucket for good: what is to be taken from parameters is so anyway."""
        return self.armed(lambda _: None)

    def _on_gradient(
        self,
        number: int,
        bucket: int,
        slot: int,
        parameter: nn.Parameter,  # of its own shape
    ) -> None:
        if self._on_filled is None:
            return
        if len(parameter._post_accumulate_grad_hooks or ()) > OWN_HOOKS:  # now: the others come after this one
            refuse_hooks(self._names[number], parameter, OWN_HOOKS)
        if self._repeats:  # a schedule's micro-batches, whose gradients leave when all are added up
            if number in self._sums.live.taken:
                self._sums.live.take(number, parameter)
            self._missing[bucket].discard(slot)
            return
        if slot not in self._missing[bucket]:  # also where its bucket has not left yet: that depends on the order
            raise UserError(
                "a parameter got its gradient twice in one backward (reentrant checkpointing does that); "
                "use torch.utils.checkpoint with use_reentrant=False."
            )
        if number in self._sums.live.taken:
            self._sums.live.take(number, parameter)
        missing = self._missing[bucket]
        missing.discard(slot)
        if missing:
            return
        self._on_whole(bucket)
        while self._next < len(self._order) and not self._missing[self._order[self._next]]:
            filled = self._order[self._next]
            self._next += 1
            self._on_filled(filled)


def _weakly(hooks: ReferenceType[BucketHooks]) -> Callable[[int, int, int, nn.Parameter], None]:
    """Python sees no hook that torch keeps: one that keeps the model would be a cycle, and neither ever freed."""

    def on_gradient(
        number: int,
        bucket: int,
        slot: int,
        parameter: nn.Parameter,  # of its own shape
    ) -> None:
        here = hooks()
        if here is not None:
            here._on_gradient(number, bucket, slot, parameter)

    return on_gradient
