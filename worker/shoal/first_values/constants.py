"""Constants that constructors give to parameters and buffers: `nn.Parameter(torch.ones(n))`, `torch.tensor(2.0)`.

On the meta device nothing has values; so within `shoal.deferred()` it is noted which call has made a tensor, as long as
nothing else is written to it. Only calls that take no tensors: a constant costs nothing until it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

FACTORIES: frozenset[Any] = frozenset(
    {torch.tensor, torch.ones, torch.zeros, torch.full, torch.arange, torch.eye, torch.linspace}
)

Constant = Callable[[], Tensor]
"""Makes it, with values."""


class Constants(TorchFunctionMode):
    """Of the tensors that are made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[torch.UntypedStorage, Constant]] = {}
        """By the key of its storage, which is kept: another one would get the key."""

    def of(self, tensor: Tensor) -> Constant | None:
        """What such a tensor, or a parameter made of it, is when its constructor is done."""
        storage = tensor.untyped_storage()
        _, constant = self._known.get(int(storage._cdata), (None, None))
        whole = tensor.storage_offset() == 0 and tensor.nbytes == storage.nbytes() and tensor.is_contiguous()
        return constant if whole else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        made = func(*args, **named)
        if func in FACTORIES and isinstance(made, Tensor) and made.is_meta and "out" not in named:
            inputs = [*tree_leaves(args), *tree_leaves(named)]
            if not any(isinstance(one, Tensor) for one in inputs):
                storage = made.untyped_storage()
                self._known[int(storage._cdata)] = storage, _again(func, args, named)
        elif _writes(getattr(func, "__name__", "")) or "out" in named:
            for one in (*tree_leaves(args), *tree_leaves(named)):
                if isinstance(one, Tensor):
                    self._known.pop(int(one.untyped_storage()._cdata), None)
        return made


def _again(func: Any, args: Any, named: dict[str, Any]) -> Constant:
    dtype = torch.get_default_dtype()

    def make() -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            made: Tensor = func(*args, **{**named, "device": "cpu", "requires_grad": False})
            return made
        finally:
            torch.set_default_dtype(before)

    return make


def _writes(name: str) -> bool:
    """`normal_`, `__setitem__`, `__iadd__`; not `__getitem__`."""
    return name.endswith("_") and (not name.startswith("__") or name.startswith(("__i", "__set")))
