"""What a loop may call and when: each call out of order is one sentence, and changes nothing before it is told.

Worlds of one, and where bits matter of two and four (crew.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, undisturbed
from matrices import shortened
from rule import Edit, holds, rule
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from shoal_protos.errors import UserError
from torch import Tensor

OPTIONS = {"max_steps": 2, "micro_batches_per_lane": 2}
HALF = {"bf16": {"enabled": True}}
AUTOCAST = {"bf16": {"enabled": True, "auto_cast": True}}
Body = Callable[[Engine, Any], None]


def run(body: Body) -> str:
    """A loop with this body in a world of one; its fingerprint."""
    with ONE_AT_A_TIME:
        engine = engine_of(Task(OPTIONS), AloneLink(), Faults([]))
        for batch in engine:
            body(engine, batch)
        return str(engine.fingerprint())


def plain(engine: Engine, batch: Any) -> None:
    engine.backward(engine.module(**batch))
    engine.step()


def backward_by_the_script(engine: Engine, batch: Any) -> None:
    engine.module(**batch).backward()
    engine.step()


def both_backwards(engine: Engine, batch: Any) -> None:
    loss = engine.module(**batch)
    loss.backward(retain_graph=True)
    engine.backward(loss)
    engine.step()


def backward_twice(engine: Engine, batch: Any) -> None:
    for half in (engine.module(**batch), engine.module(**batch)):
        engine.backward(half * 0.5)
    engine.step()


def step_after_more(engine: Engine, batch: Any) -> None:
    engine.backward(engine.module(**batch), more=True)
    engine.step()


def skip_after_more(engine: Engine, batch: Any) -> None:
    engine.backward(engine.module(**batch), more=True)
    engine.skip()


def clip_before_the_last(engine: Engine, batch: Any) -> None:
    engine.backward(engine.module(**batch), more=True)
    torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.001)
    engine.backward(engine.module(**batch))


def zero_kept_gradients(engine: Engine, batch: Any) -> None:
    engine.backward(engine.module(**batch))
    kept = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    engine.step()
    torch._foreach_zero_(kept)


def step_twice(engine: Engine, batch: Any) -> None:
    plain(engine, batch)
    engine.step()


def no_step(engine: Engine, batch: Any) -> None:
    engine.backward(engine.module(**batch))


def nothing_at_all(engine: Engine, batch: Any) -> None:
    del engine, batch


def a_number(engine: Engine, batch: Any) -> None:
    engine.backward(engine.module(**batch).item())  # type: ignore[arg-type]


def without_a_graph(engine: Engine, batch: Any) -> None:
    with torch.no_grad():
        engine.backward(engine.module(**batch))


def export_to_no_path(engine: Engine, batch: Any) -> None:
    engine.export(None)  # type: ignore[arg-type]


def export_to_a_nul(engine: Engine, batch: Any) -> None:
    engine.export("a\0b")


@rule(
    "Each micro-batch has exactly one `engine.backward` and one `engine.step`; any other order is refused before "
    "anything has changed",
    "Arithmetic and layout",
    broken_by=Edit("shoal.training.training_loop", "        loop.prepare_backward(loss, state, more)\n", ""),
)
@rule(
    "The sums of lanes, finished or not, are nobody's but the engine's: a script that has kept tensors of "
    "`.grad` and writes to them is refused before its next backward or before its lane joins, and once more "
    "before the step",
    "Arithmetic and layout",
    broken_by=[
        Edit(
            "shoal.blocks.lane_sums",
            "if self._stack and self._versions_now() != self._versions:",
            "if self._stack and not self._versions:",
        ),
        Edit(
            "shoal.blocks.lane_sums",
            "if versions(self.live.flats) != self._live_versions:",
            "if not self._live_versions:",
        ),
        Edit(
            "shoal.blocks.lane_sums",
            "        if is_last:\n            self._refuse_changed()\n",
            "        if is_last:\n            pass\n",
        ),
    ],
)
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (backward_by_the_script, "engine.step was called without engine.backward (step 1, lane 0, micro-batch 0)"),
        (both_backwards, "a gradient that engine.backward did not make"),
        (backward_twice, "engine.backward was called twice for one micro-batch (step 1, lane 0, micro-batch 0)"),
        (step_after_more, "engine.step was called after engine.backward(more=True) (step 1, lane 0, micro-batch 0)"),
        (skip_after_more, "engine.skip was called after engine.backward (step 1, lane 0, micro-batch 0)"),
        (clip_before_the_last, "gradients were changed between engine.backward and engine.step"),
        (zero_kept_gradients, "gradients were changed after engine.step"),
        (step_twice, "engine.step was called without a micro-batch"),
        (no_step, "the loop went on to its next batch without engine.step (step 1, lane 0, micro-batch 0)"),
        (nothing_at_all, "the loop went on to its next batch without engine.step (step 1, lane 0, micro-batch 0)"),
        (a_number, "engine.backward got a float; expected the loss as a tensor with its graph"),
        (without_a_graph, "engine.backward got a loss without a graph"),
        (export_to_no_path, "engine.export got None; expected the path of the file to write"),
        (export_to_a_nul, r"engine.export got 'a\x00b'; expected the path of the file to write"),
    ],
)  # fmt: skip
def test_a_call_out_of_order_is_one_sentence(body: Body, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        run(body)
    assert sentence in str(refused.value)


@holds("Each micro-batch has exactly one")
@pytest.mark.parametrize("body", [backward_by_the_script, backward_twice, step_twice, a_number, without_a_graph])
def test_a_script_that_swallows_the_sentence_gets_the_right_bits_or_another_one(body: Body) -> None:
    """A refusal comes before anything is changed."""

    def stubborn(engine: Engine, batch: Any) -> None:
        try:
            body(engine, batch)
        except UserError:
            return

    try:
        assert run(stubborn) == run(plain)
    except UserError as refused:
        assert "without engine.step" in str(refused)


@holds("Each micro-batch has exactly one")
def test_a_second_backward_that_is_refused_and_swallowed_counts_nothing_twice() -> None:
    def stubborn(engine: Engine, batch: Any) -> None:
        plain_loss, other = engine.module(**batch), engine.module(**batch)
        engine.backward(plain_loss)
        with pytest.raises(UserError, match="called twice"):
            engine.backward(other)
        engine.step()

    def twice_forward(engine: Engine, batch: Any) -> None:
        loss, _ = engine.module(**batch), engine.module(**batch)
        engine.backward(loss)
        engine.step()

    assert run(stubborn) == run(twice_forward)


class Torn(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(_: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        del gradient
        raise ArithmeticError("no gradient")


@holds("Each micro-batch has exactly one")
@pytest.mark.parametrize("batch_number", [1, 4, 8])
def test_an_error_of_backward_that_the_script_swallows_ends_it_in_one_sentence(batch_number: int) -> None:
    """In the middle of a lane, at its end, and in the step's last backward, whose buckets have begun to leave."""
    count = 0

    def body(engine: Engine, batch: Any) -> None:
        nonlocal count
        count += 1
        loss = engine.module(**batch)
        try:
            engine.backward(Torn.apply(loss) if count == batch_number else loss)
        except ArithmeticError:
            return
        engine.step()

    with pytest.raises(UserError, match=r"engine.backward raised an error .* and the script went on"):
        run(body)


