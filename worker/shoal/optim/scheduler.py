"""A formula of `schedules.py` as a scheduler of torch, stepped once after each optimizer step.

Rates are absolute, so this is no LambdaLR, which multiplies. torch's `last_epoch` is 0 when the scheduler is made;
DeepSpeed's count is one less. The state is plain numbers and no function, so it travels and is saved as it is.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any

from shoal_protos.errors import UserError
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from shoal.optim.hyper import in_place_of, plain_value
from shoal.optim.schedules import Formula

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
    if scheduler is None:
        return True
    parts = vars(scheduler)
    rules = [rule for rule in parts.get("lr_lambdas", ()) if not isinstance(rule, FunctionType)]
    return (
        type(scheduler).__module__ in (lr_scheduler.__name__, __name__)
        and not any(getattr(rule, "__dict__", None) for rule in rules)
        and all(map(is_made_of_numbers, parts.get("_schedulers", ())))
    )


# ---- what a scheduler is given, and going on from the middle with other values


def class_of(scheduler: LRScheduler | None) -> str:
    """What it is called: the formula's class, where it has one. Empty: there is none."""
    if scheduler is None:
        return ""
    return type(scheduler.formula if isinstance(scheduler, Schedule) else scheduler).__name__


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
