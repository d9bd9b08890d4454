"""Lanes whose model is divided into stages: each member has parameters of its own, and torch's schedules drive them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from crew import Worker
from integration.scripts import LENGTH, WIDTH
from pipeline_parallel import (
    ALL,
    CUBE,
    MICRO_BATCHES,
    OF_EXPERTS,
    PIPELINE,
    SQUARE,
    Body,
    Fixed,
    in_stages,
    losses_of_the_whole,
    made_for,
    stages_of,
)
from rule import Edit, holds, rule
from shoal.training.engine import Engine
from shoal.training.resize import tellers
from shoal_protos.shape import Shape
from tensor_parallel import CellTask, coordinate_of, crew_of, trained
from tiers import check
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B


def gradient_descent(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def task_of(shape: Shape, stage: int = 1, kind: Any = Schedule1F1B, turns: int = 1, **options: Any) -> CellTask:
    return in_stages(CellTask({"stage": stage, **options}, shape=shape), kind, turns)


@cache
def one_cell(shape: Shape, kind: Any = Schedule1F1B, turns: int = 1) -> str:
    """The fingerprint of a world of one cell."""
    with crew_of("abcdefghijklmnop"[: shape.processes], task_of(shape, kind=kind, turns=turns)) as crew:
        return crew.finish()


@pytest.mark.parametrize(
    ("shape", "kind", "turns", "stage"),
    [
        (PIPELINE, Schedule1F1B, 1, 1),
        (SQUARE, Schedule1F1B, 1, 1),
        pytest.param(PIPELINE, ScheduleGPipe, 1, 0, marks=check("as by 1F1B")),
        pytest.param(PIPELINE, ScheduleInterleaved1F1B, 2, 1, marks=check("as by 1F1B")),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_losses_are_those_of_the_whole_model_in_one_process(shape: Shape, kind: Any, turns: int, stage: int) -> None:
    found: dict[str, list[float]] = {}
    trains = Body(kind)

    def body(engine: Engine, batch: Any) -> None:
        if trains(engine, batch) and engine.loss is not None:
            found.setdefault(engine.context.link.worker, []).append(engine.loss)

    options = {"micro_batches_per_lane": MICRO_BATCHES, "lanes": 4, "stage": stage, "gradient_clipping": 0.0}
    model = partial(stages_of, turns=turns, dropout=0.0)
    task = CellTask(options, body=body, shape=shape, model=model, optimizer=gradient_descent, data=lambda: Fixed(40))
    names = "abcdefgh"[: 2 * shape.processes]
    with crew_of(names, task) as crew:
        crew.finish()
    assert len(found) == len(names) and len({tuple(losses) for losses in found.values()}) == 1, "all know the loss"
    whole = {**options, "max_steps": 6, "stage": 1}
    assert found["a"] == pytest.approx(losses_of_the_whole(whole, gradient_descent, 2 * turns), abs=1e-5)


@pytest.mark.parametrize(
    ("shape", "names", "stage", "kind", "turns"),
    [
        (PIPELINE, "abcd", 1, Schedule1F1B, 1),
        pytest.param(PIPELINE, "abcdef", 0, Schedule1F1B, 1, marks=check("as two cells")),
        (PIPELINE, "abcde", 1, ScheduleInterleaved1F1B, 2),
        (PIPELINE, "abcde", 2, Schedule1F1B, 1),
        pytest.param(PIPELINE, "ab", 2, ScheduleInterleaved1F1B, 2, marks=check("as by 1F1B")),
        (SQUARE, "abcdefgh", 1, Schedule1F1B, 1),
        (SQUARE, "abcdefgh", 2, Schedule1F1B, 1),
        pytest.param(OF_EXPERTS, "abcdefgh", 2, Schedule1F1B, 1, marks=check("as experts and stages alone")),
        pytest.param(ALL, "abcdefghijklmnop", 2, Schedule1F1B, 1, marks=check("sixteen members, in all dimensions")),
        pytest.param(CUBE, "abcdefghijklmnop", 1, Schedule1F1B, 1, marks=check("two cells of eight")),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_any_number_of_cells_ends_in_the_same_bits(shape: Shape, names: str, stage: int, kind: Any, turns: int) -> None:
    with crew_of(names, task_of(shape, stage, kind, turns)) as crew:
        assert trained(crew) == one_cell(shape, kind, turns)


MORE = [pytest.param(point, marks=check("as at the other points")) for point in ("vote", "exchange", "mirror")]


@pytest.mark.parametrize("point", ["between", "meet", "backward", *MORE])
@pytest.mark.parametrize("victim", ["c", pytest.param("d", marks=check("as of the first stage"))])
@rule(
    "A schedule's stages shake hands anew in every world, and leave no trace in buffers",
    "Cells",
    broken_by=[
        Edit("shoal.cells.pipelining", "known != (generation, samples)", "known is None or known[1] != samples"),
        Edit("shoal.cells.pipelining", "buffer.copy_(before)", "pass"),
        Edit("shoal.cells.pipelining", " or not self._is_line", ""),
    ],
)
def test_a_process_that_is_killed_changes_no_bit(point: str, victim: str) -> None:
    """Between micro-batches, which is in a handshake too where that is the first lane of a world."""
    with crew_of("abcde", task_of(PIPELINE)) as crew:
        crew.train_to(2)
        crew.plant(victim, 4, point)
        assert trained(crew) == one_cell(PIPELINE)


def shakes_hands(worker: Worker, point: str) -> bool:
    """Whether it computes for a handshake with its neighbours."""
    schedules = worker.engine.training.pipeline._schedules
    return point == "between" and schedules.is_shaking_hands and worker.engine.context.world is not None


def test_a_process_that_is_killed_in_a_handshake_changes_no_bit() -> None:
    killed: list[str] = []

    def look(worker: Worker, point: str, _: int) -> None:
        if worker.name == "d" and shakes_hands(worker, point):
            worker.killed = True
            killed.append(worker.name)

    task = task_of(PIPELINE, max_steps=20)
    with crew_of("ab", task) as crew:
        crew.watchers.append(look)
        crew.train_to(2)
        for name in "cd":  # who know no shapes
            crew.add(name, task.at(coordinate_of(name, PIPELINE)))
        crew.train_until("a death", lambda: bool(killed))
        several = trained(crew)
    with crew_of("ab", task) as crew:
        assert trained(crew) == several


@pytest.mark.parametrize("point", ["between", *MORE])
def test_a_process_that_is_killed_in_stage_2_changes_no_bit(point: str) -> None:
    with crew_of("abcde", task_of(PIPELINE, stage=2)) as crew:
        crew.train_to(2)
        crew.plant("d", 4, point)
        assert trained(crew) == one_cell(PIPELINE)


@holds("A schedule's stages shake hands anew")
@pytest.mark.parametrize("spares", ["", "e"], ids=["the others know them", "a spare is told by the others"])
def test_stages_that_know_the_shapes_compute_nothing_in_a_handshake(spares: str) -> None:
    computed: list[str] = []

    def look(worker: Worker, point: str, _: int) -> None:
        if shakes_hands(worker, point):
            computed.append(worker.name)

    with crew_of(f"abcd{spares}", task_of(PIPELINE)) as crew:
        crew.watchers.append(look)
        crew.train_to(2)
        assert sorted(computed) == ["a", "b", "c", "d"]
        crew.kill("c")
        assert trained(crew) == one_cell(PIPELINE)
        assert sorted(computed) == ["a", "b", "c", "d"]
        if spares:
            assert crew.workers["e"].engine.context.loop.lanes


class KnowingBody(Body):
    """Whose stages are made with what they get."""

    def schedule(self, engine: Engine) -> Any:
        if engine not in self._schedules:
            samples = engine.context.config.micro_batch_size // MICRO_BATCHES
            self._schedules[engine] = made_for(engine, self.kind, torch.empty(samples, LENGTH, WIDTH))
        return self._schedules[engine]


@rule(
    "A process of a pipeline rehearses a lane alone where it knows what its stages get: the first one does, and others "
    "whose script says it",
    "Cells",
    broken_by=[
        Edit("shoal.cells.pipelining", "stage.is_first or stage._user_meta.inputs is not None", "stage.is_first"),
        Edit("shoal.cells.pipelining", "stage.is_first or stage._user_meta.inputs is not None", "not stage.is_first"),
        Edit("shoal.cells.pipelining", "replace(one, requires_grad=one.dtype.is_floating_point)", "one"),
    ],
)
@pytest.mark.parametrize(("kind", "turns"), [(Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)])
@pytest.mark.parametrize("says_it", [True, False])
def test_a_process_that_knows_what_its_stages_get_rehearses_a_lane(says_it: bool, kind: Any, turns: int) -> None:
    forwards: Counter[str] = Counter()

    def look(worker: Worker, point: str, _: int) -> None:
        if point == "between" and worker.engine.context.world is None:
            forwards[worker.name] += 1

    task = replace(task_of(PIPELINE, kind=kind, turns=turns), body=(KnowingBody if says_it else Body)(kind))
    crew = crew_of("ab", task)
    crew.watchers.append(look)
    with crew:
        assert trained(crew) == one_cell(PIPELINE, kind, turns)
    rehearse = "ab" if says_it else "a" if turns == 1 else ""
    assert forwards == dict.fromkeys(rehearse, turns * (1 + MICRO_BATCHES)), "for the handshake, and the lane"


@holds("A process of a pipeline rehearses a lane alone")
def test_a_rehearsal_computes_with_tensors_as_a_lane_does_and_compiles_for_them() -> None:
    seen: dict[bool, set[tuple[object, ...]]] = {}

    def prepare(engine: Engine) -> None:
        def note(_: nn.Module, inputs: tuple[Tensor]) -> None:
            form = inputs[0].shape, inputs[0].dtype, inputs[0].requires_grad
            seen.setdefault(engine.warming_up, set()).add(form)

        for stage in engine.module.children():
            stage.register_forward_pre_hook(note)

    task = replace(task_of(PIPELINE), body=KnowingBody(), prepare=prepare)
    with crew_of("ab", task) as crew:
        assert trained(crew) == one_cell(PIPELINE)
    assert len(seen[True]) == 2 and seen[True] == seen[False], "of both stages"


class ByLength(Body):
    """A schedule for each length. `is_short`: whether the lane at hand has half of it."""

    def __init__(self, is_short: Callable[[Engine], bool]) -> None:
        super().__init__()
        self._is_short = is_short
        self._by_length: WeakKeyDictionary[Engine, dict[int, Any]] = WeakKeyDictionary()

    def __call__(self, engine: Engine, batch: Any) -> bool:
        length = LENGTH // (2 if self._is_short(engine) else 1)
        known = self._by_length.setdefault(engine, {})
        if length not in known:
            known[length] = made_for(engine, self.kind)
        self._schedules[engine] = known[length]
        return super().__call__(engine, {name: one[:, :length].contiguous() for name, one in batch.items()})


UNLIKE = (-1, -1)
"""`ends_of` a process whose schedules differ."""


@rule(
    "A spare is told what passes between stages where others of its cell know it, and it fits what they know",
    "Cells",
    broken_by=[
        Edit("shoal.cells.pipelining", "            if schedule._has_backward:", "            if True:"),
        Edit("shoal.training.resize", "len(givers) < len(cell) and ", ""),
        Edit("shoal.training.resize", "one[1] == next_one[0]", "True"),
    ],
)
@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([(1, 2), (2, 3), (1, 2), (0, 0)], {3: 1}),
        ([(1, 2), (2, 3), (0, 0), (2, 3)], {2: 0}),
        ([(1, 2), (2, 3), (0, 0), (0, 0)], {}),
        ([(1, 2), (2, 3), (1, 4), (0, 0)], {}),
        ([(1, 2), (2, 3), UNLIKE, (0, 0)], {}),
        ([(1, 2), UNLIKE, (1, 2), (0, 0)], {}),
        ([(1, 2), (2, 3), UNLIKE, UNLIKE], {}),
    ],
    ids=["last", "first", "all of a cell", "other shapes", "several shapes", "told by none", "nobody lacks them"],
)
def test_a_spare_is_told_what_fits_its_neighbours(ends: list[tuple[int, int]], expected: dict[int, int]) -> None:
    members = [SimpleNamespace(coordinate=rank % 2) for rank in range(4)]
    plan: Any = SimpleNamespace(members=members, cells=((0, 1), (2, 3)))
    assert tellers(plan, ends) == expected


@pytest.mark.parametrize(
    "is_short",
    [lambda engine: engine.context.loop.place[0] >= 2, lambda engine: engine.global_step >= 2],
    ids=["lanes of the second half", "the next step"],
)
@rule(
    "What a stage computes in a handshake need not be as it was known where others knew nothing",
    "Cells",
    broken_by=Edit("shoal.cells.pipelining", "    stage._user_meta = given\n", ""),
)
@holds("A spare is told what passes between stages")
def test_a_spare_whose_lanes_have_another_length_changes_no_bit(is_short: Callable[[Engine], bool]) -> None:
    task = replace(task_of(PIPELINE), body=ByLength(is_short))
    with crew_of("abcdf", task) as crew:
        crew.train_to(2)
        crew.kill("d")
        several = trained(crew)
    with crew_of("ab", task) as crew:
        assert trained(crew) == several


def run(engine: Engine) -> None:
    """A lane's call of a schedule, whose shapes are right."""
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    schedule = made_for(engine, Schedule1F1B)
    part = engine.context.state.layout.part
    engine.run(schedule.step, *([tokens] if part.place == 0 else []), target=tokens if part.place else None)