# ---- what is made right


def zero_grad_in_place(engine: Engine) -> None:
    engine.module.zero_grad(set_to_none=False)


def step_and_zero_grad(engine: Engine) -> None:
    engine.step()
    zero_grad_in_place(engine)


def step_and_look_at_gradients(engine: Engine) -> None:
    engine.step()
    engine.module.head.weight.square().sum().backward()


@rule(
    "Outside of backward and step, `.grad` is None: otherwise a script that zeroes gradients in place would "
    "erase lanes that are already summed",
    "Arithmetic and layout",
    broken_by=Edit(
        "shoal.training.lane_loop",
        "        self._order.begin(self._where(state))\n        drop_gradients(state.parameters)\n",
        "        self._order.begin(self._where(state))\n",
    ),
)
@pytest.mark.parametrize("workers", ["", "ab", "abcd"])
@pytest.mark.parametrize(
    "task",
    [
        Task(OPTIONS, in_loop=zero_grad_in_place),
        Task(OPTIONS, step=step_and_zero_grad),
        Task(OPTIONS, step=step_and_look_at_gradients),
    ],
    ids=["zeroed before", "zeroed after", "made after"],
)
def test_what_a_loop_does_to_gradients_around_a_micro_batch_changes_no_sum(task: Task, workers: str) -> None:
    right = undisturbed(Task(OPTIONS))
    if not workers:
        assert undisturbed(task) == right
        return
    with Crew(workers, task) as crew:
        assert crew.finish() == right


