"""What jobs of single processes have, and those of cells have alike: optimizers, schedulers, states, acts of operators.

One script has much of it at once; what befalls its workers changes no bit, and no state that it has registered.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew
from integration.scripts import WIDTH
from rule import Edit, rule
from shoal.cells.hub import CellHub
from shoal.cells.marks import sharded
from shoal.training.engine import Engine
from shoal_protos.acts import DrainWorker, Pause, Resume
from shoal_protos.plan import Plan
from tensor_parallel import CellTask, Parallel, coordinate_of, crew_of
from tiers import check
from torch import Tensor, nn

STEPS = 20


class Partly(Parallel):
    """With parameters, own and common ones, that few lanes or none use, and a frozen one."""

    def __init__(self, hub: CellHub, between: Callable[[], None], buffers: bool = False) -> None:
        super().__init__(hub, between, buffers)
        self.seldom, self.never = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.own, self.own_never = (sharded(nn.Parameter(torch.ones(WIDTH))) for _ in range(2))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.is_first = hub.coordinate == 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss, kind = super().forward(tokens, targets), int(tokens[0, 0]) % 6
        if kind == 0:
            loss = loss + (self.seldom * self.frozen).square().sum()
        if kind == 1 and self.is_first:
            loss = loss + self.own.square().sum() - self.own.detach().square().sum()  # the same loss everywhere
        return loss


def groups_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [one for one in model.parameters() if one.requires_grad]
    by_name = {"matrices": [one for one in trained if one.ndim > 1], "rest": [one for one in trained if one.ndim == 1]}
    return torch.optim.AdamW([{"params": some, "name": name} for name, some in by_name.items()], 1e-2, weight_decay=0.1)


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


class Average:
    """Of a worker's own part of the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.values = model, [one.detach().clone() for one in model.parameters()]

    def follow(self, _: Engine) -> None:
        for mine, one in zip(self.values, self.model.parameters(), strict=True):
            mine.lerp_(one.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = [one.clone() for one in state["values"]]


def prepare(engine: Engine) -> None:
    average = Average(engine.module)
    engine.register_state("average", average)
    engine.on_commit(average.follow)


def body(engine: Engine, batch: Any) -> None:
    engine.turn(*(["rest"] if engine.global_step % 3 == 2 else ["matrices", "rest"]))
    engine.backward(engine.module(**batch))
    engine.step()


TASK = CellTask(
    {"max_steps": STEPS, "gradient_clipping": 0.1}, model=Partly, optimizer=groups_of, scheduler=halved, body=body,
    prepare=prepare,
)  # fmt: skip
Averages = dict[int, set[bytes]]
"""By coordinate, those of all workers that came to the end."""


def trained(names: str, befalls: Callable[[Crew], None]) -> tuple[str, Averages]:
    with crew_of(names, TASK) as crew:
        befalls(crew)
        fingerprint, found = crew.finish(), Averages()
        for name, worker in crew.workers.items():
            if not worker.killed and worker.engine.global_step == STEPS:
                average = worker.engine.context.state.registered["average"]
                content = b"".join(one.numpy().tobytes() for one in average.values)
                found.setdefault(coordinate_of(name), set()).add(content)
    return fingerprint, found


def nothing(_: Crew) -> None:
    """An undisturbed run."""


@cache
def undisturbed() -> tuple[str, Averages]:
    return trained("ab", nothing)


def add(crew: Crew, name: str) -> None:
    crew.add(name, TASK.at(coordinate_of(name)))


def world_of(crew: Crew) -> Plan:
    world = crew.job.durable.current
    assert world is not None
    return world


def a_killed_one_is_replaced(crew: Crew) -> None:
    crew.train_to(2)
    crew.plant("d", 4, "between")
    crew.train_to(4)
    add(crew, "f")
    crew.train_until("the other to join", lambda: len(world_of(crew).cells) == 2)
    crew.kill("a")


def a_joiner_is_killed_in_its_rehearsal(crew: Crew) -> None:
    crew.train_to(2)
    add(crew, "c")
    add(crew, "d")
    crew.plant("d", 0, "between")
    crew.train_until("its death", lambda: not crew.workers["d"].alive)
    assert crew.workers["d"].engine.warming_up


def one_coordinate_is_lost_and_all_begin_anew(crew: Crew) -> None:
    crew.train_to(3)
    crew.kill("b")
    crew.until("the other to leave", lambda: not crew.workers["a"].alive)
    add(crew, "c")
    add(crew, "d")


def it_pauses_and_resumes(crew: Crew) -> None:
    crew.train_to(2)
    crew.request(Pause())
    crew.allow()
    crew.until("a pause", lambda: not world_of(crew).steps)
    crew.request(Resume())


def half_of_a_cell_is_drained(crew: Crew) -> None:
    crew.train_to(2)
    crew.request(DrainWorker("b"))
    crew.train_until("it to leave", lambda: len(world_of(crew).cells) == 1)


@pytest.mark.parametrize(
    ("names", "befalls"),
    [
        ("abc", nothing),
        ("abcd", a_killed_one_is_replaced),
        ("ab", a_joiner_is_killed_in_its_rehearsal),
        ("ab", one_coordinate_is_lost_and_all_begin_anew),
        ("abcd", it_pauses_and_resumes),
        ("abcd", half_of_a_cell_is_drained),
    ],
)
@rule(
    "A member without lanes knows whose turn it is before it counts its blocks' gradients in the norm",
    "Data, evaluations and the doors",
    broken_by=Edit(
        "shoal.training.step",
        "        take_over_where_no_body_runs(self._world, self._context.state.optimizer, self._context.state.modes)\n"
        "        norms = self._sums_of_squares()  # by whose turn it is\n",
        "        norms = self._sums_of_squares()\n"
        "        take_over_where_no_body_runs(self._world, self._context.state.optimizer, self._context.state.modes)\n",
    ),
)
def test_a_script_with_much_in_it_comes_to_the_same_bits_and_states_in_cells(
    names: str, befalls: Callable[[Crew], None]
) -> None:
    fingerprint, averages = trained(names, befalls)
    assert fingerprint == undisturbed()[0]
    assert all(found == undisturbed()[1][coordinate] for coordinate, found in averages.items()) and averages


@rule(
    "Registered states begin alike at all coordinates of a cell, or are refused where checkpoints, which keep them "
    "once, are saved",
    "Cells",
    broken_by=Edit("shoal.training.initial_state", "    if any(not torch.equal(digest, firsts[0])", "    if any(False"),
)
def test_registered_states_that_are_parts_of_the_model_are_refused_where_checkpoints_are_kept(tmp_path: Path) -> None:
    """Without checkpoints a joiner gets them from its own coordinate."""
    options = {**TASK.options, "shoal": {"checkpoint": {"path": str(tmp_path)}}}
    with crew_of("abcd", replace(TASK, options=options)) as crew:
        crew.allow()
        crew.until("the end", lambda: crew.job.durable.phase.is_over)
        assert crew.job.durable.phase.value == "failed" and crew.job.durable.step == 0
        assert "what the script has registered (average) differs between the coordinates of a cell" in (
            crew.job.durable.reason
        )


@check("as in jobs of single processes")
def test_another_rate_replaces_a_checkpoints_in_any_number_of_cells(tmp_path: Path) -> None:
    def run(names: str, place: Path, max_steps: int, rate: float) -> str:
        shoal = {"checkpoint": {"path": str(place), "every_steps": 1}}
        task = CellTask(
            {"max_steps": max_steps, "shoal": shoal},
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), rate),
        )
        with crew_of(names, task) as crew:
            return crew.finish()

    run("ab", tmp_path / "first", 1, 1e-3)
    found = {}
    for names, rate in (("ab", 1e-3), ("ab", 1e-2), ("abcd", 1e-2)):
        place = shutil.copytree(tmp_path / "first", tmp_path / f"{names} {rate}")
        found[names, rate] = run(names, place, 3, rate)
    assert found["ab", 1e-2] == found["abcd", 1e-2] != found["ab", 1e-3]


def test_a_joiner_that_is_given_another_rate_is_refused() -> None:
    with crew_of("ab", CellTask(optimizer=lambda m: torch.optim.AdamW(m.parameters(), 1e-3))) as crew:
        joiner = crew.add("c", CellTask(optimizer=lambda m: torch.optim.AdamW(m.parameters(), 1e-2)).at(0))
        crew.until("its end", lambda: not joiner.alive)
        assert "lr of the optimizer's groups" in joiner.failure
