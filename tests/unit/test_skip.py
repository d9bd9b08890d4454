"""`engine.skip()`: a micro-batch that is given up counts nowhere, in every world alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, Crew, Task, engine_of, undisturbed
from integration.scripts import Model
from rule import Edit, holds, rule
from shoal.core.tree import fold_numbers
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from shoal_protos.errors import UserError

OPTIONS = {"max_steps": 6}


def is_bad(batch: Any) -> bool:
    return int(batch["tokens"].sum()) % 3 == 0


def skipping(engine: Engine, batch: Any) -> None:
    """After the forward, which has moved the running means of batch normalization and drawn random numbers."""
    engine.report(kept=1.0)
    loss = engine.module(**batch)
    if is_bad(batch):
        engine.skip()
        return
    engine.backward(loss)
    engine.step()


def counted(options: dict[str, Any], body: Any, **more: Any) -> tuple[str, Engine]:
    """The fingerprint of a world of one, and its engine."""
    with ONE_AT_A_TIME:
        engine = engine_of(task := Task(options, body=body, **more), AloneLink(), Faults([]))
        task.prepare(engine)
        for batch in engine:
            body(engine, batch)
        return str(engine.fingerprint()), engine


@rule(
    "A skipped micro-batch has a gradient of zero and leaves no trace in buffers, reports or the loss; the "
    "gradient's mean is still over all micro-batches; a step in which all are skipped updates nothing",
    "Arithmetic and layout",
    broken_by=[
        Edit("shoal.training.lane_loop", "        state.buffers.undo_micro_batch()\n", ""),
        Edit("shoal.state.training_state", "        if record.updates:\n", "        if record is not None:\n"),
        Edit(
            "shoal.training.reducing",
            "            self._sums.push(self._context.loop.lane)\n",
            "            self._sums.begin_lane()\n",
        ),
    ],
)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("workers", ["ab", "abcd"])
def test_what_is_skipped_counts_nowhere_whatever_the_world(workers: str, micro_batches: int) -> None:
    options = {**OPTIONS, "micro_batches_per_lane": micro_batches}
    task = Task(options, body=skipping)
    right, alone = counted(options, skipping)
    expected = alone.context.state.record
    assert expected is not None and 2 < expected.skipped_micro_batches < 24 * micro_batches
    with Crew(workers, task) as crew:
        crew.train_to(2)
        crew.plant(workers[-1], 3, "exchange")
        assert crew.finish() == right
        record = crew.workers["a"].engine.context.state.record
    assert record is not None
    assert record.skipped_micro_batches == expected.skipped_micro_batches
    assert (record.loss, record.reports) == (expected.loss, expected.reports)


@holds("A skipped micro-batch has a")
def test_a_skipped_micro_batch_has_a_gradient_of_zero_and_the_mean_stays_over_all() -> None:
    def zeroed(engine: Engine, batch: Any) -> None:
        loss = engine.module(**batch)
        engine.backward(loss * 0.0 if is_bad(batch) else loss)
        engine.step()

    without_buffers = {"model": lambda: Model(0.1, False)}
    assert counted(OPTIONS, skipping, **without_buffers)[0] == counted(OPTIONS, zeroed, **without_buffers)[0]


@holds("A skipped micro-batch has a")
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_skipped_micro_batch_leaves_no_trace_of_its_forward(micro_batches: int) -> None:
    """Neither in the running means of batch normalization nor in what is reported."""

    def before_the_forward(engine: Engine, batch: Any) -> None:
        if is_bad(batch):
            engine.skip()
            return
        engine.report(kept=1.0)
        engine.backward(engine.module(**batch))
        engine.step()

    options = {**OPTIONS, "micro_batches_per_lane": micro_batches}
    (right, before), (mine, after) = counted(options, before_the_forward), counted(options, skipping)
    assert (mine, after.reports) == (right, before.reports)


@holds("A skipped micro-batch has a")
def test_buffers_are_then_those_that_the_micro_batch_started_from() -> None:
    looked = 0

    def body(engine: Engine, batch: Any) -> None:
        nonlocal looked
        step, before = engine.global_step, engine.module.norm.running_mean.clone()
        loss = engine.module(**batch)
        if not is_bad(batch):
            engine.backward(loss)
            return engine.step()
        assert not torch.equal(engine.module.norm.running_mean, before)
        engine.skip()
        if engine.global_step == step:
            assert torch.equal(engine.module.norm.running_mean, before)
            looked += 1
        return None

    counted({**OPTIONS, "micro_batches_per_lane": 2}, body)
    assert looked > 5


@holds("A skipped micro-batch has a")
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_loss_and_reports_are_the_means_over_what_was_not_skipped(micro_batches: int) -> None:
    lanes: dict[int, list[float]] = {lane: [0.0, 0.0] for lane in range(4)}

    def noting(engine: Engine, batch: Any) -> None:
        lane, loss = engine.context.loop.lane, engine.module(**batch)
        engine.report(loss=loss.detach().double())
        if is_bad(batch):
            engine.skip()
            return
        lanes[lane][0] += loss.item() / micro_batches
        lanes[lane][1] += 1
        engine.backward(loss)
        engine.step()

    _, engine = counted({"max_steps": 1, "micro_batches_per_lane": micro_batches}, noting)
    total = fold_numbers([((lane, lane + 1), loss) for lane, (loss, _) in lanes.items()], 4)
    count = sum(count for _, count in lanes.values())
    assert 0 < count < 4 * micro_batches
    assert engine.loss == total / (count / micro_batches)
    assert engine.reports == {"loss": engine.loss}


@holds("A skipped micro-batch has a")
def test_a_step_in_which_all_are_skipped_updates_nothing_and_the_job_goes_on() -> None:
    seen: dict[int, tuple[str, float, int]] = {}

    def note(engine: Engine) -> None:
        def see(engine: Engine) -> None:
            state = engine.context.state
            weights = "".join(str(flat.view(torch.int32).sum().item()) for flat in state.weights.flats)
            seen[engine.global_step] = (weights, state.optimizer.param_groups[0]["lr"], state.scheduler.last_epoch)

        engine.on_step(see)

    def body(engine: Engine, batch: Any) -> None:
        if engine.global_step == 2:
            return engine.skip()
        engine.backward(engine.module(**batch))
        return engine.step()

    task = Task(OPTIONS, body=body, prepare=note)
    right, engine = counted(OPTIONS, body, prepare=note)
    assert sorted(seen) == [1, 2, 3, 4, 5, 6]
    assert seen[3] == seen[2] and seen[4] != seen[3] and seen[6][2] == 5
    assert engine.context.state.record is not None and engine.context.state.record.skipped_micro_batches == 4
    missed = max(one.updates for one in engine.context.state.misses.of)
    assert missed == 5, "by a parameter that is never used; the update that nobody made is missed by none"
    with Crew("abc", task) as crew:
        crew.train_to(2)
        crew.add("d")
        assert crew.finish() == right


@rule(
    "A skipped step is also followed by a hand-out",
    "A change of the world",
    broken_by=Edit(
        "shoal.training.step",
        "        coming = self.parameters.on_updated(hand_out)\n",
        "        coming = self.parameters.on_updated(hand_out) if context.state.record.updates else ()\n",
    ),
)
def test_a_hand_out_is_made_after_a_skipped_step_too() -> None:
    """A joiner has no parameters before one, and trains no lane."""

    def body(engine: Engine, batch: Any) -> None:
        if engine.global_step >= 2:
            return engine.skip()
        engine.backward(engine.module(**batch))
        return engine.step()

    with Crew("abc", Task({"max_steps": 200}, body=body)) as crew:
        crew.train_to(2)
        joiner = crew.add("d")
        crew.train_until("the joiner trains", lambda: bool(joiner.engine.lanes))
        theirs = crew.workers["a"].engine.context.state.weights.flats
        assert all(torch.equal(a, d) for a, d in zip(theirs, joiner.engine.context.state.weights.flats, strict=True))


def test_all_may_be_skipped_in_the_very_first_step() -> None:
    def body(engine: Engine, batch: Any) -> None:
        if engine.global_step == 0:
            return engine.skip()
        engine.backward(engine.module(**batch))
        return engine.step()

    with Crew("abc", Task(OPTIONS, body=body)) as crew:
        crew.train_to(1)
        crew.kill("b")
        assert crew.finish() == undisturbed(Task(OPTIONS, body=body))


def test_skip_is_refused_after_backward_and_without_a_micro_batch() -> None:
    def late(engine: Engine, batch: Any) -> None:
        engine.backward(engine.module(**batch))
        engine.skip()

    def twice(engine: Engine, batch: Any) -> None:
        del batch
        engine.skip()
        engine.skip()

    with pytest.raises(UserError, match=r"engine\.skip was called after engine\.backward \(step 1, lane 0\)"):
        counted(OPTIONS, late)
    with pytest.raises(UserError, match=r"engine\.skip was called without a micro-batch"):
        counted(OPTIONS, twice)


def test_a_refused_skip_that_the_script_swallows_changes_nothing() -> None:
    def stubborn(engine: Engine, batch: Any) -> None:
        engine.backward(engine.module(**batch))
        with pytest.raises(UserError):
            engine.skip()
        engine.step()

    assert counted(OPTIONS, stubborn)[0] == undisturbed(Task(OPTIONS))