def changing_what_it_keeps(moment: str) -> Body:
    """Keeps its first gradients, and adds to them at that moment."""
    kept: list[Tensor] = []

    def change(now: str) -> None:
        if kept and now == moment:
            torch._foreach_add_(kept, 1.0)

    def body(engine: Engine, batch: Any) -> None:
        change("before engine.backward")
        is_last = engine.context.loop.at_last_backward
        engine.backward(engine.module(**batch))
        if is_last:
            change("before engine.step")
        kept[:] = kept or [one.grad for one in engine.module.parameters() if one.grad is not None]
        engine.step()
        change("after engine.step")

    return body


@holds("The sums of lanes, finished")
@pytest.mark.parametrize(
    ("moment", "lanes", "micro_batches"),
    [("before engine.backward", 1, 1), ("before engine.step", 3, 1), ("after engine.step", 1, 2)],
)
def test_gradients_that_a_script_has_kept_are_not_to_be_written_at_any_moment(
    moment: str, lanes: int, micro_batches: int
) -> None:
    """Which of its lanes' sums lie there depends on the world."""
    options = {"max_steps": 3, "lanes": lanes, "micro_batches_per_lane": micro_batches}
    with pytest.raises(UserError, match=r"gradients were changed after engine\.step"):
        undisturbed(Task(options, body=changing_what_it_keeps(moment)))


def two_losses(engine: Engine, batch: Any) -> None:
    """The second forward comes after the first backward, in the same precision."""
    halves = [{name: part[at] for name, part in batch.items()} for at in (slice(0, 1), slice(1, 2))]
    engine.backward(0.5 * engine.module(**halves[0]), more=True)
    engine.backward(0.5 * engine.module(**halves[1]))
    engine.step()


@pytest.mark.parametrize(
    ("precision", "micro_batches"), [({}, 1), (HALF, 2), (AUTOCAST, 1)], ids=["32", "bf16", "autocast"]
)
@pytest.mark.parametrize("stage", shortened([1, 2, 3], 1, 3))
def test_losses_of_one_micro_batch_are_accumulated_where_that_is_asked_for(
    stage: int, precision: dict[str, Any], micro_batches: int
) -> None:
    """With the bits of a world of one in stage 0, through a kill between the two backwards too; and their sum is the
    loss.
    """
    options = {"max_steps": 4, "precision": precision, "micro_batches_per_lane": micro_batches}
    right = undisturbed(Task({**options, "stage": 0}, body=two_losses))
    assert right != undisturbed(Task({**options, "stage": 0}))
    with Crew("abc", Task({**options, "stage": stage}, body=two_losses)) as crew:
        crew.train_to(2)
        crew.plant("b", 3, "exchange")
        assert crew.finish() == right


def test_losses_that_would_be_added_up_in_half_precision_are_refused() -> None:
    with pytest.raises(UserError, match=r"needs gradients in torch\.float32, and they are in torch\.bfloat16"):
        undisturbed(Task({"max_steps": 1, "precision": HALF}, body=two_losses))


def test_the_loss_of_a_micro_batch_is_the_sum_of_its_losses() -> None:
    losses: list[float] = []

    def body(engine: Engine, batch: Any) -> None:
        for more in (True, False):
            loss = engine.module(**batch)
            losses.append(float(loss.detach().double()))
            engine.backward(loss, more=more)
        engine.step()

    with ONE_AT_A_TIME:
        engine = engine_of(Task({"max_steps": 1, "lanes": 1}), AloneLink(), Faults([]))
        for batch in engine:
            body(engine, batch)
    assert engine.loss == sum(losses)
