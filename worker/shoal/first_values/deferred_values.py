"""The first values of a model that was built within `shoal.deferred()`: made or read where they are asked for.

`DeferredValues` gives parameters by name, a unit at a time, as often as it takes; buffers are made at once. `make` runs
the calls that fill some tensors, on tensors that stand in for these. Values come from files, or from random numbers of
the job's seed and the module's name, so every call brings the same ones on every worker, independent of what else is
made and when.

`FileNames` are the names that a tensor may have in a file of weights: its own, all of them where it is tied; where a
part of the model was built in the context that names the file and wrapped later, the names within that part; and where
that part names the body of its family's models (Hugging Face's `base_model_prefix`), the names in a file of the body,
or of the whole. Knows nothing of blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from shoal_protos.errors import UserError
from shoal_protos.training_log import get_logger
from torch import Tensor, nn

from shoal.core.units import module_name, plain_name
from shoal.data.seeds import RandomState, seed_from
from shoal.first_values.building import Recipe, TensorPlace, TensorPlaces, recipes, refuse_hooked, standing_in
from shoal.first_values.inits import Call, Inits, Touches
from shoal.first_values.pretrained import Pretrained

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


class FileNames:
    """`known`: of modules, by what they were built."""

    def __init__(self, model: nn.Module, known: Mapping[nn.Module, Recipe]) -> None:
        self._aliases = _aliases(model)
        self._parts = _parts(model, known)

    def of(self, name: str, recipe: Recipe) -> list[str]:
        """Of a tensor that was built so: its own name first."""
        names = self._aliases.get(name, [name])
        parts = self._parts.get(id(recipe), [])
        if len(parts) != 1:  # of two parts both may have such a name
            return names
        start, body = parts[0]
        inner = [one.removeprefix(start) for one in names if one.startswith(start)]
        bodies = [other for one in inner for other in _of_a_body(one, body)] if body else []
        return [*names, *inner, *bodies]


def _of_a_body(name: str, body: str) -> list[str]:
    start = f"{body}."
    return [name.removeprefix(start)] if name.startswith(start) else [f"{start}{name}"]


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """All names of a parameter, its first one first, by that."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(plain_name(name))
    return {names[0]: names for names in by_id.values()}


def _parts(model: nn.Module, known: Mapping[nn.Module, Recipe]) -> dict[int, list[tuple[str, str]]]:
    """The outermost modules that were built in one context, by the id of its recipe: the beginning of their names, and
    what they call the body of a model.
    """
    found: dict[int, list[tuple[str, str]]] = {}
    above: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parent = above.get(name.rpartition(".")[0]) if name else None
        recipe = known.get(module)
        if recipe is not None and (parent is None or known.get(parent) is not recipe):
            plain = module_name(name)
            body = getattr(module, "base_model_prefix", "")
            start = f"{plain}." if plain else ""
            found.setdefault(id(recipe), []).append((start, body if isinstance(body, str) else ""))
        above[name] = module
    return found


def make(
    places: TensorPlaces, inits: Inits, components: set[int], seed: int
) -> dict[TensorPlace, Tensor]:  # each of its form
    """The values of what is blank in these components, as far as it is written to.

    Raises `UserError` where the script's code fails.
    """
    calls = inits.calls_of(components)
    wanted = [place for place in places.all if inits.component(place) in components]
    around = {part for call in calls for part in call.module.modules()}
    tensors = {place: place.stand_in("meta") for place in places.of(around)}
    tensors |= {place: place.stand_in("cpu") for place in wanted}
    random, touches = RandomState.save(), Touches(tensors)
    written = {place for place in wanted if place.constant is not None}
    try:
        with standing_in(tensors), torch.no_grad():
            for call in calls:
                touches.begin()
                _run(call, seed, touches)
                touches.look_for_others([place for place in places.of(call.module.modules()) if place in tensors])
                _refuse_others(call, touches.written)
                written |= touches.written
            found = {place: _value(place) for place in wanted if place.is_blank and place in written}
    finally:
        random.restore()
    return found


def _run(call: Call, seed: int, touches: Touches) -> None:
    seed_from(f"{seed} {call.purpose} {call.name}")
    try:
        with touches:
            call.run()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"module {call.title} of a model built within shoal.deferred() could not be initialised: {error!r}. "
            "An init is asked for every module, as by model.apply(init), and may use what is in that module."
        ) from error


def _refuse_others(call: Call, written: set[TensorPlace]) -> None:
    others = written - call.touched
    if others:
        raise UserError(
            f"the init of module {call.title} of a model built within shoal.deferred() wrote to "
            f'"{min(place.name for place in others)}", and did not when it was tried on tensors without values. What '
            "it writes to may not depend on values."
        )


def _value(place: TensorPlace) -> Tensor:  # of the place's form
    value, form = place.now, place.form
    kind = (value.shape, value.dtype) if value is not None else (None, None)
    if value is None or kind != (form.shape, form.dtype):
        raise UserError(
            f'the init of module "{place.name.rpartition(".")[0]}" ({type(place.module).__name__}) made '
            f'"{place.own}" of shape {kind[0] and tuple(kind[0])} and {kind[1]}; it was built with '
            f"{tuple(form.shape)} and {form.dtype}."
        )
    return value.detach()
