"""What a script may call and when, from `shoal.initialize` to its loop's last line: refused or warned of in sentences.

`CallOrder` has the order of calls within one batch: `engine.backward` once, then `engine.step`; or `engine.skip` alone;
or `engine.run` and `engine.step`, where a batch is a pipeline's lane (`LoopCalls`). A call out of order would leave
lanes out of a step's sum, or count them twice, without a word; so it is refused before anything is changed. Called by
the lane loop (lane_loop.py), which knows which batch is at hand.

`PortedLoss` looks at what the graph of a loss shows of the loop that it was ported from: a division by micro-batches, a
GradScaler. The engine divides and scales by itself, so such a loop trains with other gradients than it means to, and
the loss that is shown looks better. Seen in what torch documents of a graph: names of nodes, their inputs, what they
have saved. Anything else (a compiled function, a hand-written one) shows nothing, and nothing is said. A warning at
most: a loss may be defined so. Called by the lane loop, at a process's first backward.

`FirstWeights` has the weights between `shoal.initialize` and the loop: those that the script has made, and perhaps not
the job's. Where this process goes on from a checkpoint, or may join a job that trains, the job's weights come when its
loop begins. What a script computes from the first ones before that (a score, a file) looks like any other result:
refused. Told by checkpoint_loading.py, which knows what there is to go on from, and by the loop.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from shoal_protos.errors import UserError
from shoal_protos.training_log import get_logger
from torch import Tensor
from torch.autograd.graph import Node

from shoal.core.layout import Layout
from shoal.data.seeds import ForwardSeed

log = get_logger("shoal")


@dataclass(frozen=True, slots=True)
class LoopCalls:
    """What the loop of a script calls for each batch, as sentences name it."""

    gradient: str = "engine.backward"
    """What makes the gradient."""
    batch: str = "micro-batch"
    """Of what it makes it."""
    once: str = "Add up the losses and call engine.backward once, or call all but the last one with more=True."
    missing: str = "Call engine.backward(loss) in place of loss.backward()"
    left_out: str = "; to leave out a batch, call engine.skip() in place of engine.backward and engine.step."


OF_LOSSES = LoopCalls()
OF_SCHEDULES = LoopCalls(
    "engine.run", "lane", "Give it the lane's whole batch, then call engine.step().",
    "Call engine.run(schedule.step, …) in place of schedule.step(…)", ".",
)  # fmt: skip
"""Where a pipeline's schedule trains a lane."""


class _At(Enum):
    """What has been done with the batch at hand."""

    NONE = "there is none, or it is done with"
    YIELDED = "the loop has it"
    BEGUN = "the call that makes its gradient has begun and has not come to its end"
    PART = "engine.backward(more=True) is done, and another one is to come"
    GRADIENT = "it has its gradient"


class CallOrder:
    """Order of calls in one worker's loop. `where` names the batch in sentences: "step 3, lane 2"."""

    def __init__(self, calls: LoopCalls) -> None:
        self._calls, self._at = calls, _At.NONE

    def reset(self) -> None:
        """The batch at hand is void, or done with."""
        self._at = _At.NONE

    def begin(self, where: str) -> None:
        """The loop gets a batch. Raises `UserError` where it has not ended the one before."""
        self.check_ended(where)
        self._at = _At.YIELDED

    def check_ended(self, where: str) -> None:
        """Raises `UserError` where a batch is still at hand."""
        self._refuse_half_made(where)
        if self._at is not _At.NONE:
            raise UserError(
                f"the loop went on to its next batch without engine.step ({where}), so this {self._calls.batch} would "
                f"be repeated for ever. Call engine.step() at the end of each batch{self._calls.left_out}"
            )

    @property
    def has_gradient(self) -> bool:
        """Whether the call that makes its gradient has begun."""
        return self._at in (_At.BEGUN, _At.PART, _At.GRADIENT)

    @property
    def awaits_more(self) -> bool:
        """Whether a part of the gradient is here, and another backward was announced."""
        return self._at is _At.PART

    def check_backward(self, where: str) -> None:
        """Raises `UserError` where this batch has its gradient."""
        self._refuse_half_made(where)
        if self._at is _At.GRADIENT:
            raise UserError(
                f"{self._calls.gradient} was called twice for one {self._calls.batch} ({where}); its gradient would "
                f"count twice. {self._calls.once}"
            )

    def backward_begins(self, where: str) -> None:
        """From here to `backward_ends` the gradient is half made."""
        self.check_backward(where)
        self._at = _At.BEGUN

    def backward_ends(self, more: bool) -> None:
        """The batch has its gradient, or a part of it."""
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
        """Raises `UserError` where this batch has no gradient."""
        self._refuse_half_made(where)
        if self._at is _At.YIELDED:
            raise UserError(
                f"engine.step was called without {self._calls.gradient} ({where}), so this {self._calls.batch} would "
                f"be missing from the step. {self._calls.missing}{self._calls.left_out}"
            )
        if self._at is _At.PART:
            raise UserError(
                f"engine.step was called after engine.backward(more=True) ({where}), which announces another one. "
                "Call engine.backward for the micro-batch's last loss without more."
            )

    def _refuse_half_made(self, where: str) -> None:
        if self._at is _At.BEGUN:
            raise UserError(
                f"{self._calls.gradient} raised an error ({where}) and the script went on; the gradient is incomplete "
                "and cannot be discarded. Let the error end the script; its worker is restarted."
            )


