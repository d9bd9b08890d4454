"""One module's own parameters and buffers, filled by the module's own code, without touching the module's tensors.

While that code runs, scratch tensors stand in the places of the module's; what it has written to them are the values.
On the meta device the same is a rehearsal: it costs nothing, and shows what a module leaves unwritten. Random numbers
come from a seed of the module's name, so no order matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.data.seeds import RandomState, seed_from
from shoal.first_values.building import Recipe

RESETS = ("reset_parameters", "_reset_parameters")
OWN_INIT = "_init_weights"
"""A model's own way to fill its modules, which its constructor calls for each of them: Hugging Face's, and others'."""


@dataclass(slots=True, eq=False)
class Leaf:
    """A module with parameters or buffers of its own that have no values yet. `name`: as the plain model has it."""

    name: str
    module: nn.Module
    recipe: Recipe
    owner: nn.Module | None
    """The next module above it, or itself, that has an `_init_weights`."""
    forms: dict[str, Tensor] = field(default_factory=dict)  # each of its own shape and dtype, on the meta device
    """All parameters that are its own, and its buffers without values, by their names in the module, as built."""
    blanks: list[str] = field(default_factory=list)
    """Which of these have no values and no other leaf before it."""
    inits: list[Callable[[], object]] = field(default_factory=list)
    """What fills it, one after the other."""

    @property
    def title(self) -> str:
        """For a sentence."""
        kind = type(self.module).__name__
        return (
            f'"{self.name}" ({kind}: {", ".join(self.blanks)})' if self.name else f"{kind} ({', '.join(self.blanks)})"
        )

    def full_name(self, own: str) -> str:
        """Of one of its tensors."""
        return f"{self.name}.{own}" if self.name else own


class _Writes(TorchDispatchMode):
    """Notes which storages are written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            self._note(argument, value)
        for argument in func._schema.arguments:
            if argument.name in (kwargs or {}):
                self._note(argument, kwargs[argument.name])
        return func(*args, **(kwargs or {}))

    def _note(self, argument: Any, value: Any) -> None:
        if argument.alias_info is not None and argument.alias_info.is_write:
            self.storages |= {_storage(one) for one in tree_leaves(value) if isinstance(one, Tensor)}


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _scratch(leaf: Leaf, device: str) -> Iterator[dict[str, Tensor]]:
    """Stands in for all that is the module's own, so that nothing of it is written."""
    module, found = leaf.module, dict[str, Tensor]()
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    for name, form in leaf.forms.items():
        value = torch.zeros_like(form, device=device)
        found[name] = nn.Parameter(value, form.requires_grad) if name in parameters else value
    for name, buffer in buffers.items():
        if buffer is not None and name not in found:
            found[name] = buffer.to("meta") if device == "meta" else buffer.clone()
    try:
        for name, tensor in found.items():
            (module._parameters if name in parameters else module._buffers)[name] = tensor  # type: ignore[assignment]
        yield found
    finally:
        module._parameters.clear()
        module._parameters.update(parameters)
        module._buffers.clear()
        module._buffers.update(buffers)


def plan_inits(leaf: Leaf) -> list[str]:
    """Chooses what fills a leaf; returns the names that nothing fills."""
    module, after = leaf.module, _after(leaf)
    resets = [getattr(module, name) for name in RESETS if callable(getattr(module, name, None))][:1]
    lacking = list(leaf.blanks)
    for inits in ([after] if after is not None else [], [*resets, *([after] if after is not None else [])]):
        if inits:
            lacking = _unwritten(leaf, inits)
            leaf.inits = inits
        if not lacking:
            break
    plain = [name for name, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
    return [*lacking, *plain]


def _after(leaf: Leaf) -> Callable[[], object] | None:
    """What a model does with a module once it is built."""
    module, given, owner = leaf.module, leaf.recipe.init, leaf.owner
    if given is not None:
        return lambda: given(module)
    if owner is not None:
        return lambda: getattr(owner, OWN_INIT)(module)
    return None


def _unwritten(leaf: Leaf, inits: Sequence[Callable[[], object]]) -> list[str]:
    """Names of what these leave as it is, by a rehearsal; none where they can only be carried out for real."""
    random, writes = RandomState.save(), _Writes()
    try:
        with _scratch(leaf, "meta") as scratch, torch.no_grad(), torch.device("meta"), writes:
            before = {name: (tensor, _storage(tensor)) for name, tensor in scratch.items()}
            for init in inits:
                init()
            places = {name: (tensor, _storage(tensor)) for name, tensor in _own(leaf.module).items()}
    except UserError:
        raise
    except Exception:  # code that cannot run without values says so when it is run with some
        return []
    finally:
        random.restore()
    untouched = [name for name in leaf.blanks if name in places and _are_one(before[name], places[name])]
    return [name for name in untouched if before[name][1] not in writes.storages]


def _are_one(before: tuple[Tensor, int], after: tuple[Tensor, int]) -> bool:
    return before[0] is after[0] and before[1] == after[1]


def _own(module: nn.Module) -> dict[str, Tensor]:
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def make(leaves: Sequence[Leaf], seed: int) -> dict[str, Tensor]:  # each of its own shape and dtype
    """The values of all that is blank in these leaves, by full name. Some may reach into others: a child of theirs.

    Raises `UserError` where the script's code fails.
    """
    random, found = RandomState.save(), dict[str, Tensor]()
    try:
        with ExitStack() as stack, torch.no_grad():
            for leaf in leaves:
                stack.enter_context(_scratch(leaf, "cpu"))
            for leaf in reversed(leaves):  # a parent after its children, as constructors have it
                _run(leaf, seed)
            for leaf in leaves:
                own = _own(leaf.module)
                found.update({leaf.full_name(name): own[name].detach() for name in leaf.blanks})
    finally:
        random.restore()
    _check(leaves, found)
    return found


def _run(leaf: Leaf, seed: int) -> None:
    seed_from(f"{seed} init {leaf.name}")
    for init in leaf.inits:
        try:
            init()
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"module {leaf.title} of a model built within shoal.deferred() could not be initialised: {error!r}. "
                "An init may use what is the module's own alone."
            ) from error


def _check(
    leaves: Sequence[Leaf],
    found: Mapping[str, Tensor],  # each of its own shape and dtype
) -> None:
    for leaf in leaves:
        for name in leaf.blanks:
            value, form = found[leaf.full_name(name)], leaf.forms[name]
            if (value.shape, value.dtype) != (form.shape, form.dtype):
                raise UserError(
                    f'the init of module {leaf.title} made "{name}" of shape {tuple(value.shape)} and {value.dtype}; '
                    f"it was built with {tuple(form.shape)} and {form.dtype}."
                )
