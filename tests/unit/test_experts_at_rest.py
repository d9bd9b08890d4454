"""Experts that no lane of a step uses are left alone, each for itself, whatever those of its name elsewhere do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew
from expert_parallel import EXPERT, FOUR
from integration.scripts import VOCABULARY, WIDTH
from reshaped_jobs import found_in, there_and_back
from rule import Edit, holds, rule
from shoal.cells.hub import CellHub
from shoal.cells.marks import sharded
from shoal.checkpoint.__main__ import main
from shoal.checkpoint.export import export_dcp
from shoal.checkpoint.named import states
from shoal.core.layout import numbered
from shoal.core.misses import Missed
from shoal.training.engine import Engine
from shoal_protos.shape import ONE, Shape
from tensor_parallel import CellTask, coordinate_of, crew_of, trained
from tiers import check
from torch import Tensor, nn

EXPERTS = 4
USED = (0, 2, 2, 0, 1, 3, 2, 0, 2, 2)
"""By step, the one that is."""


class Few(nn.ModuleList):
    """Those of a place."""

    is_one_unit = True


class Taken(nn.Module):
    """Whose place has a part of four experts. One of them all is used in a step, by the tokens of its place."""

    def __init__(self, hub: CellHub, _: Callable[[], None], __: bool = False) -> None:
        super().__init__()
        here = EXPERTS // hub.shape.expert
        self.first = here * hub.index("expert")
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        every = [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]
        self.experts = Few(every[self.first : self.first + here])
        for one in self.experts.parameters():
            sharded(one, over="expert")

    def forward(self, tokens: Tensor, targets: Tensor, expert: int) -> Tensor:
        hidden = self.embedding(tokens)
        if 0 <= expert - self.first < len(self.experts):
            hidden = hidden + torch.tanh(self.experts[expert - self.first](hidden))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def descent(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def trains(losses: list[float], engine: Engine, batch: Any) -> None:
    """The micro-batches of a lane are those of two places, in one process, too."""
    expert, half = USED[engine.global_step], engine.context.loop.place[1] * 2 // EXPERT.expert
    engine.backward(engine.module(**batch, expert=expert if expert // 2 == half else -1))
    if engine.step() and engine.context.link.worker == "a" and engine.loss is not None:
        losses.append(engine.loss)


def task_of(shape: Shape, losses: list[float] | None = None, **options: Any) -> CellTask:
    body = partial(trains, [] if losses is None else losses)
    given = {"gradient_clipping": 0.0, "max_steps": len(USED), "micro_batches_per_lane": 2 // shape.expert, **options}
    return CellTask(given, shape=shape, model=Taken, optimizer=adam, body=body)


def missed(crew: Crew) -> dict[str, Missed]:
    """By name in the whole model; the same on all members."""
    found = []
    for worker in (one for one in crew.workers.values() if not one.killed):
        state = worker.engine.context.state
        experts, every = state.layout.part.experts, zip(numbered(state.layout), state.misses.of, strict=True)
        found.append(
            {
                names[place] if len(names := slot.parameter.whole_names(experts)) > 1 else names[0]: its
                for (_, place, slot), its in every
            }
        )
    assert all(one == found[0] for one in found)
    return found[0]


@rule(
    "An expert that no lane of a step uses is left alone, though another place uses the one that has its name there",
    "Cells",
    broken_by=[
        Edit("shoal.core.layout", "first + count * part.piece(division)", "first"),
        Edit("shoal.exchange.vote", "16) | others[at[rank]] for", "16) for"),
    ],
)
def test_losses_and_updates_that_were_missed_are_those_of_one_process() -> None:
    losses, misses = dict[Shape, list[float]](), dict[Shape, dict[str, Missed]]()
    for shape, names in ((ONE, "a"), (EXPERT, "abcd")):
        task = replace(task_of(shape, losses.setdefault(shape, [])), optimizer=descent)
        with crew_of(names, task) as crew:
            crew.finish()
            misses[shape] = missed(crew)
    assert losses[EXPERT] == pytest.approx(losses[ONE], abs=1e-5)
    assert misses[EXPERT] == misses[ONE]
    assert misses[ONE]["experts.1.weight"] == Missed(len(USED) - USED.count(1))


@cache
def one_cell() -> str:
    with crew_of("ab", task_of(EXPERT)) as crew:
        return trained(crew)


@pytest.mark.parametrize("stage", [1, 2, pytest.param(3, marks=check("as in stage 2"))])
@holds("An expert that no lane of a step uses")
def test_every_world_leaves_the_same_experts_alone(stage: int) -> None:
    """Through a vote that one member passed alone, and a joiner."""
    task = task_of(EXPERT, stage=stage)
    with crew_of("abcd", task) as crew:
        crew.train_to(2)
        crew.plant("d", 3, "in_vote")
        crew.train_to(4)
        crew.add("f", task.at(coordinate_of("f", EXPERT)))
        assert trained(crew) == one_cell()
        missed(crew)


@pytest.mark.parametrize("after", [ONE, pytest.param(FOUR, marks=check("as in one process"))])
@rule(
    "What experts have missed is dealt with them, and exported with each one's own count",
    "Cells",
    broken_by=[
        Edit(
            "shoal.checkpoint.reshaping",
            "names.sources(slot.parameter.name, place)",
            "names.sources(slot.parameter.name, 0)",
        ),
        Edit(
            "shoal.checkpoint.named", "values = counts if are_apart", "values = counts[:1] * len(counts) if are_apart"
        ),
    ],
)
def test_a_shape_of_other_experts_has_what_each_has_missed(after: Shape, tmp_path: Path) -> None:
    there_and_back(task_of(EXPERT), after, tmp_path)
    old, new = (dict(states(found_in(tmp_path / name).reader())) for name in ("old", "new"))
    assert old.keys() == new.keys()
    for name, state in old.items():
        assert state.keys() == new[name].keys()
        assert all(torch.equal(value, new[name][key]) for key, value in state.items())
    assert [int(old[f"experts.{one}.weight"]["step"]) for one in range(EXPERTS)] == [*map(USED.count, range(EXPERTS))]


@rule(
    "What parameters have missed before a job of cells begins is told by members of each place",
    "Cells",
    broken_by=Edit("shoal.training.initial_state", "            found[number] = Missed(", "            Missed("),
)
def test_a_job_begins_with_the_counts_that_experts_were_imported_with(tmp_path: Path) -> None:
    checkpoint = {"path": str(tmp_path / "first"), "every_steps": len(USED)}
    with crew_of("a", task_of(ONE, shoal={"checkpoint": checkpoint})) as crew:
        crew.finish()
    export_dcp(found_in(tmp_path / "first").reader(), tmp_path / "folder", None)
    assert main(["import", str(tmp_path / "folder"), str(tmp_path / "imported")]) == 0
    ends, least = set(), [USED.count(one) for one in range(EXPERTS)]
    for names, place in (("ab", "one"), ("abcd", "two")):
        checkpoint = {"resume": str(tmp_path / "imported"), "path": str(tmp_path / place), "every_steps": 3}
        with crew_of(names, task_of(EXPERT, max_steps=3, shoal={"checkpoint": checkpoint})) as crew:
            ends.add(crew.finish())
            missed(crew)
    assert len(ends) == 1
    made = dict(states(found_in(tmp_path / "one").reader()))
    counts = [int(made[f"experts.{one}.weight"]["step"]) for one in range(EXPERTS)]
    assert counts == [count + USED[:3].count(one) for one, count in enumerate(least)]
