"""The order of calls within one micro-batch: `engine.backward` once, then `engine.step`; or `engine.skip` alone.

A call out of order would leave lanes out of a step's sum, or count them twice, without a word; so it is refused before
anything is changed. Called by the lane loop (lane_loop.py), which knows which micro-batch is at hand.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from shoal_protos.errors import UserError
from torch import Tensor

from shoal.core.layout import Layout


class _At(Enum):
    """What has been done with the micro-batch at hand."""

    NONE = "there is none, or it is done with"
    YIELDED = "the loop has it"
    BEGUN = "engine.backward has begun and has not come to its end"
    PART = "engine.backward(more=True) is done, and another one is to come"
    GRADIENT = "engine.backward is done"


class CallOrder:
    """Order of calls in one worker's loop. `where` names the micro-batch in sentences: "step 3, lane 2"."""

    def __init__(self) -> None:
        self._at = _At.NONE

    def reset(self) -> None:
        """The micro-batch at hand is void, or done with."""
        self._at = _At.NONE

    def begin(self, where: str) -> None:
        """The loop gets a micro-batch. Raises `UserError` where it has not ended the one before."""
        self.check_ended(where)
        self._at = _At.YIELDED

    def check_ended(self, where: str) -> None:
        """Raises `UserError` where a micro-batch is still at hand."""
        self._refuse_half_made(where)
        if self._at is not _At.NONE:
            raise UserError(
                f"the loop went on to its next batch without engine.step ({where}), so this micro-batch would be "
                "repeated for ever. Call engine.step() at the end of each batch; to leave out a batch, call "
                "engine.skip() in place of engine.backward and engine.step."
            )

    @property
    def has_gradient(self) -> bool:
        """Whether `engine.backward` has begun."""
        return self._at in (_At.BEGUN, _At.PART, _At.GRADIENT)

    @property
    def awaits_more(self) -> bool:
        """Whether a part of the gradient is here, and another backward was announced."""
        return self._at is _At.PART

    def check_backward(self, where: str) -> None:
        """Raises `UserError` where this micro-batch has its gradient."""
        self._refuse_half_made(where)
        if self._at is _At.GRADIENT:
            raise UserError(
                f"engine.backward was called twice for one micro-batch ({where}); its gradient would count twice. "
                "Add up the losses and call engine.backward once, or call all but the last one with more=True."
            )

    def backward_begins(self, where: str) -> None:
        """From here to `backward_ends` the gradient is half made."""
        self.check_backward(where)
        self._at = _At.BEGUN

    def backward_ends(self, more: bool) -> None:
        """The micro-batch has its gradient, or a part of it."""
        self._at = _At.PART if more else _At.GRADIENT

    def skip(self, where: str) -> None:
        """The micro-batch needs no gradient. Raises `UserError` where it has one."""
        self._refuse_half_made(where)
        if self.has_gradient:
            raise UserError(
                f"engine.skip was called after engine.backward ({where}), when the gradient has already been sent. "
                "Check the loss first, and call either engine.backward and engine.step or engine.skip."
            )
        self._at = _At.GRADIENT

    def check_step(self, where: str) -> None:
        """Raises `UserError` where this micro-batch has no gradient."""
        self._refuse_half_made(where)
        if self._at is _At.YIELDED:
            raise UserError(
                f"engine.step was called without engine.backward ({where}), so this micro-batch would be missing "
                "from the step. Call engine.backward(loss) in place of loss.backward(); to leave out a batch, call "
                "engine.skip() in place of engine.backward and engine.step."
            )
        if self._at is _At.PART:
            raise UserError(
                f"engine.step was called after engine.backward(more=True) ({where}), which announces another one. "
                "Call engine.backward for the micro-batch's last loss without more."
            )

    def _refuse_half_made(self, where: str) -> None:
        if self._at is _At.BEGUN:
            raise UserError(
                f"engine.backward raised an error ({where}) and the script went on; the gradient is incomplete and "
                "cannot be discarded. Let the error end the script; its worker is restarted."
            )


def check_loss(loss: Any) -> None:
    """Raises `UserError` where `loss` is not a scalar tensor with a graph."""
    if not isinstance(loss, Tensor):
        raise UserError(
            f"engine.backward got a {type(loss).__name__}; expected the loss as a tensor with its graph "
            "(not loss.item(), not float(loss))."
        )
    if loss.numel() != 1:
        raise UserError(
            f"engine.backward got a loss of shape {tuple(loss.shape)}; expected the mean over the micro-batch."
        )
    if not loss.requires_grad:
        raise UserError(
            "engine.backward got a loss without a graph; compute it with engine.module from parameters that require "
            "gradients, outside torch.no_grad() and without detach()."
        )


def refuse_more_in_half_precision(layout: Layout) -> None:
    """Raises `UserError` where a lane's gradient has the half precision of its parameters: sums would be rounded in one
    world and not in another.
    """
    half = next((bucket for bucket in layout.buckets if bucket.has_masters), None)
    if half is not None:
        raise UserError(
            f"engine.backward(more=True) needs gradients in {half.wide_dtype}, and they are in {half.dtype} where a "
            "lane is one micro-batch. Set `auto_cast` beside `enabled`, or `shoal.micro_batches_per_lane` to 2, or add "
            "up the losses and call engine.backward once."
        )
