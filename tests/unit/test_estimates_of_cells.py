"""`shoal estimate` of cells, against what the processes of real ones hold and send."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from crew import Crew, Worker
from integration.scripts import VOCABULARY
from pipeline_parallel import HUBS, in_stages
from shoal.cells.hub import CellHub
from shoal.cells.marks import sharded
from shoal.cells.stages import Stages, built_stages
from shoal.exchange.pieces import elements_in
from shoal.exchange.traffic import PieceTraffic
from shoal_controller.cli.main import app
from shoal_protos.shape import DIMENSIONS, Shape
from tensor_parallel import CellTask, crew_of
from tiers import check
from torch import Tensor, nn
from typer.testing import CliRunner

pytestmark = check("trains small jobs of cells")

WIDTH = 512
TOLERANCE = 1.02
"""For padding, and for blocks that cannot be shared evenly."""


class Part(nn.Module):
    """Half a million parameters: those that all have, those that `tensor` divides, and those that `expert` does too."""

    def __init__(self, shape: Shape, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if first else nn.Identity()
        self.all_have = nn.Linear(WIDTH, WIDTH, bias=False)
        self.divided = nn.Parameter(torch.ones(2 * WIDTH // shape.tensor, WIDTH))
        self.of_experts = nn.Parameter(torch.ones(4 * WIDTH // (shape.tensor * shape.expert), WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if last else nn.Identity()
        if shape.tensor > 1:
            sharded(self.divided)
            sharded(self.of_experts)
        if shape.expert > 1:
            sharded(self.of_experts, over="expert")

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.all_have(self.embedding(x))
        return self.head(hidden) + self.divided.square().mean() + self.of_experts.square().mean()


class Whole(Part):
    def __init__(self, hub: CellHub, _: Callable[[], None], __: bool = False) -> None:
        super().__init__(hub.shape)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return nn.functional.cross_entropy(super().forward(tokens).flatten(0, 1), targets.flatten())


def stages(hub: CellHub, _: Callable[[], None], __: bool = False) -> Stages:
    def build(number: int) -> Part:
        return Part(hub.shape, number == 0, number == 1)

    made = built_stages(build, 2, hub.shape.index(hub.coordinate)["pipeline"], 2)
    HUBS[made] = hub
    return made


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def task_of(shape: Shape, stage: int) -> CellTask:
    given = {"stage": stage, "lanes": 2, "max_steps": 3, "mirrors": 1}
    task = CellTask(given, shape=shape, model=Whole, optimizer=adamw)
    if shape.pipeline == 1:
        return task
    staged = in_stages(task)
    return CellTask(staged.options, shape=shape, model=stages, optimizer=adamw, body=staged.body)


def estimated(shape: Shape, stage: int, workers: int) -> dict[str, Any]:
    """The answer in JSON for cells of this model."""
    places = shape.pipeline
    of_all = VOCABULARY * WIDTH * 2 + places * WIDTH * WIDTH
    whole = of_all + places * 6 * WIDTH * WIDTH
    asked = {
        "params": whole, "workers": workers, "lanes": 2, "stage": stage, "common": of_all,
        "of-experts": places * 4 * WIDTH * WIDTH, "micro-batches": 2 if places > 1 else 1, "output": "json",
        **{name: size for name in DIMENSIONS if (size := getattr(shape, name)) > 1},
    }  # fmt: skip
    words = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    done = CliRunner().invoke(app, ["estimate", *words])
    assert done.exit_code == 0, done.stderr
    [found] = json.loads(done.stdout)["stages"]
    return dict(found)


CASES = [
    (Shape(tensor=2), 1), (Shape(tensor=2), 3), (Shape(context=2), 0), (Shape(context=2), 2), (Shape(expert=2), 1),
    (Shape(expert=2), 3), (Shape(pipeline=2), 1), (Shape(pipeline=2), 2), (Shape(expert=2, tensor=2), 2),
    (Shape(context=2, tensor=2), 1), (Shape(expert=2, context=2), 3), (Shape(pipeline=2, tensor=2), 3),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "stage"), CASES, ids=str)
def test_processes_of_cells_hold_what_is_estimated_and_give_and_get_what_is_said(
    shape: Shape, stage: int, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = 2 * shape.processes
    expected = estimated(shape, stage, workers)
    with crew_of("abcdefgh"[:workers], task_of(shape, stage)) as crew:
        crew.finish()
        moved = [crossing(crew, worker) for worker in crew.workers.values()]
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if '"memory"' in line]
    assert len(lines) == workers
    at_rest = expected["at_rest"]["device"]
    for line in lines:
        assert line["estimated_bytes"] == pytest.approx(at_rest, rel=1e-4)
        assert 1 / TOLERANCE <= line["measured_bytes"] / at_rest <= TOLERANCE
    cell = expected["cell"]
    assert {name: cell[name] for name in DIMENSIONS} == {name: getattr(shape, name) for name in DIMENSIONS}
    for gradients, parameters in moved:
        assert gradients == pytest.approx(cell["contributed_bytes"], rel=0.02)
        assert stage == 3 or parameters == pytest.approx(cell["handed_bytes"], rel=0.02)


def crossing(crew: Crew, worker: Worker) -> tuple[int, int]:
    """Bytes of gradients that it sends to other coordinates, and of parameters that come from there, in a step."""
    world = worker.engine.context.world
    assert world is not None
    plan, traffic = world.plan, world.traffic
    mine = plan.members[world.rank].coordinate
    elsewhere = {rank for rank, member in enumerate(plan.members) if member.coordinate != mine}
    sent = sum(
        elements_in(extents)
        for piece in range(len(traffic.pieces))
        for peer in elsewhere.intersection(traffic.sent_to)
        for extents in traffic.messages_for(peer, piece)
    )
    return 4 * sent, _received(traffic.handed(plan.boundaries), elsewhere)


def _received(handed: PieceTraffic, ranks: set[int]) -> int:
    return sum(4 * elements_in(extents) for at in handed.receives for peer, extents in at if peer in ranks)


def ran(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["estimate", "--params", "8e9", "--workers", "8", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_it_says_what_is_assumed_and_what_is_not_counted() -> None:
    status, output, errors = ran("--pipeline", "2", "--context", "2", "--workers", "9", "--stage", "2")
    assert (status, errors) == (0, "")
    lines = output.splitlines()
    assert lines[0] == (
        "Bytes of a worker: 4,000,000,000 parameters in fp32, 2 cells of 4 workers (pipeline 2, context 2) and "
        "1 spare, 2 lanes, 1 mirror"
    )
    assert lines[-4:] == [
        "A spare keeps copies at one coordinate, where each member then holds as much as it does.",
        "Assumed: each stage has 1/2 of all parameters. For the largest stage give its own, times 2, as --params.",
        "Stage 2: a process gives 8.0 GB of gradients for each lane, and gets 8.0 GB of parameters in each step, to "
        "and from other coordinates.",
        "Not counted: what layers and stages exchange (activations, tokens, keys and values).",
    ]
    _, output, _ = ran("--expert", "2", "--of-experts", "6e9", "--tensor", "2", "--common", "1e6", "--stage", "1")
    assert "Assumed: each place of experts has 1/2 of those of experts (--of-experts)." in output
    assert "of the parameters of a stage or an expert, but for 1,000,000 that are common (--common)." in output


def test_a_spare_of_a_cell_holds_what_three_members_of_a_coordinate_share() -> None:
    status, output, _ = ran("--tensor", "2", "--workers", "5", "--stage", "1", "--output", "json")
    [one] = json.loads(output)["stages"]
    held = [one["at_rest"]["device"], one["spare"]["at_rest"]["device"]]
    assert status == 0 and held == [4 * 10**9 * 16, 4 * 10**9 * 8 + 4 * 10**9 * 8 * 2 // 3]


WRONG = [
    ("--pipeline 0", "--pipeline is 0; expected a whole number from 1 to 1024."),
    (
        "--tensor 64 --context 32",
        "a cell of context 32, tensor 64 cannot be: it has 2048 processes; expected at most 1024.",
    ),
    ("--context 16", "--workers is 8; expected at least 16, the processes of a cell (--context 16)."),
    (
        "--expert 2",
        "--expert is 2, and nothing says how many of the 8000000000 parameters are of experts; expected --of-experts "
        "N.",
    ),
    (
        "--expert 2 --of-experts 9e9",
        "--of-experts is 9000000000; expected at most 8000000000, the parameters of the model (--params).",
    ),
    (
        "--tensor 2 --of-experts 6e9 --common 3e9",
        "--common is 3000000000; expected at most 2000000000, the parameters of the model (--params) but for those of "
        "experts (--of-experts).",
    ),
    (
        "--pipeline 2 --frozen 5",
        "--frozen is 5; expected 0 with stages (--pipeline), where training refuses frozen ones.",
    ),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG)
def test_a_cell_that_cannot_be_gets_one_sentence(arguments: str, sentence: str) -> None:
    assert ran(*arguments.split()) == (2, "", f"shoal: {sentence}\n")


def test_the_sizes_of_a_config_are_read_and_flags_come_first(tmp_path: Any) -> None:
    file = tmp_path / "config.json"
    cell = {"pipeline": 2, "context": 2}
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}
    file.write_text(json.dumps({**sizes, "shoal": {"cell": cell}}))
    asked = partial(ran, "--config", str(file), "--output", "json", "--stage", "1")
    [one] = json.loads(asked()[1])["stages"]
    assert {name: one["cell"][name] for name in DIMENSIONS} == {"pipeline": 2, "expert": 1, "context": 2, "tensor": 1}
    [one] = json.loads(asked("--context", "1")[1])["stages"]
    assert one["cell"]["context"] == 1
    file.write_text(json.dumps({**sizes, "shoal": {"cell": {"expert": 2}}}))
    done = CliRunner().invoke(app, ["estimate", "--config", str(file)])
    assert done.stdout.splitlines()[0] == "Batch 8 = 4 lanes × 1 micro-batch × 2 places of experts × 1 sample"
