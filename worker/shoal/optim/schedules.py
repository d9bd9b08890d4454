"""DeepSpeed's learning-rate schedules: formulas from a count of steps to each group's rate, as schedulers of torch.

The formulas are pure arithmetic, with the names and defaults of DeepSpeed's `deepspeed/runtime/lr_schedules.py`
(0.19.8; deepspeed.readthedocs.io/en/latest/schedulers.html). DeepSpeed sets the first rate when the scheduler is made,
and counts the optimizer steps after it from 0: optimizer step n reads the rate of count n - 1, and count -1 is the
first rate.

`Schedule` is stepped once after each optimizer step. Rates are absolute, so it is no LambdaLR, which multiplies.
torch's `last_epoch` is 0 when it is made; DeepSpeed's count is one less. The state is plain numbers and no function, so
it travels and is saved as it is.
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Annotated, Any, Literal

from pydantic import Field
from shoal_protos.errors import UserError
from shoal_protos.validation import Allowed
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from shoal.config.document import Section, Switch, Whole
from shoal.optim.hyper import in_place_of, plain_value
from shoal.optim.several import PLUS, schedulers_of

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


SECOND_BETA = 0.99
"""What DeepSpeed's OneCycle sets the second beta to while it cycles the first."""
MULTIPLES = (
    "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR",
    "SequentialLR", "ChainedScheduler",
)  # fmt: skip
"""Of torch, those whose rates are multiples of the groups' own."""
MULTIPLES_ABOVE_ZERO = ("CosineAnnealingLR", "CosineAnnealingWarmRestarts", "ReduceLROnPlateau")
"""Those that are so where their lowest rate is 0."""
NO_VALUES = {"optimizer", "last_epoch", "verbose"}
"""Parameters of schedulers that say nothing of their rates."""
IN_GROUPS = ("max_lr", "min_lr", "base_momentum", "max_momentum")
"""What torch's schedulers keep of themselves in groups."""


class Schedule(LRScheduler):
    """Sets each group's rate, and its first beta where the formula moves it and the optimizer has one."""

    def __init__(self, optimizer: Optimizer, formula: Formula) -> None:
        for name, length in formula.listed().items():
            if length != len(optimizer.param_groups):
                raise UserError(
                    f"`scheduler.params.{name}` has {length} values; "
                    f"the optimizer has {len(optimizer.param_groups)} parameter groups."
                )
        self._formula = formula
        super().__init__(optimizer)

    @property
    def formula(self) -> Formula:
        return self._formula

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return self._formula.rates(self.last_epoch - 1, [float(rate) for rate in self.base_lrs])

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        self._set_momenta()

    def go_on_with(self, bases: Mapping[int, float]) -> None:
        """The next step reads what the formula gives for it. `bases`: by group, rates in the place of those that the
        groups were made with.
        """
        put_bases(self, bases)
        put_rates(self, self.get_lr())
        self._set_momenta()

    def _set_momenta(self) -> None:
        groups = [group for group in self.optimizer.param_groups if "betas" in group]
        momenta = self._formula.momenta(self.last_epoch - 1, len(self.optimizer.param_groups))
        if len(groups) == len(self.optimizer.param_groups) and momenta is not None:
            for group, first in zip(groups, momenta, strict=True):
                group["betas"] = (first, SECOND_BETA)

    def get_mom(self) -> list[Any] | None:
        """The betas that the groups have, where the formula moves them: what DeepSpeed's OneCycle answers."""
        moves = self._formula.momenta(self.last_epoch - 1, len(self.optimizer.param_groups)) is not None
        return [group.get("betas") for group in self.optimizer.param_groups] if moves else None

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "_formula"}


def is_made_of_numbers(scheduler: LRScheduler | None) -> bool:
    """Whether its state is what schedulers of torch and of Shoal keep, all through. Any other may read parameters when
    it is asked for its state.
    """
    return all(map(_is_made_of_numbers, schedulers_of(scheduler)))


def _is_made_of_numbers(scheduler: LRScheduler) -> bool:
    parts = vars(scheduler)
    rules = [rule for rule in parts.get("lr_lambdas", ()) if not isinstance(rule, FunctionType)]
    return (
        type(scheduler).__module__ in (lr_scheduler.__name__, __name__)
        and not any(getattr(rule, "__dict__", None) for rule in rules)
        and all(map(_is_made_of_numbers, parts.get("_schedulers", ())))
    )


# ---- what a scheduler is given, and going on from the middle with other values


