"""The first values of a model that was built within `shoal.deferred()`: made or read where they are asked for.

Parameters by name, a unit at a time, as often as it takes: they come from seeds and files, so every call brings the
same ones, on every worker. Buffers are made at once. Knows nothing of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.core.module_names import named_parameters, plain_name
from shoal.first_values.building import Recipe, recipes
from shoal.first_values.leaf_init import OWN_INIT, Leaf, make, plan_inits
from shoal.first_values.pretrained import Pretrained
from shoal.logs import get_logger

log = get_logger("shoal")


class DeferredValues:
    """`units`: by the id of a parameter, its unit."""

    def __init__(self, model: nn.Module, leaves: list[Leaf], seed: int, units: Mapping[int, int]) -> None:
        self._seed = seed
        self._files = _files_of(leaves)
        self._aliases = _aliases(model)
        self._read: dict[str, tuple[Pretrained, str]] = {}
        """By the name of a parameter or buffer, where it is read instead of made."""
        self._leaves: dict[int, list[Leaf]] = {}
        """Those that make parameters, by unit."""
        self._unit_of: dict[str, int] = {}
        for leaf in leaves:
            self._choose(leaf, units)
        self._warn_of_unread(leaves)
        _refuse_lacking(leaves, self._read)
        self._made: tuple[int, dict[str, Tensor]] | None = None
        self.sums = torch.zeros(max(units.values(), default=0) + 1, dtype=torch.int64)
        """By unit, a checksum of what was made; 0: nothing."""

    def _choose(self, leaf: Leaf, units: Mapping[int, int]) -> None:
        for own in leaf.blanks:
            name = leaf.full_name(own)
            self._find_in_file(leaf.recipe, name, leaf.forms[own])
            if own in leaf.module._parameters:
                unit = self._unit_of[name] = units[id(leaf.module._parameters[own])]
                if name not in self._read and leaf not in self._leaves.setdefault(unit, []):
                    self._leaves[unit].append(leaf)

    def _find_in_file(self, recipe: Recipe, name: str, form: Tensor) -> None:
        if recipe.weights is None:
            return
        files = self._files[recipe]
        known = next((other for other in self._aliases.get(name, [name]) if other in files.names), None)
        if known is None:
            return
        if files.shape(known) != tuple(form.shape):
            raise UserError(
                f'"{name}" has shape {tuple(form.shape)}, and {files.shape(known)} in {files.path}; '
                "build the model that these weights are of."
            )
        self._read[name] = files, known

    def _warn_of_unread(self, leaves: list[Leaf]) -> None:
        for files in self._files.values():
            read = [name for found, name in self._read.values() if found is files]
            if not read:
                some = ", ".join(sorted(files.names)[:3])
                raise UserError(
                    f"none of the tensors of {files.path} is of this model (they are {some}, …); "
                    "build the model that these weights are of."
                )
            made = [
                leaf.full_name(own)
                for leaf in leaves
                for own in leaf.blanks
                if leaf.recipe.weights is not None
                and self._files[leaf.recipe] is files
                and own in leaf.module._parameters
                and leaf.full_name(own) not in self._read
            ]
            if made:
                log.warning("not_in_the_weights", path=str(files.path), initialised=made[:20], count=len(made))

    def __contains__(self, name: str) -> bool:
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
        if self._made is None or self._made[0] != unit:
            self._made = None  # before the next one is made
            made = make(self._leaves[unit], self._seed)
            self._made = unit, made
            names = sorted(name for name in made if self._unit_of.get(name) == unit)
            self.sums[unit] = sum(_words(made[name]) * (2 * number + 1) for number, name in enumerate(names)) | 1
        return self._made[1]

    def forget(self) -> None:
        """The unit that was made last."""
        self._made = None

    def first_name(self, unit: int) -> str:
        """Of a parameter of that unit, for a sentence."""
        return next(name for name, number in self._unit_of.items() if number == unit)

    def identity(self) -> str:
        """What workers compare before any value is made."""
        kinds = sorted(f"{files.identity()}" for files in self._files.values())
        return f"{len(self._unit_of)} parameters {' '.join(kinds)}".rstrip()

    @torch.no_grad()
    def make_buffers(self, leaves: list[Leaf]) -> None:
        """Those of the model have their values from now on."""
        for leaf in leaves:
            own = [name for name in leaf.blanks if name in leaf.module._buffers]
            made = make([leaf], self._seed) if any(leaf.full_name(name) not in self._read for name in own) else {}
            for name in own:
                full, form, buffer = leaf.full_name(name), leaf.forms.pop(name), leaf.module._buffers[name]
                assert buffer is not None
                value = made[full].clone() if full not in self._read else self._whole(full, form)
                torch.utils.swap_tensors(buffer, value)
                leaf.blanks.remove(name)

    def _whole(self, name: str, form: Tensor) -> Tensor:  # of the form's shape and dtype
        files, known = self._read[name]
        return files.part(known, 0, form.numel()).to(form.dtype).view(form.shape)


def _words(value: Tensor) -> int:
    """A sum over its bytes, in machine words."""
    content = value.contiguous().reshape(-1).view(torch.uint8)
    whole = content.numel() // 8 * 8
    total = int(content[:whole].view(torch.int64).sum()) + int(content[whole:].sum(dtype=torch.int64))
    return total & ((1 << 40) - 1)


def deferred_values(model: nn.Module, seed: int, units: Mapping[int, int]) -> DeferredValues | None:
    """Of the parameters that have no values; None where all have. Buffers have theirs from now on.

    Raises `UserError` naming all modules that cannot be filled.
    """
    leaves = _leaves(model)
    if not leaves:
        return None
    found = DeferredValues(model, leaves, seed, units)
    found.make_buffers(leaves)
    return found


def _leaves(model: nn.Module) -> list[Leaf]:
    """In registration order; a tensor that several register belongs to the first."""
    known, seen, found = recipes(model), set[int](), list[Leaf]()
    for name, module in model.named_modules():
        own = {key: tensor for key, tensor in module._parameters.items() if tensor is not None}
        own |= {key: tensor for key, tensor in module._buffers.items() if tensor is not None and tensor.is_meta}
        blanks = [key for key, tensor in own.items() if tensor.is_meta and id(tensor) not in seen]
        if not blanks:
            continue
        seen |= {id(own[key]) for key in blanks}
        for key in blanks:
            _refuse_hooked(f"{plain_name(name)}.{key}", own[key])
        if module not in known:
            raise UserError(
                f'"{plain_name(name)}" ({type(module).__name__}) lies on the meta device, where nothing has values; '
                "build the model within `with shoal.deferred():`."
            )
        forms = {key: _form(tensor) for key, tensor in own.items()}
        found.append(Leaf(plain_name(name), module, known[module], _owner(model, name), forms, blanks))
    return found


def _form(tensor: Tensor) -> Tensor:  # of the same shape and dtype, on the meta device
    return torch.empty_like(tensor, device="meta").detach().requires_grad_(tensor.requires_grad)


def _refuse_hooked(name: str, tensor: Tensor) -> None:
    """It becomes another tensor under the same name."""
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise UserError(
            f'parameter "{name}" has a hook and no values yet; register hooks after shoal.initialize on what was built '
            "within shoal.deferred()."
        )


def _owner(model: nn.Module, name: str) -> nn.Module | None:
    parts = name.split(".") if name else []
    for length in range(len(parts), -1, -1):
        module = model.get_submodule(".".join(parts[:length]))
        if callable(getattr(module, OWN_INIT, None)):
            return module
    return None


def _files_of(leaves: list[Leaf]) -> dict[Recipe, Pretrained]:
    paths = {leaf.recipe.weights for leaf in leaves if leaf.recipe.weights is not None}
    files = {path: Pretrained(path) for path in paths}
    return {leaf.recipe: files[leaf.recipe.weights] for leaf in leaves if leaf.recipe.weights is not None}


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """All names of a parameter, by its first."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(plain_name(name))
    first = {id(parameter): name for name, parameter in named_parameters(model)}
    return {first[key]: names for key, names in by_id.items()}


def _refuse_lacking(leaves: list[Leaf], read: Mapping[str, object]) -> None:
    """One sentence for all."""
    titles = []
    for leaf in leaves:
        if all(leaf.full_name(own) in read for own in leaf.blanks):
            continue
        lacking = [own for own in plan_inits(leaf) if leaf.full_name(own) not in read]
        if lacking:
            kind = type(leaf.module).__name__
            titles.append(
                f'{", ".join(lacking)} of {kind} "{leaf.name}"' if leaf.name else f"{', '.join(lacking)} of {kind}"
            )
    if titles:
        raise UserError(
            f"these were built within shoal.deferred(), and nothing fills them: {'; '.join(titles)}. Give their "
            "classes a reset_parameters() that fills what is their own, or pass a function that does, as "
            "shoal.deferred(init=…)."
        )
