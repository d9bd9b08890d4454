"""Losses and gradients that are not finite: the job stops before the update, or says so and goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, undisturbed
from rule import Edit, holds, rule
from shoal.core.laying_out import lay_out
from shoal.core.layout import Trainable
from shoal.exchange import canonical, round_reduction
from shoal.exchange.ballot import HALT
from shoal.exchange.finite import FiniteWatch, is_finite
from shoal.exchange.tree_sum import TreeSum
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from shoal_protos.errors import JobFailed, UserError
from shoal_protos.text import passes_milestone
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

OPTIONS = {"max_steps": 5}
ON = {**OPTIONS, "shoal": {"stop_on_nan": False}}


class NotFinite(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(_: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.inf


def loss_of(engine: Engine, batch: Any) -> Tensor:
    loss: Tensor = engine.module(**batch)
    return loss


def bad_loss(engine: Engine, batch: Any) -> None:
    """Lane 2 of step 3."""
    loss = loss_of(engine, batch)
    engine.backward(loss * torch.nan if is_lane(engine, 2) else loss)
    engine.step()


def bad_gradient(engine: Engine, batch: Any) -> None:
    loss = loss_of(engine, batch)
    engine.backward(NotFinite.apply(loss) if is_lane(engine, 2) else loss)
    engine.step()


def is_lane(engine: Engine, lane: int) -> bool:
    return engine.global_step == 2 and engine.context.loop.lanes != () and engine.context.loop.lane == lane


@rule(
    "A step whose loss, gradient or norm is not finite is made by nobody, unless `stop_on_nan` is false: the "
    "vote carries what an owner found",
    "A step",
    broken_by=[
        Edit("shoal.exchange.canonical", "self._watch.look(of, start, mean, culprit)", "assert culprit"),
        Edit(
            "shoal.exchange.finite", "self._kept.append(_Range(bucket, start, mean, mean.sum(), lanes))", "assert lanes"
        ),
        Edit(
            "shoal.training.step",
            "            if context.config.stop_on_nan:\n"
            "                stop_where_not_finite(record, copies)\n"
            "            stop_where_nothing_scales(record, context.state.loss_scale)\n"
            "            context.state.commit(record, generation, on_updated)\n",
            "            context.state.commit(record, generation, on_updated)\n"
            "            if context.config.stop_on_nan:\n"
            "                stop_where_not_finite(record, copies)\n",
        ),
    ],
)
@pytest.mark.parametrize("clipping", [0.0, 1.0])
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (bad_loss, r'^at step 3 the loss of lane 2 is nan and the gradient of parameter ".*" is not finite in '),
        (bad_gradient, r'^at step 3 the gradient of parameter ".*" is not finite in '),
    ],
)
def test_a_step_that_is_not_finite_fails_the_job_before_its_update(body: Any, sentence: str, clipping: float) -> None:
    task = Task({**OPTIONS, "gradient_clipping": clipping}, body=body)
    with ONE_AT_A_TIME, pytest.raises(JobFailed, match=sentence) as failed:
        engine = engine_of(task, AloneLink(), Faults([]))
        for batch in engine:
            body(engine, batch)
    assert "The step was not made: the model is that of step 2." in str(failed.value)
    assert engine.global_step == 2
    assert all(bool(torch.isfinite(flat).all()) for flat in engine.context.state.weights.flats)


def test_a_script_that_swallows_that_cannot_go_on() -> None:
    def stubborn(engine: Engine, batch: Any) -> None:
        try:
            bad_loss(engine, batch)
        except JobFailed:
            return

    with pytest.raises(UserError, match="left the job because its update failed"):
        undisturbed(Task(OPTIONS, body=stubborn))


def watch_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host asks for no sum before the vote needs them."""
    for reduction in (canonical, round_reduction):
        monkeypatch.setattr(reduction, "FiniteWatch", lambda at_once: FiniteWatch(at_once and False))


