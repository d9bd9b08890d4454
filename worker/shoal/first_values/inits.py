"""What fills a model that was built without memory: calls of the script's code, and what each of them touches.

Every module with tensors of its own is filled by its `reset_parameters()`, as constructors have it; then the model's
`_init_weights`, or the function given in its place, is asked for every module, after those in it, as `model.apply(...)`
does. A rehearsal on the meta device costs nothing, and shows what each call writes and reads: of its module, of parts
of that, or of anything else. Tensors that one call touches, and so those that any calls have in common, are made
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.core.units import is_wrapper, module_name
from shoal.data.seeds import RandomState
from shoal.first_values.building import Recipe, TensorPlace, TensorPlaces, standing_in

RESETS = ("reset_parameters", "_reset_parameters")
OWN_INIT = "_init_weights"
"""A model's own way to fill its modules, which its constructor calls for each of them: Hugging Face's, and others'."""

TRUNCATED = "_no_grad_trunc_normal_"
OVERWRITES = frozenset(
    f"aten::{name}_"
    for name in ("normal", "uniform", "fill", "zero", "copy", "random", "bernoulli", "exponential", "log_normal",
                 "cauchy", "geometric")
)  # fmt: skip
"""What leaves nothing of a tensor as it was."""


@dataclass(slots=True, eq=False)
class Call:
    """Of the script's code for one module. `name`: the module's in the plain model."""

    name: str
    module: nn.Module
    purpose: str
    run: Callable[[], object]
    touched: set[TensorPlace] = field(default_factory=set)
    written: set[TensorPlace] = field(default_factory=set)
    is_known: bool = True
    """It could be rehearsed. If not it may touch all that is in the module."""

    @property
    def title(self) -> str:
        """For a sentence."""
        kind = type(self.module).__name__
        return f'"{self.name}" ({kind})' if self.name else kind


