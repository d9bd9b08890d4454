"""Activation checkpointing: the modules that the config names keep their inputs only; backward makes the rest again.

`shoal.initialize` puts it on, scripts call it as `deepspeed.checkpointing.checkpoint`, `torch.utils.checkpoint`
(non-reentrant) does it. What is here keeps every bit as it is without it: a forward that is made again finds random
generators and buffers as the first one found them, and leaves them as they are now. torch.compile traces checkpoints
itself, random numbers included.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
from shoal_protos.errors import UserError
from shoal_protos.training_log import get_logger
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from shoal.config.document import UNITS
from shoal.config.training import TrainingConfig
from shoal.core.units import check_classes, class_names, unit_modules
from shoal.exchange.module_buffers import LARGE_ELEMENTS
from shoal.first_values.building import meant_device
from shoal.process.compiler import uncompiled

KEY = "shoal.activation_checkpointing"
OWN_FORWARD = "_forward_before_checkpointing"
"""Where a module keeps a `forward` that it had besides its class's."""

log = get_logger("shoal")


def checkpoint_activations(model: nn.Module, config: TrainingConfig) -> None:
    """Puts activation checkpointing on the modules that the config names. Raises `UserError` where there are none."""
    chosen = _chosen(model, config) if config.activation_checkpointing else []
    to_host = config.cpu_checkpointing and _is_on_device(model)
    for module in chosen:
        _KEPT[module] = _Checkpointed(to_host)
        before = vars(module).get("forward")
        if getattr(before, "__func__", None) is not forward:
            if before is not None:
                vars(module)[OWN_FORWARD] = before
            vars(module)["forward"] = MethodType(forward, module)
    if chosen:
        classes = sorted({type(module).__name__ for module in chosen})
        log.info("activation_checkpointing", modules=len(chosen), classes=classes, to_host=to_host)
    if config.cpu_checkpointing and not (chosen and to_host):
        reason = "the model is on the CPU: its activations are in host memory already"
        log.info(
            "activation_checkpointing.cpu_checkpointing changes nothing",
            reason=reason if chosen else f"`{KEY}` names no modules",
        )


def finds_units(model: nn.Module, config: TrainingConfig) -> bool:
    """Whether there is a module that "units" would put it on."""
    return bool(_units_with_parameters(model, config))


def _units_with_parameters(model: nn.Module, config: TrainingConfig) -> list[nn.Module]:
    found = [part for unit in unit_modules(model, config.units) for part in _with_a_forward(unit)]
    return [part for part in found if next(part.parameters(), None) is not None]


def _is_on_device(model: nn.Module) -> bool:
    """Whether it is, or is to be, on an accelerator."""
    meant = meant_device(model)
    kinds = {parameter.device.type for parameter in model.parameters()} | {meant.type if meant is not None else "meta"}
    return not kinds <= {"cpu", "meta"}


def _chosen(model: nn.Module, config: TrainingConfig) -> list[nn.Module]:
    by_rule = config.activation_checkpointing == UNITS
    classes = config.units if by_rule else tuple(config.activation_checkpointing)
    check_classes(model, classes, "shoal.units" if by_rule else KEY)
    if by_rule:
        found = _units_with_parameters(model, config)
    else:
        found = [part for unit in unit_modules(model, classes) for part in _with_a_forward(unit)]
    if not found:
        means = (
            "the model has no nn.ModuleList and no nn.Sequential of several modules" if by_rule
            else "the whole model alone is of that class"
        )  # fmt: skip
        given = f'"{UNITS}"' if by_rule else ", ".join(classes)
        raise UserError(
            f"`{KEY}` is {given}, and {means}. Name classes of modules within it: "
            f"{', '.join(sorted(class_names(model) - {type(model).__name__}))}."
        )
    return list(dict.fromkeys(found))


def _with_a_forward(unit: nn.Module) -> Iterator[nn.Module]:
    """A unit, or what is in it where it is a container that nobody calls."""
    if isinstance(unit, nn.ModuleList | nn.ModuleDict):
        for part in unit.children():
            yield from _with_a_forward(part)
    else:
        yield unit


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of a checkpointed module. So named that a pickled module is loaded with its class's own."""
    own = getattr(self, OWN_FORWARD, None)
    of_class = type(self).forward

    def plain(*given: Any, **named: Any) -> Any:
        return own(*given, **named) if own is not None else of_class(self, *given, **named)

    alike = _made_again_alike(plain, self)
    if torch.compiler.is_compiling():
        return checkpoint(alike, *args, use_reentrant=False, **kwargs)
    kept = _known(self)
    if kept is None or not torch.is_grad_enabled():  # a copy of the module; an evaluation
        return plain(*args, **kwargs)
    with kept.place():
        return checkpoint(alike, *args, use_reentrant=False, **kwargs)


