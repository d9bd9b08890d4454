"""Residency: what of a block every worker keeps, and what its owner and mirrors alone, by ZeRO's stage.

What differs by stage is built here: the memory of parameters, the sums of gradients and their guard, the traffic of a
world, what drives reductions and what looks after parameters. Each stage is the one before with one thing more that
owner and mirrors alone keep. Called where a state is made and described (start.py), where the parts are put together
(parts.py), and where memory is reported (memory_report.py); all else in a worker uses what was built, and no stage. The
controller's half: `Description.adds_by_rounds` and `shards_parameters`.

Source of the stages: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from shoal_protos.plan import EVERYONE, Plan
from torch import nn

from shoal.blocks.flat import frozen
from shoal.blocks.lane_sums import LaneSums
from shoal.blocks.segments import HeldWeights, Segments
from shoal.blocks.shard_sums import ShardSums
from shoal.blocks.sharded_memory import ShardedMemory, WholeMemory
from shoal.blocks.values import WholeValues
from shoal.config.out_of_memory import Advice
from shoal.config.training import TrainingConfig
from shoal.core.layout import Layout, Trainable
from shoal.exchange.traffic import Traffic
from shoal.guards.step_guard import Comparisons, StepGuard
from shoal.guards.write_guards import GradientGuard, TakenGradientGuard
from shoal.state.training_state import Limits
from shoal.training.averages import ParametersAndAverages
from shoal.training.context import TrainingContext
from shoal.training.gathered_units import units_of_weights
from shoal.training.parameters import HandedParameters, Parameters
from shoal.training.reducing import Reducing, ShardReducing, WholeReducing


class Residency:
    """Stage 0: every worker keeps all."""

    number = 0
    keeps_weights = False

    def parameters_in_blocks(self, _: nn.Module, _units: Collection[str], /) -> list[tuple[Trainable, nn.Parameter]]:
        return []

    def memory(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],  # each of its own shape, in the order of the slots
        _can_be_seen: bool,
        _is_empty: bool,
        /,
    ) -> WholeMemory | ShardedMemory:
        return WholeMemory(layout, parameters)

    def gradients(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],  # each of its own shape, in the order of the slots
        limits: Limits,
        comparisons: Comparisons,
        /,
    ) -> tuple[LaneSums | ShardSums, StepGuard]:
        sums = LaneSums(layout, limits.lanes)
        guarded = sums.live.are_whole
        return sums, GradientGuard(sums, parameters, comparisons) if guarded else TakenGradientGuard(parameters)

    def weights(self, _: Segments, values: WholeValues, /) -> WholeValues | HeldWeights:
        return values

    def traffic(self, plan: Plan, rank: int, layout: Layout, leaves_are_narrow: bool) -> Traffic:
        return Traffic(plan, rank, layout, leaves_are_narrow)

    def parameters(
        self, context: TrainingContext, take_part: Callable[[], None], on_all_here: Callable[[], None], /
    ) -> Parameters:
        """Return what looks after them between votes. `take_part`: called where the world changes under a use of one;
        `on_all_here`: when the last of a hand-out has come that others did not wait for.
        """
        return HandedParameters(context, take_part, on_all_here)

    def reducing(
        self, context: TrainingContext, on_reduced: Callable[[], None], _on_gradients: Callable[[int], None], /
    ) -> Reducing:
        """Return what drives reductions. `on_reduced`: called for each piece, before it is mirrored. `on_gradients`:
        with each bucket whose gradients a backward has made, where they leave with every lane.
        """
        sums = context.state.sums
        assert isinstance(sums, LaneSums)
        return WholeReducing(context, sums, on_reduced)

    def mirrors(self, _: TrainingConfig, /) -> int:
        """Return how many workers besides a block's owner hold its state."""
        return EVERYONE

    def advice(self, _: TrainingConfig, /) -> Advice:
        """Return what needs less memory than this config."""
        more = "more of them in a lane (`shoal.micro_batches_per_lane`)"
        return Advice(self.number, instead=more, next_stage="`zero_optimization.stage: 1`;")