class Touches(TorchDispatchMode):
    """Notes which places are written and read while the script's code runs. `tensors`: what lies in them at first."""

    def __init__(self, tensors: Mapping[TensorPlace, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.touched: set[TensorPlace] = set()
        self.written: set[TensorPlace] = set()
        self.overwritten: set[TensorPlace] = set()
        """Whole, before anything has read them or written a part of them; of all calls together."""
        self._spoiled: set[TensorPlace] = set()
        self._there: dict[TensorPlace, tuple[Tensor, int]] = {}
        self._places: dict[int, TensorPlace] = {}
        self._kept: list[Tensor] = []  # or other storages would get their keys
        for place, tensor in tensors.items():
            self._know(place, tensor)

    def _know(self, place: TensorPlace, tensor: Tensor) -> None:
        key = _storage(tensor)
        self._there[place] = tensor, key
        self.touched.add(self._places.setdefault(key, place))
        self._kept.append(tensor.detach())

    def begin(self) -> None:
        """Another call."""
        self.touched, self.written = set(), set()

    def look_for_others(self, places: Sequence[TensorPlace]) -> None:
        """Tensors that have been put into these places."""
        for place in places:
            now, known = place.now, self._there.get(place)
            if now is not None and known is not None and (now is not known[0] or _storage(now) != known[1]):
                self._know(place, now)
                self._write(place, place not in self._spoiled)

    def _write(self, place: TensorPlace, whole: bool) -> None:
        self.touched.add(place)
        self.written.add(place)
        (self.overwritten if whole or place in self.overwritten else self._spoiled).add(place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, named = func._schema, kwargs or {}
        for index, argument in enumerate(schema.arguments):
            value = args[index] if index < len(args) else named.get(argument.name)
            for tensor in tree_leaves(value):
                is_plain = isinstance(tensor, Tensor) and tensor.layout is torch.strided
                place = self._places.get(_storage(tensor)) if is_plain else None
                if place is not None:
                    self._note(schema.name, argument, tensor, place)
        return func(*args, **named)

    def _note(self, operation: str, argument: Any, tensor: Tensor, place: TensorPlace) -> None:
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            whole = tensor.numel() == place.form.numel() and place not in self._spoiled
            self._write(place, whole and (operation in OVERWRITES or argument.name == "out"))
        elif alias is None and not operation.endswith("_like") and not operation.startswith("aten::new_"):
            self.touched.add(place)
            if place not in self.overwritten:
                self._spoiled.add(place)


class _AsWithValues(TorchFunctionMode):
    """Functions of `torch.nn.init` leave tensors alone that say that they are on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.is_meta:
            return False
        return func(*args, **(kwargs or {}))


@contextmanager
def _drawn_once() -> Iterator[None]:
    """torch draws a truncated normal until all values fit, which nobody can tell of tensors without values."""
    own = vars(nn.init).get(TRUNCATED)
    if own is None:
        yield
        return
    setattr(nn.init, TRUNCATED, lambda tensor, *_, **__: tensor.normal_())
    try:
        yield
    finally:
        setattr(nn.init, TRUNCATED, own)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Inits:
    """All calls that fill a model, in their order."""

    def __init__(self, places: TensorPlaces, recipes: Mapping[nn.Module, Recipe]) -> None:
        modules = list(_in_order(places.model))
        afters = [
            Call(module_name(name), module, "own init", run)
            for name, module in modules
            if (run := _after(places.model, name, module, recipes.get(module))) is not None
        ]
        blank = {place.module for place in places.blank}
        resets = [
            Call(module_name(name), module, "init", run)
            for name, module in modules
            if module in blank and (run := _reset(module)) is not None
        ]
        overwritten = _rehearse(afters, places)
        _rehearse(resets, places)
        needed = [call for call in resets if not call.is_known or not call.written <= overwritten]
        self.calls = [call for call in (*needed, *afters) if call.touched]
        self._places = places
        constants = {place for place in places.blank if place.constant is not None}
        self._component = _components([call.touched for call in self.calls] + [{place} for place in constants])
        self._filled = constants.union(*(call.written for call in self.calls))

    def unfilled(self) -> list[TensorPlace]:
        """What nothing writes to."""
        return [place for place in self._places.blank if place not in self._filled]

    def component(self, place: TensorPlace) -> int:
        """The number of the tensors that are made with this one."""
        return self._component.get(place, -1)

    def calls_of(self, components: set[int]) -> list[Call]:
        """Those that make these."""
        return [call for call in self.calls if self._component[next(iter(call.touched))] in components]


def _in_order(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with their first names, each after those in it, as `apply` has them."""
    names = {module: name for name, module in model.named_modules()}
    seen: set[nn.Module] = set()

    def below(module: nn.Module) -> Iterator[nn.Module]:
        seen.add(module)
        for child in module.children():
            if child not in seen:
                yield from below(child)
        if not is_wrapper(module):
            yield module

    return ((names[module], module) for module in below(model))


def _reset(module: nn.Module) -> Callable[[], object] | None:
    return next((found for name in RESETS if callable(found := getattr(module, name, None))), None)


def _after(model: nn.Module, name: str, module: nn.Module, recipe: Recipe | None) -> Callable[[], object] | None:
    """What a model does with a module once it is built."""
    given = recipe.init if recipe is not None else None
    if given is not None:
        return lambda: given(module)
    owner = _owner(model, name)
    return (lambda: getattr(owner, OWN_INIT)(module)) if owner is not None else None


def _owner(model: nn.Module, name: str) -> nn.Module | None:
    """The next module above, or the module itself, that has an `_init_weights`."""
    parts = name.split(".") if name else []
    path = (model.get_submodule(".".join(parts[:length])) for length in range(len(parts), -1, -1))
    return next((module for module in path if callable(getattr(module, OWN_INIT, None))), None)


def _rehearse(calls: Sequence[Call], places: TensorPlaces) -> set[TensorPlace]:
    """Notes what each call touches; returns what all of them together overwrite."""
    tensors = {place: place.stand_in("meta") for place in places.all}
    random, touches = RandomState.save(), Touches(tensors)
    try:
        with standing_in(tensors), _drawn_once(), torch.no_grad(), torch.device("meta"):
            for call in calls:
                inside = places.of(call.module.modules())
                touches.begin()
                try:
                    with touches, _AsWithValues():
                        call.run()
                except UserError:
                    raise
                except Exception:  # code that cannot run without values says so when it is run with some
                    call.is_known = False
                    touches.touched |= set(inside)
                    touches.written |= set(inside)
                    touches.overwritten -= set(inside)
                touches.look_for_others(inside)
                call.touched, call.written = touches.touched, touches.written
    finally:
        random.restore()
    return touches.overwritten


def _components(together: Sequence[set[TensorPlace]]) -> dict[TensorPlace, int]:
    """Numbers, alike for places that are in one of the sets, and in others that have places in common with it."""
    parent: dict[TensorPlace, TensorPlace] = {}

    def top(place: TensorPlace) -> TensorPlace:
        while parent.setdefault(place, place) is not place:
            parent[place] = parent[parent[place]]
            place = parent[place]
        return place

    for places in together:
        first, *others = places
        for other in (first, *others):
            parent[top(other)] = top(first)
    numbers: dict[TensorPlace, int] = {}
    return {place: numbers.setdefault(top(place), len(numbers)) for place in list(parent)}