@rule(
    "A step that is not finite ends the job only after the copies of all blocks were compared; where they "
    "differ, all go back or pause before the step instead of failing, or the reason names the block",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit("shoal.training.step", "self._boundary.look_for_corruption(record)", "None"),
        Edit("shoal.training.boundary", "            self._await_return()\n", ""),
        Edit(
            "shoal.training.boundary",
            "on_corruption is OnCorruption.CONTINUE:",
            "on_corruption is not OnCorruption.RESTORE or context.config.checkpoint.path is None:",
            by="test_before_such_a_loss_a_job_that_does_not_go_back_pauses_and_goes_on_once_the_bad_copy_is_gone",
        ),
        Edit(
            "shoal_controller.core.machine.phases.running",
            "        recovery.pause(turn, turn.durable.paused_because)\n        return True\n",
            "        pass\n",
            by="test_before_such_a_loss_a_job_that_does_not_go_back_pauses_and_goes_on_once_the_bad_copy_is_gone",
        ),
        Edit(
            "shoal_controller.core.machine.phases.corruption",
            "    if turn.durable.paused_because:\n        return\n",
            "    if turn.durable.paused:\n        return\n",
            by="test_before_such_a_loss_a_job_that_does_not_go_back_pauses_and_goes_on_once_the_bad_copy_is_gone",
        ),
    ],
)
@holds("A step whose loss, gradient")
@pytest.mark.parametrize(
    ("stage", "workers", "where", "is_device"),
    [
        (1, "ab", "lanes 2 to 3", False),
        (1, "abcd", "lane 2", False),
        (1, "abcd", "lane 2", True),
        (2, "ab", "lanes 0 to 3", False),
        (3, "abc", "lanes 0 to 3", True),
    ],
)
def test_all_members_stop_alike_and_name_the_lanes(
    stage: int, workers: str, where: str, is_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As closely as partial sums tell: with one lane a worker, the lane; sums of shards have all lanes in them."""
    if is_device:
        watch_a_device(monkeypatch)
    with Crew(workers, Task({**OPTIONS, "stage": stage}, body=bad_gradient)) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        assert crew.job.durable.phase.value == "failed"
        assert f"is not finite in {where}. The step was not made" in crew.job.durable.reason
        assert "data of this step (all copies of the model and its optimizer state agree); " in crew.job.durable.reason
        assert all(worker.engine.global_step == 2 for worker in crew.workers.values())


@holds("A step whose loss, gradient")
def test_who_must_roll_such_a_step_forward_does_not_make_it_either() -> None:
    with Crew("abc", Task(OPTIONS, body=bad_loss)) as crew:
        crew.train_to(1)
        crew.plant("a", 3, "in_vote")
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        assert crew.job.durable.phase.value == "failed"
        assert "at step 3 the loss of lane 2 is nan" in crew.job.durable.reason
        assert crew.workers["b"].engine.global_step == crew.workers["c"].engine.global_step == 2


@holds("A step whose loss, gradient")
@pytest.mark.parametrize("workers", ["ab", "abcd"])
def test_a_job_that_goes_on_regardless_tells_of_it(workers: str) -> None:
    def often(engine: Engine, batch: Any) -> None:
        loss = loss_of(engine, batch)
        engine.backward(loss * torch.nan if engine.global_step >= 1 else loss)
        engine.step()

    options = {**ON, "max_steps": 13}
    with Crew(workers, Task(options, body=often)) as crew:
        crew.train_to(2)
        crew.beat(2)
        crew.add("z")
        crew.finish()
        messages = [message for kind, message in crew.events if kind == "not_finite"]
        assert crew.workers["a"].engine.context.state.record is not None
        assert crew.workers["a"].engine.context.state.record.not_finite_steps == 12
    assert messages[0].startswith("steps that were not finite so far: 1; step 2: the loss of lane 0 is nan and the")
    assert len(messages) == 2 and messages[1].startswith("steps that were not finite so far: 1")


def test_skipped_micro_batches_are_counted_and_told_of() -> None:
    def body(engine: Engine, batch: Any) -> None:
        if engine.global_step in (1, 2) and engine.context.loop.lanes and engine.context.loop.lane != 0:
            engine.skip()
            return
        engine.backward(loss_of(engine, batch))
        engine.step()

    with Crew("abc", Task({"max_steps": 8}, body=body)) as crew:
        crew.train_to(4)
        crew.beat(2)
        crew.kill("b")
        crew.finish()
        messages = [message for kind, message in crew.events if kind == "micro_batches_skipped"]
        counted = crew.job.durable.figures.counters["shoal_skipped_micro_batches_total"]
    assert counted == 6 and len(messages) == 1


def test_a_sum_that_overflows_is_no_gradient_that_is_not_finite() -> None:
    assert is_finite(torch.full((1000,), 3e38))
    assert not is_finite(torch.tensor([1.0, torch.nan]))
    assert not is_finite(torch.tensor([torch.inf, -torch.inf]))


@pytest.mark.parametrize("bad", range(4))
def test_the_partial_sum_that_brought_it_in_is_found_though_sums_were_made_in_place(bad: int) -> None:
    tree_sum = TreeSum([[((lane, lane + 1), lane // 3) for lane in range(4)]], rank=1, lanes=4)
    parts = [torch.ones(3) for _ in range(4)]
    parts[bad][1] = torch.nan
    tree_sum.add_up(parts)
    assert tree_sum.culprit(parts, at_once=True)() == (bad, bad + 1)
    kept = tree_sum.culprit(parts, at_once=False)
    for part in parts:
        part.zero_()
    assert kept() == (bad, bad + 1)


def test_milestones_are_powers_of_ten() -> None:
    assert [n for n in range(1, 2000) if passes_milestone(n - 1, n)] == [1, 10, 100, 1000]
    assert passes_milestone(0, 7) and passes_milestone(7, 12) and not passes_milestone(12, 12)
    assert not passes_milestone(12, 90)


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: a value that is asked for, a copy to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


def test_what_a_device_has_is_asked_for_once_and_not_while_it_is_made() -> None:
    layout = lay_out([Trainable("a", (5_000,), torch.float32, 0), Trainable("b", (9_000,), torch.float64, 0)])
    watch = FiniteWatch(at_once=False)
    with Waits() as waits:
        for bucket in layout.buckets:
            for start in range(0, bucket.elements, 4_096):
                values = torch.full((4_096,), torch.finfo(bucket.dtype).max, dtype=bucket.dtype)  # their sum overflows
                values[7] = torch.nan if (bucket.index, start) == (1, 4_096) else 1.0
                watch.look(bucket, start, values, lambda: (2, 3))
                values.div_(2.0)
    assert waits.count == 0
    wrong = layout.buckets[1].slots[0].parameter.name
    assert watch.find_bad_gradient() == f'the gradient of parameter "{wrong}" is not finite in lane 2'
    assert FiniteWatch(at_once=False).find_bad_gradient() == ""


def test_a_job_that_is_over_before_such_a_step_does_not_fail_because_of_it() -> None:
    def halting(engine: Engine, batch: Any) -> None:
        if engine.global_step == 2:
            engine.training.ask(HALT, "a callback")
        bad_loss(engine, batch)

    with Crew("ab", Task(OPTIONS, body=halting)) as crew:
        crew.finish()
        assert {worker.engine.global_step for worker in crew.workers.values()} == {2}
