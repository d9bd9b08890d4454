"""That nobody writes gradients between `engine.backward` and `engine.step`: some may have left for their owners.

Looked for in each micro-batch: by version counters, by what lies at `.grad`, and past both (`.data`, numpy) by
comparing one window of the flats, another one each time. Parameters are looked at in parameter_guards.py.

Where gradients were taken already there is no `.grad` to look at. With None there, `clip_grad_norm_` and all else that
passes over parameters without a gradient would do nothing, and say nothing. So a `TakenGradient` is there, and every
use of it is refused in a sentence. It is sparse without a value: it takes no memory, and a backward pass of the
script's own puts another tensor in its place rather than adding to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.blocks.flat import Gradients, versions
from shoal.blocks.lane_sums import LaneSums
from shoal.blocks.released import looks_at_no_value
from shoal.exchange.pieces import Extent
from shoal.guards.comparisons import Checksum, Comparisons
from shoal.guards.parameter_guards import Windows
from shoal.guards.step_guard import StepGuard

GRADIENTS_CHANGED = (
    "gradients were changed between engine.backward and engine.step (clip_grad_norm_ and the like), when some have "
    "already been sent to other workers. Remove this from the loop; to clip, set `gradient_clipping` in the config."
)
TAKEN = (
    "gradients cannot be read or changed between engine.backward and engine.step where they are sharded (ZeRO stage "
    "2) or in half precision: they have already left for their owners. Remove this from the loop (clip_grad_norm_, "
    "p.grad and the like); to clip, set `gradient_clipping` in the config; to look at a gradient use "
    "parameter.register_hook."
)


@dataclass(slots=True)
class _Made:
    """What `engine.backward` left."""

    gradients: Gradients
    versions: list[int]
    parts: list[Tensor]
    """Of the window at hand."""
    content: list[Checksum]


class GradientGuard(StepGuard):
    """Between `engine.backward` and `engine.step` gradients are looked at only."""

    def __init__(self, sums: LaneSums, parameters: Sequence[nn.Parameter], comparisons: Comparisons) -> None:
        self._sums, self._parameters, self._comparisons = sums, parameters, comparisons
        self._windows = Windows(sums.live.flats)
        self._made: _Made | None = None

    def before_backward(self, _: str, is_continued: bool, /) -> None:
        if is_continued:
            self.before_step()

    def after_backward(self, arriving: Iterable[Extent], /) -> None:
        self._windows.turn()
        gradients = self._sums.live
        parts = self._windows.of_all_but(gradients.flats, arriving)
        content = list(map(self._comparisons.checksum, parts))
        self._made = _Made(gradients, versions(gradients.flats), parts, content)

    def before_step(self) -> None:
        """Raises `UserError` where the script has changed them since."""
        made = self._made
        if made is None:
            return
        if versions(made.gradients.flats) != made.versions or not made.gradients.are_in_place(self._parameters):
            raise UserError(GRADIENTS_CHANGED)
        for before, part in zip(made.content, made.parts, strict=True):
            self._comparisons.expect_equal(before, self._comparisons.checksum(part), GRADIENTS_CHANGED)
        self._made = None


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


def _without_values(
    parameter: nn.Parameter,  # of its own shape
) -> Tensor:  # of the same shape
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=torch.sparse_coo)


class TakenGradientGuard(StepGuard):
    """Where gradients are taken from their parameters: the script can use none, and must put none there."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._taken = [Tensor._make_subclass(TakenGradient, _without_values(parameter)) for parameter in parameters]

    def before_backward(self, _: str, is_continued: bool, /) -> None:
        if is_continued:
            self.before_step()

    @looks_at_no_value
    def after_backward(self, _: Iterable[Extent], /) -> None:
        """Refuse each use of a gradient by the script from now on."""
        for parameter, taken in zip(self._parameters, self._taken, strict=True):
            parameter.grad = taken

    @looks_at_no_value
    def before_step(self) -> None:
        """Raises `UserError` where the script has given a parameter a gradient; None is none."""
        pairs = zip(self._parameters, self._taken, strict=True)
        if not all(parameter.grad is None or parameter.grad is taken for parameter, taken in pairs):
            raise UserError(GRADIENTS_CHANGED)
