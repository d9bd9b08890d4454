"""DeepSpeed's learning-rate schedules as formulas: from a count of steps to each group's rate. Pure arithmetic.

They are those of DeepSpeed's `deepspeed/runtime/lr_schedules.py` (0.19.8; deepspeed.readthedocs.io/en/latest/
schedulers.html), with its names and defaults. DeepSpeed sets the first rate when the scheduler is made, and counts the
optimizer steps after it from 0: optimizer step n reads the rate of count n - 1, and count -1 is the first rate.
`scheduler.py` puts a formula into a scheduler of torch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from shoal_protos.validation import Allowed

from shoal.config.document import Section, Switch, Whole

Rate = Annotated[
    float | Annotated[tuple[float, ...], Field(strict=False)],
    Allowed("a number, or a list with one for each parameter group"),
]
RateOrNone = Annotated[
    float | Annotated[tuple[float, ...], Field(strict=False)] | None,
    Allowed("a number, or a list with one for each parameter group"),
]
Number = Annotated[float, Allowed("a number")]
Steps = Annotated[Whole, Field(ge=1), Allowed("a whole number of at least 1")]
FromZero = Annotated[Whole, Field(ge=0), Allowed("a whole number of at least 0")]
CountOrNone = Annotated[Annotated[Whole, Field(ge=0)] | None, Allowed("a whole number of at least 0")]
WarmupType = Annotated[Literal["log", "linear"], Allowed('"log" or "linear"')]


def per_group(value: float | tuple[float, ...], groups: int) -> Sequence[float]:
    """A value for each parameter group. Lists have that length (`Formula.listed`)."""
    return value if isinstance(value, tuple) else (value,) * groups


class Formula(Section):
    """A schedule: its fields are the scheduler's `params`."""

    @abstractmethod
    def rates(self, count: int, own: Sequence[float]) -> list[float]:
        """Each group's rate at a count. `own`: the rates that the groups were made with."""

    def momenta(self, count: int, groups: int) -> list[float] | None:  # noqa: ARG002
        """Each group's first beta at a count; None where the schedule leaves it alone."""
        return None

    def listed(self) -> dict[str, int]:
        """Fields given as lists, with their lengths."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: len(value) for name, value in values.items() if isinstance(value, tuple)}


def warmed_up(count: int, steps: int, kind: str) -> float | None:
    """The share of the way up, from 0 towards 1 within `steps` (at least 2); None once the warm-up is over."""
    steps = max(2, steps)
    if count >= steps:
        return None
    return count / steps if kind == "linear" else 1.0 / math.log(steps) * math.log(count + 1)


class WarmupLR(Formula):
    """From the minimum to the maximum, then constant. Without a maximum: the groups' own rates."""

    warmup_min_lr: Rate = 0.0
    """The first rate."""
    warmup_max_lr: RateOrNone = None
    """The rate at the end of the warm-up. Not given: the rates that the parameter groups have."""
    warmup_num_steps: Steps = 1000
    """Optimizer steps from the first rate to the last; 1 counts as 2."""
    warmup_type: WarmupType = "log"
    """How the rate climbs: with the logarithm of the step, or in a line."""

    def rates(self, count: int, own: Sequence[float]) -> list[float]:
        lowest = per_group(self.warmup_min_lr, len(own))
        if count < 0:
            return list(lowest)
        highest = own if self.warmup_max_lr is None else per_group(self.warmup_max_lr, len(own))
        share = warmed_up(count, self.warmup_num_steps, self.warmup_type)
        if share is None:
            share = self._after_warmup(count)
        return [low + (high - low) * share for low, high in zip(lowest, highest, strict=True)]

    def _after_warmup(self, count: int) -> float:  # noqa: ARG002
        return 1.0


class WarmupDecayLR(WarmupLR):
    """From the minimum to the maximum, then in a line back to the minimum at the last step."""

    total_num_steps: Steps
    """The step at which the rate is down again."""
    warmup_max_lr: RateOrNone = 0.001
    """The rate at the end of the warm-up."""

    def _after_warmup(self, count: int) -> float:
        falling = max(1.0, self.total_num_steps - max(2, self.warmup_num_steps))
        return max(0.0, float(self.total_num_steps - count) / falling)


class WarmupCosineLR(Formula):
    """Shares of the groups' own rates: up from a ratio, then down half a cosine to another one, and there it stays."""

    total_num_steps: Steps
    """The step at which the cosine ends."""
    warmup_min_ratio: Number = 0.0
    """Share of the groups' own rates at the start of the warm-up."""
    warmup_num_steps: Steps = 1000
    """Optimizer steps of the warm-up; 1 counts as 2."""
    cos_min_ratio: Number = 0.0001
    """Share of the groups' own rates at the end of the cosine."""
    warmup_type: WarmupType = "log"
    """How the rate climbs: with the logarithm of the step, or in a line."""

    def rates(self, count: int, own: Sequence[float]) -> list[float]:
        ratio = 0.0 if count < 0 else self._ratio(count)
        return [rate * ratio for rate in own]

    def _ratio(self, count: int) -> float:
        rising = warmed_up(count, self.warmup_num_steps, self.warmup_type)
        if rising is not None:
            return self.warmup_min_ratio + rising * (1.0 - self.warmup_min_ratio)
        warmup = max(2, self.warmup_num_steps)
        done = min(1.0, (count - warmup + 1) / max(1, self.total_num_steps - warmup))
        falling = (1 + math.cos(math.pi * done)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * falling)


