"""What a script gives to a call of Shoal's, refused by name where it cannot work, before anything is built.

Kinds of objects, modules that cannot be trained in blocks, names of arguments. Called by `shoal.initialize` and by the
doors for other libraries; what the configuration says is refused in config/.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from weakref import WeakSet

from shoal_protos import validation
from shoal_protos.errors import UserError
from shoal_protos.shape import Shape
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

KINDS: dict[str, tuple[type, str]] = {
    "model": (nn.Module, "torch.nn.Module"),
    "optimizer": (Optimizer, "torch.optim.Optimizer"),
    "scheduler": (LRScheduler, "torch.optim.lr_scheduler.LRScheduler"),
}
SEVERAL = (
    "An engine trains one model: put several networks into one module. Give their optimizers as a list, or by names, "
    '`optimizer={"generator": a, "critic": b}`; engine.turn(name) steps them in turn.'
)
WRAPPERS = {
    "DataParallel": "give the module within it (model.module), and start one worker for each device",
    "DistributedDataParallel": "give the module within it (model.module)",
    "FullyShardedDataParallel": 'give the module within it, and `zero_optimization: {"stage": 3}` in the config',
    "FSDPModule": (
        'leave fully_shard out, and give `zero_optimization: {"stage": 3}` in the config; of a DistributedConfig of '
        "transformers leave fsdp_size out, and give experts to the places of a cell by apply_expert_parallelism on "
        'cell.mesh["expert"]'
    ),
}
"""Torch's modules that exchange gradients or parameters themselves, and what to do; by name, as imports are slow."""
OWN_GROUP = "whose own process group would take part in every step and does not change with the workers"
_laid_out: WeakSet[nn.Module] = WeakSet()
"""Models whose parameters an engine has laid out, or tried to."""


def check_given(model: Any, optimizer: Any, scheduler: Any) -> None:
    """Raises `UserError` for several models, for what is no optimizer or scheduler or no list of such, and for what
    `check_model` refuses.
    """
    given = [("model", model), *_each("optimizer", optimizer), *_each("scheduler", scheduler)]
    if faults := [fault for name, value in given for fault in _wrong_kind(name, value)]:
        raise UserError(validation.all_of(faults, "the call"))
    check_model(model)


def _each(name: str, value: Any) -> list[tuple[str, Any]]:
    """Of a list or a mapping, what is in it, by what it is called; an empty one is itself."""
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        return [(f"{name}[{key!r}]", one) for key, one in value.items()]
    if isinstance(value, list | tuple) and value:
        return [(f"{name}[{number}]", one) for number, one in enumerate(value)]
    return [(name, value)]


def _wrong_kind(name: str, value: Any) -> Iterator[str]:
    kind, called = KINDS[name.partition("[")[0]]
    if isinstance(value, kind) or (value is None and name in ("optimizer", "scheduler")):
        return
    if isinstance(value, type):
        yield f"{name} is the class {value.__name__}; expected an object of it, {value.__name__}(…)."
    elif name in ("optimizer", "scheduler") and isinstance(value, list | tuple | Mapping) and not value:
        yield f"{name} is an empty {type(value).__name__}; expected one {called} at least."
    else:
        yield f"{name} is a {type(value).__name__}; expected one {called}. {SEVERAL}"


def refuse_cells(door: str, shape: Shape) -> None:
    """Raises `UserError` where a cell is several processes. `door`: of a library that counts processes by itself."""
    if shape.processes > 1:
        raise UserError(
            f"{door} does not support cells of several processes ({shape}) yet; write the loop with shoal.initialize, "
            "or leave `shoal.cell` out."
        )


def lay_out_once(model: nn.Module) -> None:
    """Raises `UserError` for a model that an engine has had before: its parameters lie in blocks, with hooks."""
    if model in _laid_out:
        raise UserError(
            "the model was given to an engine before, which has laid out its parameters; build it anew before each "
            "shoal.initialize (in a notebook: run the cell that builds it once more), and the optimizer over it."
        )
    _laid_out.add(model)


def refuse_unknown(call: str, unknown: Collection[str], known: Collection[str]) -> None:
    """Raises `UserError` naming arguments that `call` does not have, with those that it has."""
    if unknown:
        named = ", ".join(sorted(unknown))
        allowed = [name for name in known if name != "unknown"]
        near = {name: close[0] for name in sorted(unknown) if (close := difflib.get_close_matches(name, allowed, 1))}
        meant = "".join(f" Instead of {name}=: {close}=." for name, close in near.items())
        raise UserError(f"{call} has no argument {named}; expected {', '.join(allowed)}.{meant}")


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
        named = f'module "{name}"' if name else f"the model ({type(module).__name__})"
        _check_wrapper(named, module)
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.sparse:
            raise UserError(f"{named} makes sparse gradients, which have no blocks; build it sparse=False.")
        if module.max_norm is not None:
            raise UserError(
                f"{named} has max_norm={module.max_norm}: its forward would change weights on each worker by "
                "itself. Build it without, and scale what it returns."
            )


def _check_wrapper(named: str, module: nn.Module) -> None:
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch.") and kind.__name__ in WRAPPERS:
            reason = "which splits each batch over the devices of one process" if kind is nn.DataParallel else OWN_GROUP
            raise UserError(f"{named} is a {kind.__name__}, {reason}: {WRAPPERS[kind.__name__]}.")
