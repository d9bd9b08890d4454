"""Elementwise optimizers: those that give the bits of the whole when they run on a part of the parameters; and Lion.

Shoal runs the optimizer's class on the blocks that a worker holds, so every element must depend on itself alone. The
probe asks the object itself; the names below are what a configuration can name, and why others are refused.

Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023) is not in torch; arguments and defaults are
DeepSpeed's. A configuration names it (`optimizer.type`), or a script makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from shoal_protos.errors import UserError
from shoal_protos.training_log import get_logger
from torch.optim import Optimizer

from shoal.optim.hyper import HOOK_ADVICE
from shoal.optim.muon import muon_updates
from shoal.optim.own_class import let_own_class_update
from shoal.optim.probe import probe
from shoal.optim.several import members_of
from shoal.optim.whole import UPDATES

log = get_logger("shoal.optim")


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


ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
    Lion,
)

NOT_ELEMENTWISE = {
    "lbfgs": "searches along a line through all parameters",
    "adafactor": "scales by rows and columns of whole matrices",
    "muon": "orthogonalises whole matrices",
    "singledevicemuon": "orthogonalises whole matrices",
    "muonwithauxadam": "takes part in a process group of its own, which SingleDeviceMuonWithAuxAdam does not",
    "lamb": "scales by the norms of whole tensors",
    "fusedlamb": "scales by the norms of whole tensors",
    "fusedmixedprecisionlamb": "scales by the norms of whole tensors",
    "onebitlamb": "scales by the norms of whole tensors",
    "lamb8bit": "scales by the norms of whole tensors",
    "sparseadam": "needs sparse gradients",
    "adahessian": "differentiates gradients, which have no graph in blocks",
}
"""Class names in lower case, whoever ships them, and what they do."""
SCALES = "scales by "
"""What those do that train well on whole tensors, one at a time."""
ON_WHOLE_TENSORS = (SCALES, "orthogonalises ")
COMPRESSING = ("onebitadam", "zerooneadam", "onebitlamb")
"""Those that compress gradients on their way and feed the error back."""


def names() -> str:
    """The allowed classes, for a sentence."""
    return ", ".join(kind.__name__ for kind in ELEMENTWISE)


def check_optimizer(optimizer: Optimizer, elementwise: bool, whole: Collection[str] = ()) -> str:
    """What of the optimizer is carried beside parameters, in words. `elementwise`: the script's word, which is taken
    where the probe cannot run. `whole`: names of classes that are to update whole tensors.

    Raises `UserError` for one that may run on neither blocks nor whole tensors, with what was seen, for one with step
    hooks, and for a name that is no given optimizer's.
    """
    given = [type(member).__name__ for member in members_of(optimizer)]
    for name in whole:
        if name.lower() not in [one.lower() for one in given]:
            raise UserError(
                f"`shoal.whole` names {name!r}, and the job's optimizer is {' + '.join(given)}; name a class of it, or "
                "leave `shoal.whole` out."
            )
    named = [name.lower() for name in whole]
    kept = [_check(one, elementwise, type(one).__name__.lower() in named) for one in members_of(optimizer)]
    return "; ".join(dict.fromkeys(kept))


def _check(optimizer: Optimizer, elementwise: bool, is_whole: bool) -> str:
    """`is_whole`: whether the configuration says so."""
    _refuse_step_hooks(optimizer)
    kind = type(optimizer)
    if is_whole and any(muon_updates(optimizer)):
        raise UserError(
            f"`shoal.whole` names {kind.__name__}, whose matrices Shoal has orthogonalised at their homes already; "
            "leave the name out."
        )
    if is_whole and (refused := let_own_class_update(optimizer)):
        raise UserError(f"`shoal.whole` names {kind.__name__}, for which whole tensors would not do: it {refused}.")
    found = probe(optimizer)
    names_known = (NOT_ELEMENTWISE.get(ancestor.__name__.lower()) for ancestor in kind.__mro__)
    saw = found.reason or found.failure
    known = next(filter(None, names_known), "") if saw else ""
    if known or found.reason:
        reason = f"{known} ({saw})" if known else saw
        refused = let_own_class_update(optimizer)
        if not refused and known.startswith(SCALES):
            log.info("whole_tensors", optimizer=kind.__name__, reason=known,
                     means="each tensor is brought to one worker in each step, which costs exchange")  # fmt: skip
            return probe(optimizer).keeps
        vars(optimizer).pop(UPDATES, None)
        way = (
            f"whole tensors would not do either: it {refused}"
            if refused
            else (f'`shoal.whole: ["{kind.__name__}"]` gives it whole tensors, each at one worker')
        )
        raise UserError(
            f"optimizer {kind.__name__} {reason}; Shoal runs optimizers on blocks of parameters, so every element must "
            f"be computed by itself. Supported: {names()}, and others that do so; {way}."
        )
    if not found.failure:
        return found.keeps
    if not elementwise:
        raise UserError(
            f"optimizer {kind.__name__} ({kind.__module__}) cannot be tried on its own: {found.failure}. Mend that; "
            "or, if it computes every element by itself, from its group and its state alone, set "
            "`shoal.elementwise: true`."
        )
    log.warning("optimizer_not_tried", optimizer=kind.__name__, reason=found.failure,
                means="it is taken as elementwise at the word of `shoal.elementwise`")  # fmt: skip
    return "not tried"


def _refuse_step_hooks(optimizer: Optimizer) -> None:
    """Hooks on all optimizers (torch's profiler has one) and a scheduler's wrapper around `step` are none of these."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for method, hooks in (("register_step_pre_hook", before), ("register_step_post_hook", after)):
        for hook in hooks.values():
            name = getattr(hook, "__qualname__", type(hook).__name__)
            raise UserError(f"optimizer {type(optimizer).__name__} has a step hook ({method}: {name}); {HOOK_ADVICE}")
