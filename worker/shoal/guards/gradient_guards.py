"""That nobody writes gradients between `engine.backward` and `engine.step`: some may have left for their owners.

Looked for in each micro-batch: by version counters, by what lies at `.grad`, and past both (`.data`, numpy) by
comparing one window of the flats, another one each time. Parameters are looked at in parameter_guards.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.blocks.flat import Gradients, versions
from shoal.blocks.lane_sums import LaneSums
from shoal.blocks.taken_gradients import TakenGradients
from shoal.exchange.pieces import Extent
from shoal.guards.comparisons import Checksum, Comparisons
from shoal.guards.parameter_guards import Windows
from shoal.guards.step_guard import StepGuard


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


class TakenGradientGuard(StepGuard):
    """Where gradients are taken from their parameters: the script can use none, and must put none there."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters, self._taken = parameters, TakenGradients(parameters)

    def before_backward(self, _: str, is_continued: bool, /) -> None:
        if is_continued:
            self.before_step()

    def after_backward(self, _: Iterable[Extent], /) -> None:
        """Whatever the script does with a gradient from now on is refused."""
        self._taken.put_in_place(self._parameters)

    def before_step(self) -> None:
        """Raises `UserError` where the script has given a parameter a gradient."""
        if not self._taken.are_in_place(self._parameters):
            raise UserError(GRADIENTS_CHANGED)


GRADIENTS_CHANGED = (
    "gradients were changed between engine.backward and engine.step (clip_grad_norm_ and the like), when some have "
    "already been sent to other workers. Remove this from the loop; to clip, set `gradient_clipping` in the config."
)
