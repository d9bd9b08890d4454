"""The loss scale of fp16, step by step: static, or DeepSpeed's dynamic one.

The loss is multiplied by the scale before backward, the sum of the gradients divided by it; where a gradient is not
finite then, the step is skipped and the scale lowered. What a step does to it follows from the vote alone, so all
members have the same. The rule is DynamicLossScaler's (deepspeed/runtime/fp16/loss_scaler.py, `update_scale`), which is
Megatron-LM's, and in stage 0 FP16_UnfusedOptimizer's; keys and defaults are those of ds_config's section `fp16`
(deepspeed/runtime/precision_config.py). Pure.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal_protos.errors import UserError

FACTOR = 2.0
"""By which a dynamic scale is raised and lowered."""
MOST = sys.float_info.max
"""More is no number that a scale could be."""


@dataclass(frozen=True, slots=True)
class LossScaleRule:
    """Section `fp16` of the configuration, as far as it speaks of the scale."""

    loss_scale: float = 0.0
    """The static scale; 0: it is dynamic, and what follows counts."""
    initial_scale_power: int = 16
    """The first scale is 2 to this power."""
    loss_scale_window: int = 1000
    """After so many steps without an overflow, and one more, the scale is doubled."""
    hysteresis: int = 2
    """At so many overflows the scale is halved: the ones before only use them up."""
    consecutive_hysteresis: bool = False
    """Whether every step without an overflow gives all of them back; else only the doubling of the scale does."""
    min_loss_scale: float = 1.0
    ends_at_minimum: bool = True
    """Whether an overflow at the smallest scale ends the job; else the scale stays there."""

    @property
    def is_dynamic(self) -> bool:
        return not self.loss_scale

    def in_stage_0(self) -> LossScaleRule:
        """DeepSpeed's other rule: every overflow halves the scale, and it stays at the smallest."""
        return replace(self, hysteresis=1, ends_at_minimum=False)


@dataclass(frozen=True, slots=True)
class LossScale:
    """The scale of the next step, and what is known of the steps before it."""

    rule: LossScaleRule
    scale: float
    good_steps: int = 0
    """Since the last overflow, or the start."""
    hysteresis_left: int = 1
    """At so many overflows more the scale is halved."""
    skipped_steps: int = 0
    """Of the job so far: those that overflowed."""

    @property
    def position(self) -> dict[str, float]:
        """What joiners and checkpoints need of it: all but the rule, which the config gives."""
        found = {"scale": self.scale, "good_steps": self.good_steps, "hysteresis_left": self.hysteresis_left}
        return {**found, "skipped_steps": self.skipped_steps}

    def at(self, position: Mapping[str, float]) -> LossScale:
        """This rule's scale where another had come to. Raises `ValueError` for what `position` does not give.

        A static scale is what the config says. Steps that were skipped may be missing: an older checkpoint's.
        """
        position = {"skipped_steps": 0, **position}
        if (
            position.keys() != self.position.keys()
            or not all(type(value) in (int, float) and 0 <= value <= MOST for value in position.values())
            or not position["scale"]
        ):
            raise ValueError(
                f"a loss scale has {sorted(self.position)}, each a number of at least 0, and the scale is above 0; "
                f"found {dict(position)}"
            )
        skipped = int(position["skipped_steps"])
        if not self.rule.is_dynamic:
            return replace(self, skipped_steps=skipped)
        good, left = int(position["good_steps"]), int(position["hysteresis_left"])
        return LossScale(self.rule, float(position["scale"]), good, left, skipped)


def first_loss_scale(rule: LossScaleRule) -> LossScale:
    """Of a job's first step."""
    scale = FACTOR**rule.initial_scale_power if rule.is_dynamic else rule.loss_scale
    return LossScale(rule, scale, hysteresis_left=rule.hysteresis)


def after(state: LossScale, overflow: bool) -> LossScale:
    """What it is once a step is over. `overflow`: its gradient was not finite, so it was skipped.

    Raises `UserError` where a dynamic scale would have to go below its minimum, unless it stays there by its rule.
    """
    state = replace(state, skipped_steps=state.skipped_steps + overflow)
    if not state.rule.is_dynamic:
        return state
    return _after_overflow(state) if overflow else _after_good_step(state)


def _after_overflow(state: LossScale) -> LossScale:
    rule = state.rule
    if state.hysteresis_left > 1 and rule.hysteresis != 1:
        return replace(state, good_steps=0, hysteresis_left=state.hysteresis_left - 1)
    if state.scale == rule.min_loss_scale and rule.ends_at_minimum:
        raise UserError(
            f"the gradient overflows though the loss scale is {state.scale:g}, its minimum (`fp16.min_loss_scale`): "
            "the model diverges, or a loss or gradient is not finite at any scale. Lower the learning rate, look for "
            "what is not finite, set a smaller minimum, or train in bf16."
        )
    return replace(state, good_steps=0, scale=max(state.scale / FACTOR, rule.min_loss_scale))


def _after_good_step(state: LossScale) -> LossScale:
    rule, left = state.rule, state.hysteresis_left
    grows = state.good_steps > 0 and state.good_steps % rule.loss_scale_window == 0
    if grows or rule.consecutive_hysteresis:
        left = rule.hysteresis
    scale = state.scale * FACTOR if grows else state.scale
    return replace(state, scale=scale, good_steps=state.good_steps + 1, hysteresis_left=left)
