"""Units: the parts of a model whose parameters come and go together. A bucket of the layout ends where a unit ends.

The children of the outermost `nn.ModuleList`s and `nn.Sequential`s that have more than one; or, where classes are named
(`shoal.units`, else the model's own `_no_split_modules`), the outermost modules of these classes. What is left over is
in runs of registration order: embeddings | layer | layer | norm and head. Pure: a function of the module tree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from shoal_protos.errors import UserError
from torch import nn

LISTS = (nn.ModuleList, nn.Sequential)


def unit_numbers(model: nn.Module, classes: Collection[str] = ()) -> dict[int, int]:
    """Unit by the id of the parameter. One that several units register belongs to the first of them.

    Raises `UserError` for a class of `classes` that no module has.
    """
    found = {type(module).__name__ for module in model.modules()}
    for name in classes:
        if name not in found:
            raise UserError(
                f'`shoal.units` names "{name}", and no module of the model is of that class. '
                f"Its classes: {', '.join(sorted(found))}."
            )
    chosen = found & set(classes or getattr(model, "_no_split_modules", None) or ())
    numbers: dict[int, int] = {}
    for number, parameters in enumerate(_units(model, chosen)):
        for parameter in parameters:
            numbers.setdefault(id(parameter), number)
    return numbers


def _units(model: nn.Module, chosen: Collection[str]) -> Iterator[list[nn.Parameter]]:
    """The parameters of each unit."""
    left_over: list[nn.Parameter] = []
    for parameters, is_unit in _parts(model, chosen):
        if not is_unit:
            left_over += parameters
            continue
        yield left_over
        yield parameters
        left_over = []
    yield left_over


def _parts(module: nn.Module, chosen: Collection[str]) -> Iterator[tuple[list[nn.Parameter], bool]]:
    """Parameters in registration order, and whether they are a unit."""
    yield list(module.parameters(recurse=False)), False
    for child in module.children():
        if type(child).__name__ in chosen if chosen else _is_in_a_list(module):
            yield list(child.parameters()), True
        else:
            yield from _parts(child, chosen)


def _is_in_a_list(parent: nn.Module) -> bool:
    return isinstance(parent, LISTS) and len(parent) > 1