def checkpoint_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls it, and again in backward. What a module's own function does to buffers is done once."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    alike = _made_again_alike(function, owner if isinstance(owner, nn.Module) else None)
    return checkpoint(partial(alike, **kwargs), *args, use_reentrant=False)


def _made_again_alike(plain: Callable[..., Any], module: nn.Module | None) -> Callable[..., Any]:
    """For calls of one forward. `module`: its buffers are those that `plain` may change."""
    contexts: list[_Again] = []

    def alike(*given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(*given, **named)
        with _context(module, contexts):  # also where a compiler gave up half-way
            return plain(*given, **named)

    return alike


def _context(module: nn.Module | None, contexts: list[_Again]) -> _First | _Again:
    """Of the first call of a forward, which leaves that of all others in `contexts`; or that."""
    if contexts:
        return contexts[0]
    kept = _known(module) if module is not None else None
    first = _First((kept or _Checkpointed(to_host=False)).buffers(module) if module is not None else [])
    contexts.append(_Again(first))
    return first


@uncompiled
def _known(module: nn.Module) -> _Checkpointed | None:
    """None: a copy of a checkpointed module. Not traced: other threads change that dictionary meanwhile."""
    return _KEPT.get(module)


class _Checkpointed:
    """What is known of a checkpointed module. Holds no module, or none would ever be freed."""

    def __init__(self, to_host: bool) -> None:
        self._to_host = to_host
        self._large: dict[str, tuple[Tensor, int, Tensor]] = {}
        """Large buffers by name, each with its version and value then: most never change, and are copied once."""

    def place(self) -> AbstractContextManager[object]:
        """Where inputs wait for backward."""
        return save_on_cpu(pin_memory=torch.accelerator.is_available()) if self._to_host else nullcontext()

    def buffers(self, module: nn.Module) -> list[_Found]:
        """As they are now."""
        return [
            _Found(part, name, buffer, buffer._version, self._value(f"{prefix}.{name}", buffer))
            for prefix, part in module.named_modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]

    def _value(self, name: str, buffer: Tensor) -> Tensor:
        """A copy."""
        if buffer.numel() <= LARGE_ELEMENTS:
            return buffer.clone()
        known, version, value = self._large.get(name, (None, -1, buffer))
        if known is not buffer or version != buffer._version:
            value = buffer.clone()
            self._large[name] = (buffer, buffer._version, value)
        return value


_KEPT: WeakKeyDictionary[nn.Module, _Checkpointed] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Found:
    """A buffer as a forward found it."""

    part: nn.Module
    name: str
    buffer: Tensor
    version: int
    value: Tensor

    @property
    def has_changed(self) -> bool:
        """Small ones are compared: writes through `.data` are in no version."""
        now = self.part._buffers.get(self.name)
        if now is not self.buffer or now._version != self.version:
            return True
        return now.numel() <= LARGE_ELEMENTS and not torch.equal(now, self.value)


class _First:
    """The context of a forward."""

    def __init__(self, found: list[_Found]) -> None:
        self._found = found
        self.changed: list[_Found] = []
        self.generators = _generators()

    def __enter__(self) -> None:
        """Nothing is to be done: it has begun when it was made."""

    def __exit__(self, *_: object) -> None:
        self.changed = [one for one in self._found if one.has_changed]
        self._found = []


class _Again:
    """The context of the same forward in backward. May be entered several times, one after the other."""

    def __init__(self, first: _First) -> None:
        self._first = first

    def __enter__(self) -> None:
        """The buffers of now are put aside: nothing is written to them."""
        self._generators = _generators()
        _set_generators(self._first.generators)
        self._aside = [(one.part._buffers, one.name, one.part._buffers[one.name]) for one in self._first.changed]
        anew: dict[int, Tensor] = {}
        for one in self._first.changed:
            one.part._buffers[one.name] = anew.setdefault(id(one.buffer), one.value.clone())

    def __exit__(self, *_: object) -> None:
        for buffers, name, buffer in self._aside:
            buffers[name] = buffer
        _set_generators(self._generators)


def _generators() -> tuple[Any, Any]:
    """Where those stand that torch's checkpoint does not look after."""
    return random.getstate(), numpy.random.get_state()


def _set_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    numpy.random.set_state(states[1])
