"""`PipelineModule`, `train_batch` and `eval_batch` of DeepSpeed, in cells that come and go."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Task, undisturbed
from crew_saves import saved
from integration.scripts import VOCABULARY, WIDTH
from pipeline_parallel import PIPELINE, THREE, Fixed, as_default, loss_of
from rule import Edit, rule
from shoal.cells.hub import CellHub
from shoal.cells.process_group import CellGroup
from shoal.core.sampler import Sampler
from shoal.deepspeed.own_loader import Feed
from shoal.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from shoal.deepspeed.pipeline_engine import PipelineEngine
from shoal.deepspeed.utils import RepeatingLoader
from shoal.training.engine import Engine
from shoal_protos.shape import ONE, Shape
from tensor_parallel import CellTask, coordinate_of, crew_of, trained
from tiers import check
from torch import Tensor, nn
from torch.utils.data import DataLoader

MICRO_BATCHES, STEPS, SAMPLES = 3, 6, 48
OPTIONS = {"micro_batches_per_lane": MICRO_BATCHES, "lanes": 4, "max_steps": STEPS}


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


def head(embedding: nn.Module, x: Tensor) -> Tensor:
    return x @ embedding.weight.T


def layers(dropout: float = 0.1, between: Callable[[], None] = lambda: None) -> list[Any]:
    """An embedding that is the head too, and blocks. `between`: called in each forward of stages that are not first."""

    def pause(x: Tensor) -> Tensor:
        between()
        return x

    return [
        TiedLayerSpec("words", nn.Embedding, VOCABULARY, WIDTH),
        *[LayerSpec(Block, WIDTH, dropout=dropout) for _ in range(3)],
        pause,
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("words", nn.Embedding, VOCABULARY, WIDTH, forward_fn=head),
    ]


class Seated:
    """The cell of a crew's member."""

    def __init__(self, hub: CellHub) -> None:
        self.hub, self.shape = hub, hub.shape

    def index(self, dimension: str) -> int:
        return self.shape.index(self.hub.coordinate)[dimension]

    def group(self, dimension: str) -> CellGroup:
        with as_default(self.hub) as group:
            return group  # type: ignore[no-any-return]


HUBS: dict[int, CellHub] = {}


def module_of(
    hub: CellHub, between: Callable[[], None], _: bool = False, dropout: float = 0.1, **options: Any
) -> PipelineModule:
    return PipelineModule(
        layers(dropout, between), loss_fn=loss_of, cell=Seated(hub), partition_method="uniform", **options
    )


