"""Under which names a file of weights may have a tensor of the model.

Its own names, all of them where it is tied; and where one part of the model was built in the context that names the
file, and wrapped by the script later, the names that the tensor has in that part.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shoal.core.module_names import module_name, plain_name
from shoal.first_values.building import Recipe


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
        return names + [one.removeprefix(parts[0]) for one in names if one.startswith(parts[0])]


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """All names of a parameter, its first one first, by that."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(plain_name(name))
    return {names[0]: names for names in by_id.values()}


def _parts(model: nn.Module, known: Mapping[nn.Module, Recipe]) -> dict[int, list[str]]:
    """The outermost modules that were built in one context, as beginnings of names, by the id of its recipe."""
    found: dict[int, list[str]] = {}
    above: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parent = above.get(name.rpartition(".")[0]) if name else None
        recipe = known.get(module)
        if recipe is not None and (parent is None or known.get(parent) is not recipe):
            plain = module_name(name)
            found.setdefault(id(recipe), []).append(f"{plain}." if plain else "")
        above[name] = module
    return found
