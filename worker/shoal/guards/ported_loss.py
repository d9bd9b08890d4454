"""What the graph of a loss shows of the loop that it was ported from: a division by micro-batches, a GradScaler.

The engine divides and scales by itself, so such a loop trains with other gradients than it means to, and the loss that
is shown looks better. Seen in what torch documents of a graph: names of nodes, their inputs, what they have saved.
Anything else (a compiled function, a hand-written one) shows nothing, and nothing is said. A warning at most: a loss
may be defined so. Called by the lane loop, at a process's first backward.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor
from torch.autograd.graph import Node

from shoal.process.logs import get_logger

log = get_logger("shoal")

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
        """Warns, once in a job: by whoever trains lane 0 first."""
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
