"""Units: the parts of a model whose parameters come and go together; and the names of tensors in the plain model.

Units are the children of the outermost `nn.ModuleList`s and `nn.Sequential`s that have more than one, and outside of
these the experts of a layer; or, where classes are named (`shoal.units`, else the model's own `_no_split_modules`), the
outermost modules of these classes. The rest is in runs of registration order: embeddings | layer | layer | norm and
head. A bucket of the layout ends where a unit ends.

`torch.compile` wraps a module, or a part of one, and puts `_orig_mod.` into the names below it. Layouts, checkpoints,
exports and fingerprints go by the names without it, so compiled and plain runs can read each other's. Pure: functions
of the module tree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from shoal_protos.errors import UserError
from torch import Tensor, nn

LISTS = (nn.ModuleList, nn.Sequential)
STAYS_TOGETHER = "is_one_unit"
"""The attribute of a module that is a unit wherever it is, as its lists have not as many children on every process."""


def unit_numbers(model: nn.Module, classes: Collection[str] = ()) -> dict[int, int]:
    """Unit by the id of the parameter. One that several units register belongs to the first of them.

    Raises `UserError` for a class of `classes` that no module has.
    """
    check_classes(model, classes, "shoal.units")
    of, numbers = _unit_of_modules(model, classes), dict[int, int]()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            numbers.setdefault(id(parameter), of[id(module)])
    return numbers


def unit_of_name(model: nn.Module, classes: Collection[str] = ()) -> Callable[[str], int]:
    """What finds the unit that a name of a parameter is in, whichever unit has the parameter."""
    of = _unit_of_modules(model, classes)
    return lambda name: of[id(model.get_submodule(name.rpartition(".")[0]))]


def _unit_of_modules(model: nn.Module, classes: Collection[str]) -> dict[int, int]:
    """By the id of a module, the unit of what it registers itself: an odd number within a module that is one."""
    found, number = dict[int, int](), 0
    for part, is_unit in _parts(model, _chosen(model, classes)):
        number += is_unit
        for module in part.modules() if is_unit else (part,):
            found.setdefault(id(module), number)
        number += is_unit
    return found


def unit_modules(model: nn.Module, classes: Collection[str] = ()) -> list[nn.Module]:
    """The modules that are units, each once, in registration order; `classes` as for `unit_numbers`.

    What is left over between them is no module.
    """
    found = [part for part, is_unit in _parts(model, _chosen(model, classes)) if is_unit]
    return list(dict.fromkeys(found))


def check_classes(model: nn.Module, classes: Collection[str], key: str) -> None:
    """Raises `UserError` for a class, named by the config's `key`, that no module has."""
    found = class_names(model)
    for name in classes:
        if name not in found:
            raise UserError(
                f'`{key}` names "{name}", and no module of the model is of that class. '
                f"Its classes: {', '.join(sorted(found))}."
            )


def class_names(model: nn.Module) -> set[str]:
    """Of all modules of a model."""
    return {type(module).__name__ for module in model.modules()}


def _chosen(model: nn.Module, classes: Collection[str]) -> set[str]:
    return class_names(model) & set(classes or getattr(model, "_no_split_modules", None) or ())


def _parts(module: nn.Module, chosen: Collection[str]) -> Iterator[tuple[nn.Module, bool]]:
    """Modules in registration order, and whether each is a unit, with all that is in it; if not, it stands for itself
    alone.
    """
    yield module, False
    for child in module.children():
        if type(child).__name__ in chosen if chosen else _is_in_a_list(module) or hasattr(child, STAYS_TOGETHER):
            yield child, True
        else:
            yield from _parts(child, chosen)


def _is_in_a_list(parent: nn.Module) -> bool:
    return isinstance(parent, LISTS) and len(parent) > 1


_WRAPPER = "_orig_mod."


def plain_name(name: str) -> str:
    """`_orig_mod.block.weight` → `block.weight`."""
    return name.replace(_WRAPPER, "")


def module_name(name: str) -> str:
    """Of a module, not of a tensor: `block._orig_mod` → `block`."""
    return plain_name(f"{name}.")[:-1]


def is_wrapper(module: nn.Module) -> bool:
    """Whether `torch.compile` has put it around another one."""
    return _WRAPPER.rstrip(".") in module._modules


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each once, under its first name."""
    return ((plain_name(name), parameter) for name, parameter in module.named_parameters())


def named_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each once, persistent or not."""
    return ((plain_name(name), buffer) for name, buffer in module.named_buffers())


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `module.state_dict`, not detached, under all their names."""
    return ((plain_name(name), value) for name, value in module.state_dict(keep_vars=True).items())
