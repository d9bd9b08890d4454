"""A loss that is still divided or scaled as its old loop did it: one warning at the first step, and none for others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from crew import Crew, Task, undisturbed
from matrices import shortened
from shoal.guards.loop_guards import DIVIDED, SCALED, PortedLoss
from shoal.training.engine import Engine
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parents[2]
LANES, MICRO_BATCHES = 4, 2
ROWS = LANES * MICRO_BATCHES
"""Of the batches here: what is divided by it is most easily mistaken."""
Loss = Callable[[Tensor], Tensor]
"""Of `(ROWS, 5)` logits."""


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is warned of, by all workers of this process."""
    found: list[str] = []

    class Log:
        """In place of the module's."""

        def warning(self, event: str, means: str) -> None:
            assert event == "loss_of_another_loop"
            found.append(means)

    monkeypatch.setattr("shoal.guards.loop_guards.log", Log())
    return found


def look(loss: Loss) -> None:
    torch.manual_seed(0)
    PortedLoss(LANES, MICRO_BATCHES).look(loss(torch.randn(ROWS, 5, requires_grad=True)), lane=0)


def entropy(x: Tensor, **how: float | str) -> Tensor:
    """A cross entropy, the mean unless warnings otherwise."""
    return functional.cross_entropy(x, torch.arange(ROWS) % 5, **how)  # type: ignore[arg-type]


def scaled(loss: Tensor) -> Tensor:
    """As by the scaler of a script."""
    return torch.amp.GradScaler("cpu").scale(loss)  # type: ignore[no-any-return]


def added(x: Tensor) -> Tensor:
    """The mean of the losses of two heads."""
    return (entropy(x) + entropy(-x)) / 2


def collected(x: Tensor) -> Tensor:
    """The mean over parts, added up."""
    loss = 0 * entropy(x)
    for part in x.chunk(4):
        loss = loss + part.square().mean()
    return loss / 4


LEFT: dict[str, tuple[Loss, str]] = {
    "lanes": (lambda x: entropy(x) / LANES, f"a mean was divided by 4; {DIVIDED}"),
    "micro-batches of a lane": (lambda x: entropy(x) / MICRO_BATCHES, f"a mean was divided by 2; {DIVIDED}"),
    "micro-batches of a step": (lambda x: entropy(x) / ROWS, f"a mean was divided by 8; {DIVIDED}"),
    "in place, by a float": (lambda x: entropy(x).div_(4.0), f"a mean was divided by 4; {DIVIDED}"),
    "label smoothing": (lambda x: entropy(x, label_smoothing=0.1) / 4, f"a mean was divided by 4; {DIVIDED}"),
    "a term beside it": (lambda x: (entropy(x) + 0.1 * x.square().sum()) / 4, f"a mean was divided by 4; {DIVIDED}"),
    "by tokens first": (lambda x: x.sum() / torch.tensor(7) / 4, f"a mean was divided by 4; {DIVIDED}"),
    "squared error": (lambda x: functional.mse_loss(x, x.detach() + 1) / 4, f"a mean was divided by 4; {DIVIDED}"),
    "mean, in half precision": (lambda x: -x.mean().half() / 4, f"a mean was divided by 4; {DIVIDED}"),
    "GradScaler": (lambda x: scaled(entropy(x)), f"the loss was multiplied by 65536; {SCALED}"),
    "by hand": (lambda x: 256.0 * entropy(x), f"the loss was multiplied by 256; {SCALED}"),
    "both": (
        lambda x: scaled(entropy(x) / 4),
        f"the loss was multiplied by 65536; {SCALED}. a mean was divided by 4; {DIVIDED}",
    ),
}
ORDINARY: dict[str, Loss] = {
    "a mean": entropy,
    "a leaf": lambda x: nn.Parameter(torch.ones(())),
    "label smoothing": lambda x: entropy(x, label_smoothing=0.1),
    "probabilities": lambda x: functional.cross_entropy(x, x.detach().softmax(1)),
    "batchmean": lambda x: functional.kl_div(x, x.detach().softmax(1), reduction="batchmean"),
    "a sum by the batch's size": lambda x: entropy(x, reduction="sum") / len(x),
    "sums by the batch's size": lambda x: (x.sum() + x.square().sum()) / len(x),
    "a sum by tokens": lambda x: x.sum() / torch.tensor(ROWS),
    "a mean by a tensor": lambda x: entropy(x) / torch.tensor(4.0),
    "a mean by another number": lambda x: entropy(x) / 3,
    "the mean of two": added,
    "the mean of four": collected,
    "a weighted mean": lambda x: (3 * entropy(x) + x.mean()) / 4,
    "weights": lambda x: entropy(x) + 0.25 * x.square().mean() + 0.5 * x.mean(),
    "a small weight": lambda x: 0.25 * entropy(x),
    "a large weight": lambda x: 1000.0 * entropy(x),
    "a power of two below": lambda x: 128.0 * entropy(x),
    "by a width": lambda x: entropy(x) * 1024,
    "by tokens": lambda x: entropy(x) * torch.tensor(512),
    "of a tensor by it": lambda x: torch.tensor(4.0) / entropy(x),
    "a learned weight": lambda x: nn.Parameter(torch.tensor(512.0)) * entropy(x),
    "a hand-written function": lambda x: Halved.apply(entropy(x)) / 4,
}


