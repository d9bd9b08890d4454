"""What a script finds as `.grad` between `engine.backward` and `engine.step` where gradients have been taken already.

With None there, `clip_grad_norm_` and whatever else passes over parameters without a gradient would do nothing, and
say nothing. So every use of it is refused in a sentence. It is sparse without a value: it takes no memory, and a
backward pass of the script's own puts another tensor in its place rather than adding to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.blocks.released import looks_at_no_value

TAKEN = (
    "gradients cannot be read or changed between engine.backward and engine.step where they are sharded (ZeRO stage "
    "2) or in half precision: they have already left for their owners. Remove this from the loop (clip_grad_norm_, "
    "p.grad and the like); to clip, set `gradient_clipping` in the config; to look at a gradient use "
    "parameter.register_hook."
)


class TakenGradient(Tensor):
    """Of a parameter's shape and dtype, and good for nothing."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises `UserError`, whatever is done with it; but a compiler may look at it where it looks at a parameter."""
        if _is_compiling():
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise UserError(TAKEN)


def _is_compiling() -> bool:
    """Whether a forward is being compiled: then the compiler describes parameters with their `.grad`."""
    return torch._guards.TracingContext.try_get() is not None or torch.compiler.is_compiling()


class TakenGradients:
    """Those of all parameters that a worker trains."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._all = [Tensor._make_subclass(TakenGradient, _without_values(parameter)) for parameter in parameters]

    @looks_at_no_value
    def put_in_place(self, parameters: Sequence[nn.Parameter]) -> None:
        """`engine.backward` has come to its end."""
        for parameter, taken in zip(parameters, self._all, strict=True):
            parameter.grad = taken

    @looks_at_no_value
    def are_in_place(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether no parameter has another gradient than these; None counts as in place."""
        return all(
            parameter.grad is None or parameter.grad is taken
            for parameter, taken in zip(parameters, self._all, strict=True)
        )


def _without_values(
    parameter: nn.Parameter,  # of its own shape
) -> Tensor:  # of the same shape
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=torch.sparse_coo)
