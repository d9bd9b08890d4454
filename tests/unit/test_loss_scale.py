"""The loss scale: DeepSpeed's rule, step by step, against a plain transcription of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rule import holds
from shoal.core.loss_scale import LossScale, LossScaleRule, after, first_loss_scale
from shoal_protos.errors import UserError

RULE = LossScaleRule(initial_scale_power=4, loss_scale_window=3, hysteresis=2)


class Transcribed:
    """The dumb twin: what DeepSpeed's DynamicLossScaler does with its counters of iterations."""

    def __init__(self, rule: LossScaleRule) -> None:
        self.rule = rule
        self.scale = 2.0**rule.initial_scale_power
        self.iteration, self.last_overflow = 0, -1
        self.left = rule.hysteresis

    def update(self, overflow: bool) -> None:
        rule = self.rule
        if overflow:
            if rule.hysteresis == 1 or self.left == 1:
                if self.scale == rule.min_loss_scale and rule.ends_at_minimum:
                    raise ArithmeticError("at its minimum")
                self.scale = max(self.scale / 2.0, rule.min_loss_scale)
            else:
                self.left -= 1
            self.last_overflow = self.iteration
        else:
            if rule.consecutive_hysteresis:
                self.left = rule.hysteresis
            stable = self.iteration - self.last_overflow - 1
            if stable > 0 and stable % rule.loss_scale_window == 0:
                if not rule.consecutive_hysteresis:
                    self.left = rule.hysteresis
                self.scale *= 2.0
        self.iteration += 1


def scales(rule: LossScaleRule, overflows: str) -> list[float]:
    """By step, the scale after it; `x` is an overflow."""
    state, found = first_loss_scale(rule), []
    for step in overflows:
        state = after(state, step == "x")
        found.append(state.scale)
    return found


rules = st.builds(
    LossScaleRule,
    initial_scale_power=st.integers(0, 20),
    loss_scale_window=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
    consecutive_hysteresis=st.booleans(),
    min_loss_scale=st.sampled_from((0.25, 1.0, 3.0)),
    ends_at_minimum=st.booleans(),
)


@holds("A gradient that overflows")
@given(rules, st.lists(st.booleans(), max_size=60))
def test_it_is_deepspeeds_rule(rule: LossScaleRule, overflows: list[bool]) -> None:
    state, twin = first_loss_scale(rule), Transcribed(rule)
    for overflow in overflows:
        try:
            twin.update(overflow)
        except ArithmeticError:
            with pytest.raises(UserError):
                after(state, overflow)
            return
        state = after(state, overflow)
        assert (state.scale, state.hysteresis_left) == (twin.scale, twin.left)
    assert first_loss_scale(rule).at(state.position) == state and state.skipped_steps == sum(overflows)


def test_the_keys_and_defaults_are_those_of_ds_config() -> None:
    state = first_loss_scale(LossScaleRule())
    assert state == LossScale(LossScaleRule(0.0, 16, 1000, 2, False, 1.0), 65536.0, 0, 2)


def test_it_is_doubled_one_step_after_each_full_window() -> None:
    assert scales(RULE, "ooooooo") == [16, 16, 16, 32, 32, 32, 64]


@holds("A gradient that overflows")
def test_the_first_overflow_only_uses_up_hysteresis() -> None:
    assert scales(RULE, "xx") == [16, 8]


def test_hysteresis_once_used_up_comes_back_with_a_doubling_only() -> None:
    assert scales(RULE, "xoxoooox") == [16, 16, 8, 8, 8, 8, 16, 16]


def test_consecutive_hysteresis_comes_back_with_every_good_step() -> None:
    rule = LossScaleRule(initial_scale_power=4, loss_scale_window=3, hysteresis=2, consecutive_hysteresis=True)
    assert scales(rule, "xoxoxx") == [16, 16, 16, 16, 16, 8]


def test_an_overflow_begins_the_window_anew() -> None:
    assert scales(RULE, "ooxoooo") == [16, 16, 16, 16, 16, 16, 32]


def test_it_never_goes_below_its_minimum_and_an_overflow_there_is_one_sentence() -> None:
    rule = LossScaleRule(initial_scale_power=2, hysteresis=1, min_loss_scale=3.0)
    state = after(first_loss_scale(rule), True)
    assert state.scale == 3.0
    with pytest.raises(UserError, match=r"loss scale is 3, its minimum \(`fp16\.min_loss_scale`\)"):
        after(state, True)


def test_a_static_scale_stays_whatever_happens() -> None:
    assert scales(LossScaleRule(loss_scale=128.0, hysteresis=1), "xxxooo") == [128.0] * 6
