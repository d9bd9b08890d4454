"""Under which names a file of weights may have a tensor of the model.

Its own names, all of them where it is tied; where one part of the model was built in the context that names the file,
and wrapped by the script later, the names that the tensor has in that part; and where that part says by what name a
model of its family has the body (Hugging Face's `base_model_prefix`), the names in a file of the body, or of the whole.
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