def check_loss(loss: Any, call: str = "engine.backward", has_graph: bool = True) -> None:
    """Raises `UserError` where `loss` is not a scalar tensor, with a graph in training. `call`: what has got it."""
    if not isinstance(loss, Tensor):
        raise UserError(
            f"{call} got a {type(loss).__name__}; expected the loss as a tensor with its graph "
            "(not loss.item(), not float(loss))."
        )
    if loss.numel() != 1:
        raise UserError(f"{call} got a loss of shape {tuple(loss.shape)}; expected the mean over the micro-batch.")
    if has_graph and not loss.requires_grad:
        raise UserError(
            f"{call} got a loss without a graph; compute it with engine.module from parameters that require "
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


DIVIDED = (
    "the engine divides by the number of micro-batches itself: give engine.backward the plain mean of each micro-batch"
)
SCALED = "a GradScaler is not for this loop: give engine.backward the plain loss, and let `fp16` of the config scale it"
"""Both as docs/porting.md has them."""
SMALLEST_SCALE = 2.0**8
"""Of a GradScaler: smaller factors are weights."""
MOST_NODES = 10_000
"""So many of a sum are looked at."""

SUM, PRODUCT, QUOTIENT = ("AddBackward0", "SubBackward0"), ("MulBackward0", "MulBackward1"), ("DivBackward0",)
MEANS = ("MeanBackward0", "MeanBackward1")
SAME = ("AliasBackward0", "CloneBackward0", "NegBackward0", "SqueezeBackward0", "ToCopyBackward0", "ViewBackward0")
"""What these make of a loss is as large as it was."""
MEAN_REDUCTION = 1
"""Of torch's own losses."""


class PortedLoss:
    """Looks at the first loss of a process. `lanes` and `micro_batches` (of a lane) are those of a step."""

    def __init__(self, lanes: int, micro_batches: int) -> None:
        self._counts = {lanes, micro_batches, lanes * micro_batches} - {1}
        self._looked = False

    def look(self, loss: Tensor, lane: int) -> None:
        """Warns, once in a job: on the worker that trains lane 0 first."""
        if self._looked:
            return
        self._looked = True
        if lane != 0 or loss.grad_fn is None:
            return
        node: Node | None = loss.grad_fn
        means = []
        if scale := _scale_of(loss.grad_fn):
            means, node = [f"the loss was multiplied by {scale:g}; {SCALED}"], _input_of(loss.grad_fn)
        divisor = _divisor_of(node) if node is not None else None
        if divisor in self._counts:
            means.append(f"a mean was divided by {divisor:g}; {DIVIDED}")
        if means:
            log.warning("loss_of_another_loop", means=". ".join(means))


def _scale_of(node: Node) -> float | None:
    """The power of two, too large for a weight, by which a loss was multiplied."""
    factor = _other_of(node, PRODUCT)
    if not isinstance(factor, Tensor) or not factor.is_floating_point():  # a whole number is a size, or a count
        return None
    value = float(factor)
    return value if value >= SMALLEST_SCALE and math.frexp(value)[0] == 0.5 else None


def _divisor_of(node: Node) -> float | None:
    """The number by which the script divided what was a mean already. Not where it makes the mean: of a sum of as many
    terms, or with such weights.
    """
    divisor, below = _number_of(node, QUOTIENT), _input_of(node)
    if divisor is None or below is None:
        return None
    weight, has_mean = _weigh(below)
    return divisor if has_mean and not math.isclose(weight, divisor) else None


def _weigh(node: Node) -> tuple[float, bool]:
    """The sum of the weights of a sum's terms, and whether one of them is a mean as far as its graph tells."""
    weights, has_mean, terms = 0.0, False, [(node, 1.0)]
    for _ in range(MOST_NODES):
        if not terms:
            return weights, has_mean
        term, weight = terms.pop()
        kind, inputs = term.name(), _inputs_of(term)
        if kind in SUM:
            terms += [(one, weight) for one in inputs]
        elif kind in SAME and inputs:
            terms.append((inputs[0], weight))
        elif (factor := _number_of(term, PRODUCT)) is not None:
            terms.append((inputs[0], weight * factor))
        elif divisor := _number_of(term, QUOTIENT):
            terms.append((inputs[0], weight / divisor))
        else:
            weights += weight
            has_mean |= kind in MEANS or getattr(term, "_saved_reduction", None) == MEAN_REDUCTION
            has_mean |= _other_of(term, QUOTIENT) is not None  # by a count of tokens
    return weights, False


def _inputs_of(node: Node) -> list[Node]:
    return [before for before, _ in node.next_functions if before is not None]


def _input_of(node: Node) -> Node | None:
    """The only input that has a graph."""
    inputs = _inputs_of(node)
    return inputs[0] if len(inputs) == 1 else None


def _number_of(node: Node, kind: tuple[str, ...]) -> float | None:
    """The other operand, where it is a number of the script; a tensor, as a count of tokens, is none."""
    other = _other_of(node, kind)
    if not isinstance(other, Tensor):
        return other
    if other.dtype is torch.bool or other.is_complex():
        return None
    narrow = torch.float16 if other.is_floating_point() else torch.uint8
    is_number = torch.result_type(torch.zeros((), dtype=narrow, device=other.device), other) is narrow
    return float(other) if is_number else None


def _other_of(node: Node, kind: tuple[str, ...]) -> Tensor | float | None:
    """What a graph was multiplied or divided by, where the node is of this kind and tells it, and it is one number."""
    if node.name() not in kind or _input_of(node) is None:  # else nothing is unpacked: that may compute, or ask others
        return None
    for name in ("_saved_other", "_saved_self") if kind == PRODUCT else ("_saved_other",):
        with contextlib.suppress(RuntimeError):  # a hook of the script keeps it elsewhere
            saved = getattr(node, name, None)
            if isinstance(saved, Tensor) and saved.dim() == 0 and not saved.requires_grad:
                return saved
            if isinstance(saved, float):  # torch's own, in C++
                return saved
    return None


class FirstWeights:
    """Whether the model's weights may be read."""

    def __init__(self, forward_seed: ForwardSeed) -> None:
        self._forward_seed = forward_seed
        self._why = ""

    def hold_back(self, why: str) -> None:
        """From now on they are not to be read. `why`: where the job's are, as a clause."""
        self._why = why
        self._forward_seed.refuse(self._sentence("the model was called"))

    def on_loop(self) -> None:
        """The loop begins: from now on they are the job's, or a warm-up's."""
        self._why = ""
        self._forward_seed.disarm()

    def check(self, call: str) -> None:
        """Raises `UserError` where they are not to be read. `call`: what reads them."""
        if self._why:
            raise UserError(self._sentence(f"{call} was called"))

    def _sentence(self, call: str) -> str:
        return (
            f"{call} before the loop, when the model has its first values: {self._why}, whose weights come when the "
            "loop begins. Do this at the top of the loop's body or after the loop; for the first values, before "
            "shoal.initialize."
        )
