"""A formula of `schedules.py` as a scheduler of torch, stepped once after each optimizer step.

Rates are absolute, so this is no LambdaLR, which multiplies. torch's `last_epoch` is 0 when the scheduler is made;
DeepSpeed's count is one less. The state is plain numbers and no function, so it travels and is saved as it is.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from shoal_protos.errors import UserError
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from shoal.optim.schedules import Formula

SECOND_BETA = 0.99
"""What DeepSpeed's OneCycle sets the second beta to while it cycles the first."""


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

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return self._formula.rates(self.last_epoch - 1, [float(rate) for rate in self.base_lrs])

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        groups = [group for group in self.optimizer.param_groups if "betas" in group]
        momenta = self._formula.momenta(self.last_epoch - 1, len(self.optimizer.param_groups))
        if len(groups) == len(self.optimizer.param_groups) and momenta is not None:
            for group, first in zip(groups, momenta, strict=True):
                group["betas"] = (first, SECOND_BETA)

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