def backward(engine: Engine) -> None:
    engine.backward(torch.zeros((), requires_grad=True))


def skip(engine: Engine) -> None:
    engine.skip()


def run_twice(engine: Engine) -> None:
    run(engine)
    run(engine)


def run_within_averages(engine: Engine) -> None:
    with engine.averaged():
        run(engine)


def step(engine: Engine) -> None:
    engine.step()


def step_twice(engine: Engine) -> None:
    run(engine)
    engine.step()
    engine.step()


def loss_of_every_token(engine: Engine) -> None:
    engine.loss_fn(lambda: torch.zeros(3, requires_grad=True))()


def nothing(engine: Engine) -> None:
    del engine


OF_LANES = (
    "is for one micro-batch, and in a pipeline a schedule trains all of a lane; call engine.run(schedule.step, …)"
)


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (backward, f"engine.backward {OF_LANES}"),
        (skip, f"engine.skip {OF_LANES}"),
        (run_twice, "engine.run was called twice for one lane (in the warm-up); its gradient would count twice. Give"),
        (run_within_averages, "engine.run was called within engine.averaged; leave that context before it"),
        (step, "engine.step was called without engine.run (in the warm-up), so this lane would be missing from"),
        (step_twice, "engine.step was called without a lane; call it once for each batch that this engine yields"),
        (nothing, "without engine.step (in the warm-up), so this lane would be repeated for ever"),
        (loss_of_every_token, "engine.loss_fn got a loss of shape (3,); expected the mean over the micro-batch"),
    ],
)
@holds("Each micro-batch has exactly one")
def test_a_call_out_of_order_in_a_pipelines_loop_is_one_sentence(act: Callable[[Engine], None], sentence: str) -> None:
    task = task_of(PIPELINE, shoal={"average": {"decay": 0.9}})
    with crew_of("ab", replace(task, body=lambda engine, _: act(engine))) as crew:
        crew.until("a refusal", lambda: any(worker.failure for worker in crew.workers.values()))
        failure = next(worker.failure for worker in crew.workers.values() if worker.failure)
    assert sentence in failure, failure


@holds("A schedule's stages shake hands anew")
@check("many processes and steps")
def test_processes_of_a_square_are_killed_and_others_join_and_no_bit_changes() -> None:
    task = task_of(SQUARE, max_steps=20)
    with crew_of("abcdefgh", task) as crew:
        crew.train_to(2)
        crew.plant("g", 4, "between")
        crew.train_to(6)
        crew.add("k", task.at(coordinate_of("k", SQUARE)))
        crew.train_until("two cells", lambda: len(crew.job.durable.current.cells) == 2)  # type: ignore[union-attr]
        several = trained(crew)
    with crew_of("abcd", task) as crew:
        assert trained(crew) == several