def engine_over(elastic: Engine, before: Callable[[], None] = lambda: None) -> PipelineEngine:
    """As `deepspeed.initialize` makes it."""
    model = elastic.module
    assert isinstance(model, PipelineModule)
    if isinstance(model.cell, Seated):
        with as_default(model.cell.hub):
            engine = PipelineEngine(elastic)
    else:
        engine = PipelineEngine(elastic)

    def pair(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if not elastic.parts.evaluation.active:
            before()
        return batch["tokens"], batch["targets"]

    engine.set_batch_fn(pair)
    return engine


Seen = dict[str, list[float]]


def loop(elastic: Engine, before: Callable[[], None], seen: Seen | None = None) -> None:
    """A script's. `seen`: by worker what `train_batch` has returned."""
    engine = engine_over(elastic, before)
    for _ in range(elastic.context.config.max_steps or STEPS):
        loss = engine.train_batch()
        if seen is not None:
            seen.setdefault(elastic.context.link.worker, []).append(loss.item())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def descent(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def task_of(shape: Shape = PIPELINE, **options: Any) -> CellTask:
    return CellTask(
        {**OPTIONS, **options}, shape=shape, model=module_of, optimizer=adam, data=lambda: Fixed(SAMPLES), loop=loop
    )


@cache
def one_cell(steps: int = STEPS) -> str:
    """The fingerprint of a world of one cell."""
    with crew_of("ab", task_of(max_steps=steps)) as crew:
        return crew.finish()


@pytest.mark.parametrize(
    ("names", "stage"),
    [
        ("abcd", 1),
        pytest.param("abcdef", 0, marks=check("as two cells")),
        ("abcde", 0),
        pytest.param("abcd", 2, marks=check("as in stage 1")),
    ],
)
def test_any_number_of_cells_ends_in_the_same_bits(names: str, stage: int) -> None:
    with crew_of(names, task_of(stage=stage)) as crew:
        assert trained(crew) == one_cell()


def in_plain_torch(steps: int = STEPS) -> list[float]:
    """Losses of the same layers in an `nn.Sequential`, step by step."""
    made: list[nn.Module] = []
    for number, spec in enumerate(layers(0.0)[:4]):
        torch.manual_seed(1234 + number)
        made.append(spec.build())
    model = nn.Sequential(*made, nn.LayerNorm(WIDTH))
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.1), Fixed(SAMPLES)
    sampler, found = Sampler(SAMPLES, 4, 2 * MICRO_BATCHES, 1, 11), []
    for step in range(steps):
        chosen = [data[number] for lane in range(4) for number in sampler.indices(step, lane, 0)]
        tokens, targets = (torch.stack([one[name] for one in chosen]) for name in ("tokens", "targets"))
        loss = loss_of(head(made[0], model(tokens)), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("shape", [PIPELINE, THREE, ONE], ids=str)
def test_train_batch_returns_the_losses_of_the_same_layers_in_plain_torch(shape: Shape) -> None:
    """Of one stage too, which trains without a schedule."""
    seen: Seen = {}
    options = {**OPTIONS, "stage": 1, "gradient_clipping": 0.0}
    watched = partial(loop, seen=seen)
    if shape == ONE:
        whole = partial(PipelineModule, layers(0.0), 1, loss_fn=loss_of, seed_layers=True)
        undisturbed(Task(options, whole, descent, lambda _: None, script=watched, data=lambda: Fixed(SAMPLES)))
    else:
        model = partial(module_of, dropout=0.0, seed_layers=True)
        task = replace(task_of(shape, **options), model=model, optimizer=descent, loop=watched)
        with crew_of("abcdef"[: 2 * shape.pipeline], task) as crew:
            crew.finish()
    assert len({tuple(losses) for losses in seen.values()}) == 1, "all workers get the same"
    assert next(iter(seen.values())) == pytest.approx(in_plain_torch(), abs=1e-5)


# ---- losses of processes, joins


MORE = [pytest.param(point, marks=check("as at the other points")) for point in ("backward", "exchange")]


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=check("as in stage 0"))])
@pytest.mark.parametrize("point", ["between", "vote", *MORE])
def test_a_process_that_is_killed_in_a_train_batch_changes_no_bit(point: str, stage: int) -> None:
    with crew_of("abcde", task_of(stage=stage)) as crew:
        crew.train_to(2)
        crew.plant("d", 4, point)
        assert trained(crew) == one_cell()


@pytest.mark.parametrize("most", [STEPS, None], ids=["by the config", "by the scripts"])
@rule(
    "The n-th call of `train_batch` is the job's n-th step: a worker that joins goes through the calls before at once, "
    "so all scripts are at one place after each step, and end at the same one",
    "Data, evaluations and the doors",
    broken_by=Edit("shoal.deepspeed.pipeline_engine", "batches_to(self._calls)", "batches_to(elastic.global_step + 1)"),
)
def test_a_worker_that_joins_is_where_the_others_are_in_their_scripts(most: int | None) -> None:
    places: list[list[tuple[int, int, float]]] = []

    def noted(elastic: Engine, before: Callable[[], None]) -> None:
        engine, own = engine_over(elastic, before), list[tuple[int, int, float]]()
        places.append(own)
        held_out = RepeatingLoader(DataLoader(Fixed(SAMPLES), batch_size=2))
        for call in range(1, 2 * STEPS + 1):
            engine.train_batch()
            loss = engine.eval_batch(held_out) if call % 2 == 0 else torch.tensor(0.0)
            own.append((call, engine.global_steps, loss.item()))

    task = replace(task_of(max_steps=most and 2 * STEPS), loop=noted)
    with crew_of("ab", task) as crew:
        crew.train_to(5)
        for name in "cd":
            crew.add(name, task.at(coordinate_of(name, PIPELINE)))
        crew.train_until("two cells", lambda: len(crew.job.durable.current.cells) == 2)  # type: ignore[union-attr]
        joined_at = crew.allowed
        several = trained(crew)
    with crew_of("ab", task) as crew:
        assert trained(crew) == several
    first, *others = places
    assert [(call, step) for call, step, _ in first] == [(call, call) for call in range(1, 2 * STEPS + 1)]
    assert joined_at < 2 * STEPS - 3
    for own in others[:3]:
        assert [(call, step) for call, step, _ in own][-3:] == [(call, call) for call, step, _ in first][-3:]
        assert [loss for *_, loss in own][-3:] == [loss for *_, loss in first][-3:], "all know the same loss"


