"""Places: where the modules of a model that was built without memory have their tensors, and what stands in for these.

While code of the script's fills modules, other tensors stand in their places, on the meta device or with memory, so
that nothing of the model itself is written. Knows nothing of that code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.core.module_names import plain_name
from shoal.first_values.building import constant_of
from shoal.first_values.constants import Constant


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