def class_of(scheduler: LRScheduler | None) -> str:
    """What it is called: the formula's class, where it has one. Empty: there is none."""
    return PLUS.join(
        type(one.formula if isinstance(one, Schedule) else one).__name__ for one in schedulers_of(scheduler)
    )


def schedule_values(scheduler: LRScheduler | None) -> dict[str, Any]:
    """What it was made with beside rates of groups, as far as it shows and can be saved, by the attribute's name."""
    if scheduler is None:
        return {}
    if isinstance(scheduler, Schedule):
        return scheduler.formula.model_dump()
    attributes, found = vars(scheduler), dict[str, Any]()
    for name in inspect.signature(type(scheduler)).parameters.keys() - NO_VALUES:
        for attribute in attributes.keys() & {name, f"{name}s", f"_{name}"}:
            value = attributes[attribute]
            with suppress(UserError):
                found[attribute] = plain_value(sorted(value.elements()) if isinstance(value, Counter) else value, name)
    for name in IN_GROUPS:
        if all(name in group for group in scheduler.optimizer.param_groups):
            found[name] = tuple(plain_value(group[name], name) for group in scheduler.optimizer.param_groups)
    for number, part in enumerate(attributes.get("_schedulers", ())):
        found |= {f"{number}.{name}": value for name, value in schedule_values(part).items()}
    return dict(sorted(found.items()))


def momenta_of(scheduler: LRScheduler | None) -> tuple[str, ...]:
    """Keys of groups that it moves beside the rate. Of betas, the first."""
    if isinstance(scheduler, Schedule):
        return ("betas",) if scheduler.formula.momenta(-1, 1) is not None else ()
    cycles = scheduler is not None and any(vars(part).get("cycle_momentum") for part in _parts(scheduler))
    return ("betas", "momentum") if cycles else ()


def _parts(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """It, and those that it steps."""
    yield scheduler
    for part in vars(scheduler).get("_schedulers", ()):
        yield from _parts(part)


def scale_rates(scheduler: LRScheduler, rates: Mapping[int, tuple[float, float]]) -> bool:
    """Whether what it sets is a multiple of the groups' own rates, so that it could be scaled to others. `rates`: by
    group, the old and the new one.
    """
    if not all(map(_sets_multiples, _parts(scheduler))) or not all(old for old, _ in rates.values()):
        return False
    named = [vars(part).get(name) for part in _parts(scheduler) for name in ("base_lrs", "_last_lr")]
    lists = {id(values): values for values in named if values is not None}  # one may be that of its part
    for number, (old, new) in rates.items():
        group = scheduler.optimizer.param_groups[number]
        places: list[tuple[Any, Any]] = [(group, key) for key in ("lr", "initial_lr") if key in group]
        for place, key in [*places, *((values, number) for values in lists.values())]:
            value = place[key]
            place[key] = in_place_of(value, new if value == old else value * (new / old))
    return True


def _sets_multiples(scheduler: LRScheduler) -> bool:
    name, attributes = type(scheduler).__name__, vars(scheduler)
    lowest = attributes.get("min_lrs", [attributes.get("eta_min", 0.0)])
    known = name in MULTIPLES or (name in MULTIPLES_ABOVE_ZERO and not any(lowest))
    return known and type(scheduler).__module__ == lr_scheduler.__name__


def take_keys(
    scheduler: LRScheduler, first: Mapping[str, Any], keys: Sequence[str], rates: Mapping[int, tuple[float, float]]
) -> bool:
    """Whether it is a formula of the step, so that it could take values of its own in the midst. `first`: the state
    that has them. `rates`: by group, the old and the new one.
    """
    formula = getattr(scheduler, "_get_closed_form_lr", None)
    if formula is None or type(scheduler).__module__ != lr_scheduler.__name__:
        return False
    vars(scheduler).update({key: first[key] for key in keys})
    put_bases(scheduler, {number: new for number, (_, new) in rates.items()})
    put_rates(scheduler, formula())
    return True


def put_bases(scheduler: LRScheduler, bases: Mapping[int, float]) -> None:
    """By group, rates in the place of those that the groups were made with."""
    for number, rate in bases.items():
        group = scheduler.optimizer.param_groups[number]
        group["initial_lr"] = in_place_of(group["initial_lr"], rate)
        scheduler.base_lrs[number] = in_place_of(scheduler.base_lrs[number], rate)


def put_rates(scheduler: LRScheduler, rates: Sequence[Any]) -> None:
    """What the next step reads."""
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = in_place_of(group["lr"], rate)
    scheduler._last_lr = list(rates)