@rule(
    "A process of a pipeline finds its own stage's pieces in a checkpoint, though stages have other numbers of buckets",
    "Cells",
    broken_by=Edit("shoal.checkpoint.reader", "[self.blocks.at(file.coordinate).buckets]", "[self.blocks.buckets]"),
)
def test_all_go_back_to_a_checkpoint_within_a_train_batch_and_no_bit_changes(tmp_path: Path) -> None:
    task = task_of(mirrors=0, max_steps=2 * STEPS, shoal={"checkpoint": {"path": str(tmp_path), "every_steps": 3}})
    with crew_of("ab", task) as crew:
        crew.train_to(3)
        saved(crew, 3)
        newest = max(one.step for one in crew.job.durable.checkpoints)
        crew.kill("b")
        crew.until("the loss", lambda: any(kind == "lost" for kind, _ in crew.events))
        crew.add("d", task.at(1))
        assert crew.finish() == one_cell(2 * STEPS)
        assert [one.from_step for one in crew.job.durable.history if one.reason.value == "restore"] == [newest]


# ---- evaluations


def test_an_evaluation_that_one_stage_alone_makes_fails_the_job_with_what_the_script_has_called() -> None:
    def of_stage_0(elastic: Engine, before: Callable[[], None]) -> None:
        engine = engine_over(elastic, before)
        held_out = RepeatingLoader(DataLoader(Fixed(SAMPLES)))
        for call in range(1, STEPS + 1):
            engine.train_batch()
            if call == 3 and engine.is_first_stage():
                engine.eval_batch(held_out)

    with crew_of("abcd", replace(task_of(), loop=of_stage_0)) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        assert crew.job.durable.phase.value == "failed"
        reason = crew.job.durable.reason
    assert "coordinate 0 is in engine.eval_batch, and coordinate 1 is in engine.train_batch;" in reason


def held_out_loss(engine: Engine) -> float:
    """Of all samples, in one process."""
    data = Fixed(SAMPLES)
    batch = engine.context.loop.collate(data, list(range(24)))
    return loss_of(engine.module(batch["tokens"]), batch["targets"]).item()


@pytest.mark.parametrize("names", ["ab", "abcd"])
def test_eval_batch_returns_the_mean_loss_of_the_next_samples_to_all_stages(names: str) -> None:
    found: Seen = {}

    def evaluates(elastic: Engine, before: Callable[[], None]) -> None:
        engine = engine_over(elastic, before)
        losses = found.setdefault(elastic.context.link.worker, [])
        for _ in range(STEPS):
            engine.train_batch()
            losses.append(engine.eval_batch(RepeatingLoader(DataLoader(Fixed(SAMPLES)))).item())

    model = partial(module_of, dropout=0.0)
    with crew_of(names, replace(task_of(), model=model, loop=evaluates)) as crew:
        crew.finish()
    losses = found["a"]
    assert all(own == losses for own in found.values()) and not any(map(math.isnan, losses))
    whole: list[float] = []

    def alone(elastic: Engine, before: Callable[[], None]) -> None:
        engine = engine_over(elastic, before)
        for _ in range(STEPS):
            engine.train_batch()
            with torch.no_grad():
                whole.append(held_out_loss(elastic))

    one = partial(PipelineModule, layers(0.0), 1, loss_fn=loss_of)
    undisturbed(Task({**OPTIONS, "stage": 1}, one, adam, lambda _: None, script=alone, data=lambda: Fixed(SAMPLES)))
    assert losses == pytest.approx(whole, abs=1e-5)


def test_an_iterator_of_an_evaluation_goes_on_where_it_was_and_ends() -> None:
    taken: list[list[int]] = []
    ended: list[str] = []

    def evaluates(elastic: Engine, before: Callable[[], None]) -> None:
        engine = engine_over(elastic, before)
        once, again = Feed(DataLoader(Fixed(60)), iter), RepeatingLoader(DataLoader(Fixed(60)))
        engine.train_batch()
        for feed in (once, once, again, again, again):
            taken.append(list(engine._next_part(feed).indices))
        try:
            engine.eval_batch(once)
        except StopIteration:
            ended.append("once")
        elastic.stop()

    one = partial(PipelineModule, layers(0.0), 1, loss_fn=loss_of)
    undisturbed(Task({**OPTIONS, "stage": 1}, one, adam, lambda _: None, script=evaluates, data=lambda: Fixed(SAMPLES)))
    assert [(min(part), max(part)) for part in taken] == [(0, 23), (24, 47), (0, 23), (24, 47), (0, 23)]
    assert ended == ["once"]