class Halved(torch.autograd.Function):
    """Tells nothing of what it does."""

    @staticmethod
    def forward(ctx: object, loss: Tensor) -> Tensor:
        return loss / 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / 2


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_left_of_another_loop_is_told_in_one_sentence(kind: str, warnings: list[str]) -> None:
    loss, sentence = LEFT[kind]
    look(loss)
    assert warnings == [sentence]


@pytest.mark.parametrize("kind", ORDINARY)
def test_an_ordinary_loss_is_told_of_nothing(kind: str, warnings: list[str]) -> None:
    look(ORDINARY[kind])
    assert warnings == []


def test_what_a_hook_of_the_script_keeps_from_being_read_is_passed_over(warnings: list[str]) -> None:
    def refuse(packed: object) -> Tensor:
        raise RuntimeError("it is on a disk")

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, refuse):
        look(lambda x: scaled(entropy(x)))
    assert warnings == []


def test_a_loss_within_a_checkpoint_has_the_gradient_that_it_has_without_a_look(warnings: list[str]) -> None:
    def gradient(is_looked_at: bool) -> Tensor:
        x = torch.linspace(-1, 1, ROWS * 5).reshape(ROWS, 5).requires_grad_()
        loss = checkpoint(lambda x: entropy(x) / torch.tensor(4.0), x, use_reentrant=False)
        if is_looked_at:
            PortedLoss(LANES, MICRO_BATCHES).look(loss, lane=0)
        loss.backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(True), gradient(False)) and warnings == []


def test_the_porting_page_has_the_sentences() -> None:
    page = (ROOT / "docs" / "porting.md").read_text()
    assert f"- {DIVIDED}\n- {SCALED}\n" in page


WORLDS = [(workers, stage, change) for workers in (1, 2, 3) for stage in (0, 3) for change in ("divided", "scaled")]


@pytest.mark.parametrize(
    "workers, stage, change",
    shortened(WORLDS, (1, 0, "divided"), (2, 3, "divided"), (3, 0, "scaled"), (3, 3, "scaled")),
)
def test_a_world_says_it_once_and_trains(workers: int, stage: int, change: str, warnings: list[str]) -> None:
    def body(engine: Engine, batch: dict[str, Tensor]) -> None:
        loss = engine.module(**batch)
        engine.backward(loss / LANES if change == "divided" else scaled(loss))
        engine.step()

    options = {"lanes": LANES, "micro_batches_per_lane": MICRO_BATCHES, "max_steps": 3}
    right = undisturbed(Task(options, body=body))
    warnings.clear()
    with Crew("abc"[:workers], Task({**options, "stage": stage}, body=body)) as crew:
        assert crew.finish() == right
    assert len(warnings) == 1 and (DIVIDED if change == "divided" else SCALED) in warnings[0]


def test_a_world_whose_loss_is_plain_says_nothing(warnings: list[str]) -> None:
    with Crew("ab", Task({"lanes": LANES, "micro_batches_per_lane": MICRO_BATCHES, "max_steps": 2})) as crew:
        crew.finish()
    assert warnings == []
