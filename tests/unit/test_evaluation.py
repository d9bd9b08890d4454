"""Evaluation between two micro-batches: where it may stand, what it leaves alone, and where its numbers arrive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crew import Crew, Task, engine_of, undisturbed
from integration.scripts import Samples
from matrices import shortened
from rule import holds
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from shoal.training.evaluation import untouched
from shoal_protos.errors import UserError
from torch import nn

DATA = Samples(24)
OPTIONS: dict[str, Any] = {"max_steps": 4, "dropout": 0.3, "micro_batches_per_lane": 2}
"""Batch normalization, dropout, and two micro-batches a lane: the second one reads what the first made of buffers."""


def evaluate(engine: Engine) -> None:
    with engine.evaluating():
        assert not engine.module.training
        for batch in engine.shard(DATA):
            torch.rand(5)
            engine.module.get_submodule("norm").train()
            engine.report(validation=engine.module(**batch))


def alone(options: dict[str, Any]) -> Engine:
    return engine_of(Task(options), AloneLink(), Faults([]))


@holds("… and a third time, from a separate")
def test_at_the_top_of_the_loop_it_changes_no_bit() -> None:
    """Though it draws, and puts one part into training mode, so that buffers move."""
    with Crew("ab", Task(OPTIONS, in_loop=evaluate)) as crew:
        assert crew.finish() == undisturbed(Task(OPTIONS))


def test_after_a_micro_batch_it_changes_no_bit_in_the_middle_of_a_lane_either() -> None:
    def step(engine: Engine) -> None:
        engine.step()
        evaluate(engine)

    assert undisturbed(Task(OPTIONS, step=step)) == undisturbed(Task(OPTIONS))


def test_a_compiled_module_is_left_alone_too() -> None:
    """The wrapper shows the attributes of what it wraps, and sets them there."""

    def model() -> nn.Module:
        module = Task().model()
        module.register_buffer("seen", torch.zeros(2))
        return torch.compile(module, backend="eager")  # type: ignore[return-value]

    engine = engine_of(Task(OPTIONS, model=model), AloneLink(), Faults([]))
    before = {name: value.clone() for name, value in engine.module.named_buffers()}
    evaluate_on_nothing(engine)
    after = dict(engine.module.named_buffers())
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert all(part.training for part in engine.module.modules())


def test_a_forward_in_between_leaves_what_autograd_has_saved_of_batch_norm() -> None:
    model, inputs = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(8, 4)
    found = model(inputs)
    before = [buffer.clone() for buffer in model.buffers()]
    with untouched(model), torch.no_grad():
        model(3 * inputs)
    assert all(one.equal(other) for one, other in zip(model.buffers(), before, strict=True))
    found.square().mean().backward()


def evaluate_on_nothing(engine: Engine) -> None:
    with engine.evaluating():
        assert not any(part.training for part in engine.module.modules())
        for buffer in engine.module.buffers():
            buffer.add_(1)


def test_between_forward_and_step_it_is_refused() -> None:
    engine = alone(OPTIONS)
    loop = iter(engine)
    engine.module(**next(loop))
    with pytest.raises(UserError, match=r"between a micro-batch's forward and engine\.step"), engine.evaluating():
        pass


def test_its_modes_are_put_back_part_by_part() -> None:
    """A part that the script keeps in eval mode stays there."""
    engine = alone(OPTIONS)
    engine.module.get_submodule("norm").eval()
    with engine.evaluating():
        pass
    assert engine.module.training and not engine.module.get_submodule("norm").training


def test_its_last_numbers_arrive_though_no_step_follows() -> None:
    """Of an evaluation in the loop's last iteration, and of one after the loop; one that is left early counts too."""
    engine = alone({**OPTIONS, "max_steps": 1})
    for batch in engine:
        engine.backward(engine.module(**batch))
        if engine.step():
            evaluate(engine)
    last = engine.reports["validation"]
    assert last > 0
    with engine.evaluating():
        for _ in engine.shard(DATA):
            engine.report(accuracy=0.5)
            break
    assert engine.reports == {"validation": last, "accuracy": 0.5}


def test_after_the_loop_all_lanes_numbers_are_in_one_mean() -> None:
    def step(engine: Engine) -> None:
        if engine.step() and engine.context.is_over:
            with engine.evaluating():
                for _ in engine.shard(DATA):
                    engine.report(lane=float(engine.rank))

    with Crew("ab", Task({"max_steps": 2}, step=step)) as crew:
        crew.finish()
        means = [worker.engine.reports["lane"] for worker in crew.workers.values()]
    assert means == [0.5, 0.5]


@holds("The sum of an evaluation is")
@pytest.mark.parametrize("point", shortened(["vote", "in_vote", "hand_out"], "vote"))
def test_the_sums_that_a_failed_vote_carried_are_not_lost(point: str) -> None:
    """Of an evaluation at the top of the body, of which each worker makes one: survivors give their sums to the next
    vote; those of a vote that passed anywhere are in its record.
    """
    reports: dict[int, dict[str, float]] = {}
    measured: set[int] = set()

    def watch(engine: Engine) -> None:
        reports[engine.global_step] = engine.reports

    def measure(engine: Engine) -> None:
        if engine.global_step == 2 and id(engine) not in measured:
            measured.add(id(engine))
            with engine.evaluating():
                for _ in engine.shard(DATA):
                    engine.report(seen=1.0)

    options = {"max_steps": 5, "micro_batches_per_lane": 1}
    task = Task(options, in_loop=measure, prepare=lambda engine: engine.on_step(watch))
    with Crew("abc", task) as crew:
        crew.train_to(2)
        crew.plant("c", 3, point)
        crew.finish()
    assert [step for step, numbers in reports.items() if "seen" in numbers] == [3], reports


@holds("The sum of an evaluation is")
def test_a_mean_of_zero_is_a_number_too() -> None:
    """An exact sum of zero has no parts."""

    def step(engine: Engine) -> None:
        if engine.step() and engine.context.is_over:
            with engine.evaluating():
                for _ in engine.shard(DATA):
                    engine.report(right=0.0, bias=1.0 - 2.0 * engine.rank)

    with Crew("ab", Task({"max_steps": 2}, step=step)) as crew:
        crew.finish()
        assert [worker.engine.reports for worker in crew.workers.values()] == [{"right": 0.0, "bias": 0.0}] * 2


def test_a_number_of_no_batch_is_refused_where_it_is_given() -> None:
    """As of a sum over this worker's batches, which would be another one in every world."""
    engine = alone({**OPTIONS, "max_steps": 1})
    for batch in engine:
        engine.backward(engine.module(**batch))
        engine.step()
    with engine.evaluating():
        for _ in engine.shard(DATA):
            engine.report(accuracy=0.5)
        with pytest.raises(UserError, match=r"engine\.report in an evaluation is for the batches of engine\.shard"):
            engine.report(total=1.0)


def test_names_that_no_vote_has_room_for_are_refused_where_they_are_given() -> None:
    engine = alone(OPTIONS)
    with engine.evaluating():
        for _ in engine.shard(DATA):
            with pytest.raises(UserError, match=r"engine\.report in an evaluation got 1 name with 10004 bytes"):
                engine.report(**{"x" * 10_000: 1.0})
            with pytest.raises(UserError, match=r"engine\.report got loss=\{'a': 1\}; expected one number"):
                engine.report(loss={"a": 1})  # type: ignore[arg-type]
            break
