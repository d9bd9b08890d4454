"""`shoal.deferred()`: a context in which a model is built without memory, on the meta device.

Which modules were built in which context is remembered here, with what was said of their first values; the values are
made at `shoal.initialize`, a unit at a time (deferred_values.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn
from torch.nn.modules import module as registration

from shoal.first_values.constants import Constant, Constants

Init = Callable[[nn.Module], object]
"""Fills a module; asked for all modules, as by `model.apply(init)`."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where the first values of what was built in one context come from."""

    init: Init | None = None
    weights: Path | None = None
    device: torch.device | None = None
    """Where the values are to lie; None: where the rest of the model does."""


_BUILT: WeakKeyDictionary[nn.Module, Recipe] = WeakKeyDictionary()
_CONSTANTS: WeakKeyDictionary[nn.Module, dict[str, Constant]] = WeakKeyDictionary()
"""What the constructor of a module has put into its own parameters and buffers, by their names there."""


@contextmanager
def deferred(
    init: Init | None = None, weights: str | Path | None = None, device: str | torch.device | None = None
) -> Iterator[None]:
    """A context in which a model is built without memory; `shoal.initialize` creates its values, a unit at a time.

    Each module with tensors of its own is filled by its `reset_parameters()`; then the model's `_init_weights(module)`,
    if it has one, is called for every module. Each of these calls has a seed of its own, so the values are the same in
    every stage and every world. `init`: a function of a module in place of `_init_weights`. `weights`: a safetensors
    file, or a folder of such files, whose tensors are read by name instead. `device`: the device of the values; by
    default that of the parts built outside of the context, or the CPU. The values are the same on every device.
    """
    recipe = Recipe(init, _checked(weights), _usable(device))
    constants, built = Constants(), set[nn.Module]()

    def note(module: nn.Module, _: str, part: nn.Module | Tensor | None) -> None:
        _BUILT.setdefault(module, recipe)
        built.add(module)
        if isinstance(part, nn.Module):
            _BUILT.setdefault(part, recipe)

    # nn.Module has no other way to say which modules are made in a context
    handles: list[Any] = [
        registration.register_module_parameter_registration_hook(note),
        registration.register_module_buffer_registration_hook(note),
        registration.register_module_module_registration_hook(note),
    ]
    try:
        with torch.device("meta"), constants:
            yield
        for module in built:
            _CONSTANTS[module] = _of_module(module, constants)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        raise UserError(
            "the model reads values while it is built, and within shoal.deferred() there are none: "
            f'{str(error).splitlines()[0].rstrip(".")}. Make what it reads with device="cpu".'
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def _checked(weights: str | Path | None) -> Path | None:
    if weights is None:
        return None
    path = Path(weights)
    if not path.exists():
        raise UserError(f"shoal.deferred(weights=…) names {path}, which does not exist.")
    return path


def _usable(device: str | torch.device | None) -> torch.device | None:
    """With its number, if it has one."""
    if device is None:
        return None
    try:
        found = torch.empty(0, device=device).device
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        raise UserError(
            f"shoal.deferred(device=…) is {device}, which cannot be used here: {str(error).splitlines()[0]}."
        ) from None
    if found.type == "meta":
        raise UserError("shoal.deferred(device=…) is meta; expected the device where the model is to be trained.")
    return found


def _of_module(module: nn.Module, constants: Constants) -> dict[str, Constant]:
    own = {**module._parameters, **module._buffers}
    found = {name: constants.of(tensor) for name, tensor in own.items() if tensor is not None and tensor.is_meta}
    return {name: constant for name, constant in found.items() if constant is not None}


def constant_of(module: nn.Module, own: str) -> Constant | None:
    """What a constructor has put into one of a module's own tensors, where that is known."""
    return _CONSTANTS.get(module, {}).get(own)


def meant_device(model: nn.Module) -> torch.device | None:
    """Where the values are to lie of a part that was built in a context that says so."""
    return next((recipe.device for recipe in recipes(model).values() if recipe.device is not None), None)


def recipes(model: nn.Module) -> dict[nn.Module, Recipe]:
    """Of all modules of a model that were built in such a context: their own, or the next one's above them."""
    found: dict[nn.Module, Recipe] = {}
    above: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parent = above.get(name.rpartition(".")[0])
        inherited = found.get(parent) if parent is not None and parent is not module else None
        recipe = _BUILT.get(module, inherited)  # a deep copy of a module is not registered anywhere
        if recipe is not None:
            found[module] = recipe
        above[name] = module
    return found