class LRRangeTest(Formula):
    """Rises without end, continuously or in stairs: for finding the largest rate that still trains."""

    lr_range_test_min_lr: Rate = 1e-3
    """The first rate."""
    lr_range_test_step_size: Steps = 2000
    """Optimizer steps in which the rate grows by `lr_range_test_step_rate` times the first one."""
    lr_range_test_step_rate: Number = 1.0
    """Growth per `lr_range_test_step_size` steps, in first rates."""
    lr_range_test_staircase: Switch = False
    """True: the rate grows at the end of each interval only."""

    def rates(self, count: int, own: Sequence[float]) -> list[float]:
        passed = float(count + 1) / self.lr_range_test_step_size
        growth = 1 + self.lr_range_test_step_rate * (math.floor(passed) if self.lr_range_test_staircase else passed)
        return [low * growth for low in per_group(self.lr_range_test_min_lr, len(own))]


class OneCycle(Formula):
    """One cycle of the rate, up and down, then a decay below the minimum; the first beta goes the other way."""

    cycle_min_lr: Rate
    """The rate at both ends of the cycle."""
    cycle_max_lr: Rate
    """The rate at the turn of the cycle."""
    decay_lr_rate: Number = 0.0
    """After the cycle the lowest rate is divided by 1 + this × (steps since / `decay_step_size`)."""
    cycle_first_step_size: Steps = 2000
    """Optimizer steps of the way up."""
    cycle_second_step_size: CountOrNone = None
    """Optimizer steps of the way down. Not given: as many as up."""
    cycle_first_stair_count: FromZero = 0
    """Stairs on the way up; 0: a straight line."""
    cycle_second_stair_count: CountOrNone = None
    """Stairs on the way down. Not given: as many as up."""
    decay_step_size: FromZero = 0
    """Optimizer steps of a unit of decay; 0: no decay."""
    cycle_momentum: Switch = True
    """Whether the first beta moves too, against the rate; only where the optimizer has betas."""
    cycle_min_mom: Rate = 0.8
    """The first beta at the turn of the cycle (and at the very first step)."""
    cycle_max_mom: Rate = 0.9
    """The first beta at both ends of the cycle."""
    decay_mom_rate: Number = 0.0
    """After the cycle the highest first beta is multiplied by 1 + this × (steps since / `decay_step_size`)."""

    @property
    def _second(self) -> int:
        given = self.cycle_second_step_size
        return self.cycle_first_step_size if given is None else given

    @property
    def _length(self) -> int:
        return self.cycle_first_step_size + self._second

    def rates(self, count: int, own: Sequence[float]) -> list[float]:
        lowest = per_group(self.cycle_min_lr, len(own))
        if count < 0:
            return list(lowest)
        if count < self._length:
            height = self._height(count)
            highest = per_group(self.cycle_max_lr, len(own))
            return [low + (high - low) * height for low, high in zip(lowest, highest, strict=True)]
        return [low / self._decay(count, self.decay_lr_rate) for low in lowest]

    def momenta(self, count: int, groups: int) -> list[float] | None:
        if not self.cycle_momentum:
            return None
        lowest, highest = per_group(self.cycle_min_mom, groups), per_group(self.cycle_max_mom, groups)
        if count < 0:
            return list(lowest)
        if count < self._length:
            height = self._height(count)
            return [high - (high - low) * height for low, high in zip(lowest, highest, strict=True)]
        return [high * self._decay(count, self.decay_mom_rate) for high in highest]

    def _decay(self, count: int, rate: float) -> float:
        """The divisor of rates and factor of betas after the cycle; 1 without decay."""
        if self.decay_step_size == 0:
            return 1.0
        return 1 + rate * ((count - self._length + 1) / self.decay_step_size)

    def _height(self, count: int) -> float:
        """The share of the way up within the cycle, from 0 over 1 at the turn back to 0."""
        length = float(self._length)
        x = 1.0 + (count + 1) / length - math.floor(1 + (count + 1) / length)
        turn = self.cycle_first_step_size / length
        first, second = self.cycle_first_stair_count, self.cycle_second_stair_count
        stairs = first if x <= turn or second is None else second
        if stairs > 0:
            return self._stair((count + 1) % self._length, stairs)
        return x / turn if x <= turn else (x - 1) / (turn - 1)

    def _stair(self, at: int, stairs: int) -> float:
        if at <= self.cycle_first_step_size:
            return math.floor(at * stairs / self.cycle_first_step_size) / stairs
        return math.floor((self._length - at) * stairs / self._second) / stairs


FORMULAS: dict[str, type[Formula]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