class StateSharded(Residency):
    """Stage 1: optimizer state and master weights."""

    number = 1

    def mirrors(self, config: TrainingConfig, /) -> int:
        return config.mirrors

    def advice(self, config: TrainingConfig, /) -> Advice:
        narrow = ", with one micro-batch in a lane, and more lanes (`shoal.lanes`);"
        next_stage = f"`zero_optimization.stage: 2`{narrow if config.micro_batches_per_lane > 1 else ';'}"
        return replace(super().advice(config), next_stage=next_stage, has_mirrors=True)


class GradientsSharded(StateSharded):
    """Stage 2: a step's gradients too, until it is committed."""

    number = 2

    def gradients(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],  # each of its own shape, in the order of the slots
        limits: Limits,
        _: Comparisons,
        /,
    ) -> tuple[LaneSums | ShardSums, StepGuard]:
        return ShardSums(layout, limits.one_micro_batch), TakenGradientGuard(parameters)

    def traffic(self, plan: Plan, rank: int, layout: Layout, leaves_are_narrow: bool) -> Traffic:
        return Traffic(plan, rank, layout, leaves_are_narrow, by_rounds=True)

    def reducing(
        self, context: TrainingContext, on_reduced: Callable[[], None], on_gradients: Callable[[int], None], /
    ) -> Reducing:
        sums = context.state.sums
        assert isinstance(sums, ShardSums)
        return ShardReducing(context, sums, on_reduced, on_gradients)

    def advice(self, config: TrainingConfig, /) -> Advice:
        """Several micro-batches make a lane's gradient whole: more lanes do not."""
        narrow = "one micro-batch in a lane, and more lanes (`shoal.lanes`): between several its gradient is whole;"
        return replace(
            super().advice(config),
            instead="more lanes (`shoal.lanes`)",
            one_micro_batch=narrow if config.micro_batches_per_lane > 1 else "",
            next_stage="`zero_optimization.stage: 3`;",
        )


class AllSharded(GradientsSharded):
    """Stage 3: parameters too, frozen ones among them."""

    number = 3
    keeps_weights = True

    def parameters_in_blocks(
        self, module: nn.Module, units: Collection[str], /
    ) -> list[tuple[Trainable, nn.Parameter]]:
        return frozen(module, units)

    def memory(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],  # each of its own shape, in the order of the slots
        can_be_seen: bool,
        is_empty: bool,
        /,
    ) -> WholeMemory | ShardedMemory:
        memory = ShardedMemory(layout, can_be_seen, is_empty)
        memory.adopt(parameters)
        return memory

    def weights(self, segments: Segments, _: WholeValues, /) -> WholeValues | HeldWeights:
        return HeldWeights(segments)

    def traffic(self, plan: Plan, rank: int, layout: Layout, leaves_are_narrow: bool) -> Traffic:
        return Traffic(plan, rank, layout, leaves_are_narrow, by_rounds=True, hands_out=False)

    def parameters(
        self, context: TrainingContext, take_part: Callable[[], None], _: Callable[[], None], /
    ) -> Parameters:
        weights = context.state.weights
        assert isinstance(weights, HeldWeights)
        return ParametersAndAverages(context, lambda on_touch: units_of_weights(context, weights, on_touch), take_part)

    def advice(self, config: TrainingConfig, /) -> Advice:
        on_host = "" if config.parameters_on_host else '`zero_optimization.offload_param: {"device": "cpu"}`;'
        return replace(super().advice(config), next_stage="smaller units (`shoal.units`);", on_host=on_host)


RESIDENCIES = (Residency(), StateSharded(), GradientsSharded(), AllSharded())


def residency_of(stage: int) -> Residency:
    """Return the residency of a stage, 0 to 3."""
    return RESIDENCIES[stage]
