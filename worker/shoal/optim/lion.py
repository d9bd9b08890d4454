"""Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023), which torch lacks and DeepSpeed has.

A configuration names it (`optimizer.type`), a script may make one. Its arguments and defaults are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Steps by the sign of a mean of gradients, which is all that it keeps: half of Adam's state."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"lr is {lr}; expected a number of at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are {list(betas)}; expected numbers from 0 to below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient. Returns what `closure`, which computes the loss, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        mean = state["exp_avg"]
        direction = mean.mul(first).add_(parameter.grad, alpha=1 - first).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"])
        mean.mul_(second).add_(parameter.grad, alpha=1 - second)
