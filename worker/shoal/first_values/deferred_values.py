"""The first values of a model that was built within `shoal.deferred()`: made or read where they are asked for.

Parameters by name, a unit at a time, as often as it takes: they come from seeds and files, so every call brings the
same ones, on every worker. Buffers are made at once. Knows nothing of blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.core.module_names import module_name
from shoal.first_values.building import Recipe, recipes
from shoal.first_values.file_names import FileNames
from shoal.first_values.inits import Inits
from shoal.first_values.making import make
from shoal.first_values.places import TensorPlace, TensorPlaces, refuse_hooked
from shoal.first_values.pretrained import Pretrained
from shoal.logs import get_logger

MANY_UNITS = 2
"""Some models fill embeddings and head at one time; where an init reaches into more, memory grows with the model."""

HOST = torch.device("cpu")

log = get_logger("shoal")


class DeferredValues:
    """`units`: by the id of a parameter, its unit."""

    def __init__(
        self, places: TensorPlaces, known: Mapping[nn.Module, Recipe], seed: int, units: Mapping[int, int]
    ) -> None:
        self._places, self._known, self._seed = places, known, seed
        self._inits = Inits(places, known)
        self._files = _files_of(known[place.module] for place in places.blank)
        self._names = FileNames(places.model, known)
        self._read: dict[str, tuple[Pretrained, str]] = {}
        """By the name of a parameter or buffer, where it is read instead of made."""
        self._unit_of: dict[str, int] = {}
        self._by_name = {place.name: place for place in places.blank}
        for place in places.blank:
            self._find_in_file(known[place.module], place)
            if place.is_parameter:
                self._unit_of[place.name] = units[id(place.now)]
        self._warn_of_unread()
        self._refuse_lacking()
        self._components = self._components_of_units()
        self._made: dict[int, dict[str, Tensor]] = {}
        """What the unit that was asked for last is made with, by component."""
        self.sums = torch.zeros(max(units.values(), default=0) + 1, dtype=torch.int64)
        """By unit, a checksum of what was made; 0: nothing."""

    def _components_of_units(self) -> dict[int, set[int]]:
        """What is made for each unit. A call that reaches further makes what it touches of others too."""
        found: dict[int, set[int]] = defaultdict(set)
        spanned: dict[int, set[int]] = defaultdict(set)
        for name, unit in self._unit_of.items():
            component = self._inits.component(self._by_name[name])
            if name not in self._read:
                found[unit].add(component)
            spanned[component].add(unit)
        for component in set().union(*found.values()):
            if len(spanned[component]) > MANY_UNITS:
                calls = self._inits.calls_of({component})
                widest = max(calls, key=lambda call: len(call.touched))
                means = "its init reaches into all of these, so a worker makes all of them at one time"
                log.warning("initialised_together", module=widest.title, units=len(spanned[component]), means=means)
        return found

    def _find_in_file(self, recipe: Recipe, place: TensorPlace) -> None:
        if recipe.weights is None:
            return
        files = self._files[recipe.weights]
        known = next((other for other in self._names.of(place.name, recipe) if other in files.names), None)
        if known is None:
            return
        if files.shape(known) != tuple(place.form.shape):
            raise UserError(
                f'"{place.name}" has shape {tuple(place.form.shape)}, and {files.shape(known)} in {files.path}; '
                "build the model that these weights are of."
            )
        self._read[place.name] = files, known

    def _warn_of_unread(self) -> None:
        for path, files in self._files.items():
            if all(found is not files for found, _ in self._read.values()):
                some = ", ".join(sorted(files.names)[:3])
                raise UserError(
                    f"none of the tensors of {files.path} is of this model (they are {some}, …); "
                    "build the model that these weights are of."
                )
            made = [
                place.name
                for place in self._places.blank
                if place.is_parameter and self._known[place.module].weights == path and place.name not in self._read
            ]
            if made:
                log.warning("not_in_the_weights", path=str(files.path), initialised=made[:20], count=len(made))

    def _refuse_lacking(self) -> None:
        """One sentence for all that nothing fills: parameters, buffers, and tensors that are plain attributes."""
        lacking: dict[nn.Module, list[str]] = {}
        for place in self._places.blank:
            if place.name not in self._read:
                lacking.setdefault(place.module, [])
        for place in self._inits.unfilled():
            if place.name not in self._read:
                lacking[place.module].append(place.own)
        for module, names in lacking.items():
            names += [own for own, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
        called = {module: module_name(name) for name, module in self._places.model.named_modules()}
        titles = [
            f"{', '.join(names)} of {type(module).__name__}" + (f' "{called[module]}"' if called[module] else "")
            for module, names in lacking.items()
            if names
        ]
        if titles:
            raise UserError(
                f"these were built within shoal.deferred(), and nothing fills them: {'; '.join(titles)}. Give their "
                "classes a reset_parameters() that fills what is their own, or pass a function that does, as "
                "shoal.deferred(init=…)."
            )

    def __contains__(self, name: object) -> bool:
        """Whether a parameter has its first value from here."""
        return name in self._unit_of

    def unit(self, name: str) -> int:
        """Of such a parameter."""
        return self._unit_of[name]

    def part(self, name: str, first: int, last: int) -> Tensor:  # (last - first,) of the script's dtype, or a file's
        """Elements of a parameter, flat."""
        if name in self._read:
            files, known = self._read[name]
            return files.part(known, first, last)
        return self._of_unit(self._unit_of[name])[name].reshape(-1)[first:last]

    def _of_unit(self, unit: int) -> dict[str, Tensor]:
        needed = self._components[unit]
        for component in self._made.keys() - needed:  # before others are made
            del self._made[component]
        lacking = needed - self._made.keys()
        if lacking:
            made = self._make(lacking)
            self._made |= {component: {} for component in lacking}
            for place, value in made.items():
                self._made[self._inits.component(place)][place.name] = value
        found = {name: value for some in self._made.values() for name, value in some.items()}
        if lacking:
            self.sums[unit] = checksum_of([found[name] for name in sorted(found) if self._unit_of.get(name) == unit])
        return found

    def _make(self, components: set[int]) -> dict[TensorPlace, Tensor]:  # each of its place's form
        made = make(self._places, self._inits, components, self._seed)
        for place in self._places.blank:
            if self._inits.component(place) in components and place.name not in self._read and place not in made:
                raise UserError(
                    f'nothing fills "{place.name}" ({type(place.module).__name__}), which was built within '
                    "shoal.deferred(): its init did not write to it."
                )
        return made

    def forget(self) -> None:
        """What was made last."""
        self._made.clear()

    def first_name(self, unit: int) -> str:
        """Of a parameter of that unit, for a sentence."""
        return next(name for name, number in self._unit_of.items() if number == unit)

    def identity(self) -> str:
        """What workers compare before any value is made."""
        return f"{len(self._unit_of)} parameters"

    def weights(self) -> str:
        """The same of the files that are read; empty where there are none."""
        return " ".join(sorted(files.identity() for files in self._files.values()))

    @torch.no_grad()
    def make_buffers(self, device: torch.device) -> None:
        """Those of the model have their values from now on, there."""
        buffers = [place for place in self._places.blank if not place.is_parameter]
        components = {self._inits.component(place) for place in buffers if place.name not in self._read}
        for component in sorted(components):
            made = self._make({component})
            for place in buffers:
                if place in made and place.name not in self._read:
                    _put(place, made[place].to(device, copy=True))
        for place in buffers:
            if place.name in self._read:
                _put(place, self._whole(place.name, place.form).to(device))

    def _whole(self, name: str, form: Tensor) -> Tensor:  # of the form's shape and dtype
        files, known = self._read[name]
        return files.part(known, 0, form.numel()).to(form.dtype).view(form.shape)


def _put(place: TensorPlace, value: Tensor) -> None:
    buffer = place.now
    assert buffer is not None
    torch.utils.swap_tensors(buffer, value)


def checksum_of(values: Sequence[Tensor]) -> int:  # each of its own shape and dtype
    """In 63 bits, never 0."""
    return sum(_words(value) * (2 * number + 1) for number, value in enumerate(values)) & (1 << 63) - 1 | 1


def _words(value: Tensor) -> int:
    """A sum over its bytes, in machine words."""
    content = value.contiguous().reshape(-1).view(torch.uint8)
    whole = content.numel() // 8 * 8
    return int(content[:whole].view(torch.int64).sum()) + int(content[whole:].sum(dtype=torch.int64))


def deferred_values(
    model: nn.Module, seed: int, units: Mapping[int, int], device: torch.device = HOST
) -> DeferredValues | None:
    """Of the parameters that have no values; None where all have. Buffers have theirs from now on, on the device.

    Raises `UserError` naming all modules that cannot be filled.
    """
    if not any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers())):
        return None
    places = TensorPlaces(model)
    refuse_hooked(places.blank)
    known = recipes(model)
    for place in places.blank:
        if place.module not in known:
            raise UserError(
                f'"{place.name}" ({type(place.module).__name__}) lies on the meta device, where nothing has values; '
                "build the model within `with shoal.deferred():`."
            )
    found = DeferredValues(places, known, seed, units)
    found.make_buffers(device)
    return found


def _files_of(recipes: Iterable[Recipe]) -> dict[Path, Pretrained]:
    return {path: Pretrained(path) for path in dict.fromkeys(recipe.weights for recipe in recipes) if path is not None}
