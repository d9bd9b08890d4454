"""What a script gives to `shoal.initialize`: kinds that cannot work are refused by name before anything is built."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from shoal_protos.errors import UserError
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def check_given(model: Any, optimizer: Any, scheduler: Any) -> None:
    """Raises `UserError` for several models, optimizers or schedulers, and for what `check_model` refuses."""
    for name, value, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer),
                              ("scheduler", scheduler, LRScheduler)):  # fmt: skip
        if not isinstance(value, kind) and (value is not None or name == "model"):
            raise UserError(
                f"{name} is a {type(value).__name__}; expected one {kind.__module__}.{kind.__name__}. An engine trains "
                "one model by one optimizer: put several networks into one module, and their parameters into groups "
                "of one optimizer, each with a `name`; engine.turn(name) steps them in turn."
            )
    check_model(model)


def refuse_unknown(call: str, unknown: Collection[str], known: Collection[str]) -> None:
    """Raises `UserError` naming arguments that `call` does not have, with those that it has."""
    if unknown:
        named = ", ".join(sorted(unknown))
        allowed = ", ".join(name for name in known if name != "unknown")
        raise UserError(f"{call} has no argument {named}; expected {allowed}.")


def check_model(model: nn.Module) -> None:
    """Raises `UserError` naming a module or parameter that cannot be trained in blocks."""
    tensors: list[tuple[str, str, Tensor]] = [("parameter", *named) for named in model.named_parameters()]
    tensors += [("buffer", *named) for named in model.named_buffers()]
    for kind, name, tensor in tensors:
        if is_lazy(tensor):
            raise UserError(
                f'{kind} "{name}" has no shape yet (a lazy module); run one batch through the model before the '
                "optimizer is made and shoal.initialize is called."
            )
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.sparse:
            raise UserError(f'module "{name}" makes sparse gradients, which have no blocks; build it sparse=False.')
        if module.max_norm is not None:
            raise UserError(
                f'module "{name}" has max_norm={module.max_norm}: its forward would change weights on each worker by '
                "itself. Build it without, and scale what it returns."
            )
