"""`shoal.deferred()`: a context in which a model is built without memory, on the meta device, and what it remembers.

Remembered are which modules were built in which context, with what was said of their first values (`Recipe`).
`Constants` notes which call has made a tensor (`nn.Parameter(torch.ones(n))`, `torch.tensor(2.0)`), as long as nothing
else is written to it; only calls that take no tensors, so a constant costs nothing until it is made. The values are
made at `shoal.initialize`, a unit at a time (deferred_values.py).

`TensorPlaces` are the modules' own tensors. While code of the script fills modules, other tensors stand in their
places, on the meta device or with memory, so that nothing of the model itself is written; that code is not known here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn
from torch.nn.modules import module as registration
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shoal.core.units import plain_name

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


FACTORIES: frozenset[Any] = frozenset(
    {torch.tensor, torch.ones, torch.zeros, torch.full, torch.arange, torch.eye, torch.linspace}
)

Constant = Callable[[], Tensor]
"""Makes it, with values."""


class Constants(TorchFunctionMode):
    """Of the tensors that are made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[torch.UntypedStorage, Constant]] = {}
        """By the key of its storage, which is kept: another one would get the key."""

    def of(self, tensor: Tensor) -> Constant | None:
        """What such a tensor, or a parameter made of it, is when its constructor is done."""
        storage = tensor.untyped_storage()
        _, constant = self._known.get(int(storage._cdata), (None, None))
        whole = tensor.storage_offset() == 0 and tensor.nbytes == storage.nbytes() and tensor.is_contiguous()
        return constant if whole else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        made = func(*args, **named)
        if func in FACTORIES and isinstance(made, Tensor) and made.is_meta and "out" not in named:
            inputs = [*tree_leaves(args), *tree_leaves(named)]
            if not any(isinstance(one, Tensor) for one in inputs):
                storage = made.untyped_storage()
                self._known[int(storage._cdata)] = storage, _again(func, args, named)
        elif _writes(getattr(func, "__name__", "")) or "out" in named:
            for one in (*tree_leaves(args), *tree_leaves(named)):
                if isinstance(one, Tensor):
                    self._known.pop(int(one.untyped_storage()._cdata), None)
        return made


def _again(func: Any, args: Any, named: dict[str, Any]) -> Constant:
    dtype = torch.get_default_dtype()

    def make() -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            made: Tensor = func(*args, **{**named, "device": "cpu", "requires_grad": False})
            return made
        finally:
            torch.set_default_dtype(before)

    return make


def _writes(name: str) -> bool:
    """`normal_`, `__setitem__`, `__iadd__`; not `__getitem__`."""
    return name.endswith("_") and (not name.startswith("__") or name.startswith(("__i", "__set")))


@dataclass(frozen=True, slots=True, eq=False)
class TensorPlace:
    """A module's own parameter or buffer, `own` in the module, `name` in the plain model."""

    name: str
    module: nn.Module
    own: str
    form: Tensor  # of its shape and dtype, on the meta device
    is_parameter: bool
    is_blank: bool
    """It has no values, and is no other name of a tensor that has a place before this one."""

    @property
    def constant(self) -> Constant | None:
        """What the constructor has put there, where it is blank and that is known."""
        return constant_of(self.module, self.own) if self.is_blank else None

    def stand_in(self, device: str) -> Tensor:  # of the form's shape and dtype
        """Zeros, or the constructor's constant; a copy of a buffer that has values."""
        buffer = None if self.is_parameter or self.is_blank else self.module._buffers[self.own]
        if buffer is not None and not buffer.is_meta:
            return buffer.to(device, copy=True)
        value = torch.zeros_like(self.form, device=device)
        if self.constant is not None and device != "meta":
            value.copy_(self.constant())
        return nn.Parameter(value, self.form.requires_grad) if self.is_parameter else value

    @property
    def now(self) -> Tensor | None:
        """What the module has there at this moment."""
        if self.is_parameter:
            return self.module._parameters.get(self.own)
        return self.module._buffers.get(self.own)


class TensorPlaces:
    """All of a model, in registration order."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.all: list[TensorPlace] = []
        self._of: dict[nn.Module, list[TensorPlace]] = {}
        seen: set[int] = set()
        for name, module in model.named_modules():
            self._of[module] = [
                TensorPlace(plain_name(f"{name}.{own}" if name else own), module, own, _form(tensor), is_parameter,
                      tensor.is_meta and id(tensor) not in seen)
                for own, tensor, is_parameter in _own(module)
            ]  # fmt: skip
            seen |= {id(tensor) for _, tensor, _ in _own(module)}
            self.all += self._of[module]

    def of(self, modules: Iterable[nn.Module]) -> list[TensorPlace]:
        """Those that are these modules' own."""
        return [place for module in modules for place in self._of.get(module, ())]

    @property
    def blank(self) -> list[TensorPlace]:
        return [place for place in self.all if place.is_blank]


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    yield from ((own, tensor, True) for own, tensor in module._parameters.items() if tensor is not None)
    yield from ((own, tensor, False) for own, tensor in module._buffers.items() if tensor is not None)


def _form(tensor: Tensor) -> Tensor:  # of the same shape and dtype, on the meta device
    return torch.empty_like(tensor, device="meta").detach().requires_grad_(tensor.requires_grad)


def refuse_hooked(places: Iterable[TensorPlace]) -> None:
    """A parameter without values becomes another tensor under the same name."""
    for place in places:
        tensor = place.now
        if tensor is not None and (tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)):
            raise UserError(
                f'parameter "{place.name}" has a hook and no values yet; register hooks after shoal.initialize on what '
                "was built within shoal.deferred()."
            )


@contextmanager
def standing_in(tensors: Mapping[TensorPlace, Tensor]) -> Iterator[None]:
    """These tensors, each of its place's shape and dtype, lie in their places; afterwards the modules' own do again."""
    by_module: dict[nn.Module, list[TensorPlace]] = defaultdict(list)
    for place in tensors:
        by_module[place.module].append(place)
    before = {module: (dict(module._parameters), dict(module._buffers)) for module in by_module}
    try:
        for module, places in by_module.items():
            for place in places:
                (module._parameters if place.is_parameter else module._buffers)[place.own] = tensors[place]  # type: ignore[assignment]
        yield
    finally:
        for module, (parameters, buffers) in before.items():
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)
