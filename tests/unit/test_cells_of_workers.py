"""Lanes that are trained by cells of two workers: real engines in one process, the real machine, a model in halves."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from crew import Killed
from rule import Edit, rule
from shoal.exchange.packing import receive_framed
from shoal.group.group import WorldChanged
from shoal.training import resize
from shoal.training.engine import Engine
from shoal_protos.acts import DrainWorker
from shoal_protos.messages import FRESH_PROCESS
from tensor_parallel import TWO, CellTask, Parallel, coordinate_of, crew_of, losses_of_the_whole, partners, trained
from tiers import check

STAGES = pytest.mark.parametrize("stage", [pytest.param(0, marks=check("as stage 1, with all state everywhere")), 1])


def task_of(stage: int = 1, **options: Any) -> CellTask:
    return CellTask({"stage": stage, **options})


@cache
def one_cell(stage: int = 1) -> str:
    """The fingerprint of a world of one cell."""
    with crew_of("ab", task_of(stage)) as crew:
        return crew.finish()


@STAGES
@pytest.mark.parametrize("names", ["abcd", "abcdef", "abcde"])
@rule(
    "Any number of cells ends in the same bits, with spare members beside them",
    "Cells",
    broken_by=[
        Edit(
            "shoal.exchange.traffic",
            "self.lane_spans = self._spans_at(self._own)",
            "self.lane_spans = self._spans_at(self.REPORTER)",
        )
    ],
)
def test_any_number_of_cells_ends_in_the_same_bits(stage: int, names: str) -> None:
    with crew_of(names, task_of(stage)) as crew:
        assert trained(crew) == one_cell(stage)


@pytest.mark.parametrize("options", [{"gradient_clipping": 0.5}, {"lanes": 3, "micro_batches_per_lane": 2}])
def test_losses_are_those_of_the_whole_model_in_one_process(options: dict[str, Any]) -> None:
    found: dict[str, list[float]] = {}

    def body(engine: Engine, batch: Any) -> None:
        engine.backward(engine.module(**batch))
        if engine.step() and engine.loss is not None:
            found.setdefault(engine.context.link.worker, []).append(engine.loss)

    with crew_of("abcd", CellTask(options, body=body)) as crew:
        crew.finish()
    assert len(found) == 4 and len({tuple(losses) for losses in found.values()}) == 1, "all members know the loss"
    assert found["a"] == pytest.approx(losses_of_the_whole(options), abs=1e-5)


POINTS = ("between", "meet", "backward", "vote")
WITHIN_A_LANE = ("between", "meet", "backward")
"""All members of the cell have begun the lane then; at `forward`, the others may be before their batch."""
MORE = ("forward", "exchange", "mirror", "hand_out", "optimizer", "in_vote")


@pytest.mark.parametrize(
    "point", [*POINTS, *(pytest.param(point, marks=check("as at the other points")) for point in MORE)]
)
@pytest.mark.parametrize("killed", [pytest.param("c", marks=check("as coordinate 1")), "d"])
@rule(
    "A lane in which a member of a cell was lost is trained again by all of its members",
    "Cells",
    broken_by=[
        Edit(
            "shoal.training.resize",
            "        if context.loop.in_flight and context.world is not None and not context.is_cell_whole:",
            "        if False:",
        )
    ],
)
def test_a_process_that_is_killed_while_a_spare_is_there_changes_no_bit(point: str, killed: str) -> None:
    with crew_of("abcdef", task_of()) as crew:
        crew.train_to(2)
        crew.plant(killed, 4, point)
        assert trained(crew) == one_cell()
        others = [worker.engine.context for name, worker in crew.workers.items() if name != killed]
        assert point not in WITHIN_A_LANE or any(context.loop.void_lanes for context in others)
        assert any(context.hub.wait_seconds > 0 for context in others)


@STAGES
def test_cells_that_were_broken_at_different_coordinates_are_paired_anew(stage: int) -> None:
    with crew_of("abcd", task_of(stage)) as crew:
        crew.train_to(2)
        crew.kill("a")
        crew.kill("d")
        crew.train_to(3)
        world = crew.job.durable.current
        assert world is not None
        assert [[world.members[rank].worker for rank in cell] for cell in world.cells] == [["c", "b"]]
        assert trained(crew) == one_cell(stage)


@check("a join takes many steps")
def test_half_a_cell_joins_and_is_a_spare_until_the_other_half_comes() -> None:
    with crew_of("ab", task_of(max_steps=30)) as crew:
        crew.train_to(2)
        crew.add("c", task_of(max_steps=30).at(coordinate_of("c")))
        crew.train_until("a spare", lambda: len(crew.job.durable.current.members) == 3)  # type: ignore[union-attr]
        crew.add("d", task_of(max_steps=30).at(coordinate_of("d")))
        crew.train_until("two cells", lambda: len(crew.job.durable.current.cells) == 2)  # type: ignore[union-attr]
        several = trained(crew)
    with crew_of("ab", task_of(max_steps=30)) as crew:
        assert trained(crew) == several


@rule(
    "Buffers of a cell's coordinates are each their own",
    "Cells",
    broken_by=[Edit("shoal.exchange.buffer_exchange", "rows[list(traffic.coordinates.mates)]", "rows")],
)
def test_each_coordinate_has_buffers_of_its_own() -> None:
    found = {}
    for names in ("ab", "abcd"):
        with crew_of(names, CellTask(buffers=True)) as crew:
            crew.train_to(2)
            if names == "abcd":
                crew.kill("a")
            found[names] = trained(crew)
    assert found["ab"] == found["abcd"]


@pytest.mark.parametrize("key", ["bf16", pytest.param("fp16", marks=check("as bf16, with a scale of the loss"))])
def test_any_number_of_cells_ends_in_the_same_bits_in_half_precision(key: str) -> None:
    found = set()
    for names in ("ab", "abcd"):
        with crew_of(names, task_of(precision={key: {"enabled": True}})) as crew:
            found.add(trained(crew))
    assert len(found) == 1


@rule(
    "Between a change that pairs a cell anew and the next batch its collectives are answered from here",
    "Cells",
    broken_by=[Edit("shoal.training.resize", "plan.recovery is not None or self._cell != before", "False")],
)
def test_an_evaluation_in_a_body_waits_for_no_member_that_has_come_to_the_cell_after_it() -> None:
    def body(engine: Engine, batch: Any) -> None:
        engine.backward(engine.module(**batch))
        if engine.step():
            with engine.evaluating():
                engine.module(**batch)

    with crew_of("abd", CellTask({"max_steps": 8}, body=body)) as crew:
        crew.train_to(2)
        crew.request(DrainWorker("b"))
        crew.train_until("the other half to come", lambda: len(crew.job.durable.current.members) == 2)  # type: ignore[union-attr]
        several = trained(crew)
    with crew_of("ab", task_of(max_steps=8)) as crew:
        assert trained(crew) == several


@rule(
    "A script that raises in a void lane has not failed: its process is made anew, and the others train on",
    "Cells",
    broken_by=[
        Edit(
            "shoal.training.exit",
            "        if self._is_of_a_void_lane:\n            self.starts",
            "        if False:\n            self.starts",
        )
    ],
)
@pytest.mark.parametrize(
    ("end", "why"),
    [
        (ValueError("half of the model is missing"), "ValueError: half of the model is missing"),
        (SystemExit(7), "the script ended"),
    ],
)
def test_a_script_that_raises_or_ends_in_a_void_lane_has_not_failed(end: BaseException, why: str) -> None:
    def body(engine: Engine, batch: Any) -> None:
        loss, count = engine.module(**batch), partners(engine)
        if engine.context.link.worker == "c" and not engine.warming_up and count != TWO.processes:
            raise end
        engine.backward(loss)
        engine.step()

    with crew_of("abcdef", CellTask(body=body)) as crew:
        crew.train_to(2)
        crew.plant("d", 4, "between")
        assert trained(crew) == one_cell()
        [result] = [one for one in crew.workers["c"].link.results if one.failure]
        assert result.failure.startswith(f"failed in a void lane: {why} (")
        assert result.fault is not None and result.fault.exception == FRESH_PROCESS


@rule(
    "What a script asks for in a void lane is ignored: it comes by that lane again. A function for committed steps is "
    "in none",
    "Cells",
    broken_by=[
        Edit(
            "shoal.training.training_loop",
            "is_warming_up or _is_in_a_void_lane(context, self._parts):",
            "is_warming_up:",
        ),
        Edit(
            "shoal.training.training_loop",
            "(context.loop.in_flight or context.loop.comes_again)",
            "context.loop.in_flight",
        ),
        Edit("shoal.training.training_loop", "return is_in_body and ", "return "),
    ],
)
def test_what_a_script_asks_for_in_a_void_lane_is_ignored_and_what_it_asks_for_of_a_step_is_not() -> None:
    def body(engine: Engine, batch: Any) -> None:
        loss, count = engine.module(**batch), partners(engine)
        calls: list[Callable[[], object]] = [lambda: None, partial(engine.backward, loss), engine.step]
        for call in calls:
            call()
            if not engine.warming_up and count != TWO.processes:
                void.append(engine.context.link.worker)
                engine.stop()

    def stops(engine: Engine) -> None:
        if engine.global_step == 3:
            if engine.context.link.worker == "a":
                raise Killed
            engine.stop()

    for prepare, steps in ((lambda _: None, 6), (lambda engine: engine.on_step(stops), 4)):
        void: list[str] = []
        with crew_of("abcdef", CellTask(body=body, prepare=prepare)) as crew:
            crew.train_to(2)
            if steps == 6:
                crew.plant("d", 4, "between")
            digest = trained(crew)
            assert crew.job.durable.step == steps and (steps < 6 or digest == one_cell()), crew.story()
            assert void or steps < 6, "in the second story the others may have noticed before they began the lane"


@rule(
    "A joiner whose world breaks while it is told of the state has not begun it, and joins the next one",
    "A change of the world",
    broken_by=Edit(
        "shoal.training.resize", "            context.state.give_up()\n            return False", "            raise"
    ),
)
def test_a_joiner_joins_the_next_world_where_its_first_one_breaks_while_it_is_told_of_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, broke = task_of(max_steps=30), list[int]()

    def receive(group: Any, source: int, tag: int) -> bytes:
        if not broke:
            broke.append(source)
            crew.workers["b"].killed = True
            raise WorldChanged("its connection to b broke")
        return receive_framed(group, source, tag)

    monkeypatch.setattr(resize, "receive_framed", receive)
    with crew_of("abcd", task) as crew:
        crew.train_to(2)
        crew.add("f", task.at(coordinate_of("f")))
        crew.train_until("it to train", lambda: any("f" in cell for cell in crew.job.durable.current.workers_of_cells))  # type: ignore[union-attr]
        several = trained(crew)
        assert not crew.workers["f"].failure and broke == [1]
    with crew_of("ab", task) as crew:
        assert trained(crew) == several


def test_a_script_that_raises_in_its_warm_up_is_told_that_it_ran_alone() -> None:
    def body(engine: Engine, batch: Any) -> None:
        if partners(engine) != TWO.processes:
            raise ValueError("half of the model is missing")

    with crew_of("ab", CellTask(body=body)) as crew:
        crew.allow()
        crew.until("its error", lambda: bool(crew.workers["a"].link.results))
        failure = crew.workers["a"].link.results[0].failure
    assert failure.startswith("ValueError: half of the model is missing, in the warm-up (engine.warming_up), which a ")


def test_members_of_a_cell_that_make_different_collectives_fail_the_job_with_both_sentences() -> None:
    def body(engine: Engine, batch: Any) -> None:
        if engine.context.link.worker == "d" and not engine.warming_up:
            partners(engine, 3)
        engine.backward(engine.module(**batch))
        engine.step()

    with crew_of("abcd", CellTask(body=body)) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        assert crew.job.durable.phase.value == "failed"
        assert re.search(
            r"coordinate 0 makes all_reduce \(SUM\) of 2048 .*, and coordinate 1 all_reduce \(SUM\) of 3 float32",
            crew.job.durable.reason,
        )


@pytest.mark.parametrize(("wrong", "options"), [(0, {}), (3, {"micro_batches_per_lane": 2}), (1, {"stage": 2})])
@rule(
    "Gradients that are said to be equal over a cell, and are not, fail the job at once by a parameter's name",
    "Cells",
    broken_by=[
        Edit("shoal.training.reducing", "        equal.compare()", "        pass"),
        Edit("shoal.training.reducing", "and loop.at_lanes_last_backward", "and False"),
        Edit(
            "shoal.training.reducing",
            "        equal.note(bucket, sums.live.made)\n        on_filled(bucket)",
            "        on_filled(bucket)",
        ),
    ],
)
def test_gradients_that_are_said_to_be_equal_and_are_not_are_named(wrong: int, options: dict[str, Any]) -> None:
    def body(engine: Engine, batch: Any) -> None:
        loss, hub, model = engine.module(**batch), engine.context.hub, engine.module
        assert hub is not None and isinstance(model, Parallel)
        if hub.coordinate and not engine.warming_up and engine.context.loop.lane == wrong:
            loss = loss + model.norm.weight.sum()
        engine.backward(loss)
        engine.step()

    with crew_of("abcd", CellTask(options, body=body)) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        assert crew.job.durable.phase.value == "failed" and crew.job.durable.step == 0
        sentence = 'parameter "norm.weight" is said to have equal gradients on both tensor coordinates, and they differ'
        assert sentence in crew.job.durable.reason


@check("as in jobs of single processes")
def test_given_up_micro_batches_commits_and_callbacks_are_those_of_one_cell_in_any_number_of_cells() -> None:
    calls: dict[str, list[tuple[int, float]]] = {}

    def body(engine: Engine, batch: Any) -> None:
        loss = engine.module(**batch)
        engine.report(loss=loss)
        if engine.global_step == 3 and engine.context.loop.lane == 1:
            engine.skip()
            return
        engine.backward(loss)
        engine.step()

    def prepare(engine: Engine) -> None:
        name = engine.context.link.worker
        engine.on_commit(lambda now: calls.setdefault(name, []).append((now.global_step, now.reports["loss"])))
        engine.on_step(lambda now: calls.setdefault("rank 0", []).append((now.global_step, now.reports["loss"])))

    ends = {}
    for names in ("ab", "abcde"):
        calls.clear()
        with crew_of(names, CellTask(body=body, prepare=prepare)) as crew:
            if len(names) > 2:
                crew.train_to(2)
                crew.plant("a", 4, "between")
            ends[names] = trained(crew), calls["rank 0"]
        assert all(calls[name] == calls["rank 0"] for name in names if name != "a")
    assert ends["ab"] == ends["abcde"] and [step for step, _ in calls["rank 0"]] == [1, 2, 3, 4, 5, 6]
