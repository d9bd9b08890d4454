"""`shoal import` for jobs of cells: each process takes its part of whole tensors, and of optimizer states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tensor_parallel
import torch
from context_parallel import BOTH as OF_TOKENS
from context_parallel import Divided as DividedTokens
from expert_parallel import BOTH, EXPERT, Divided
from pipeline_parallel import PIPELINE, SQUARE, in_stages
from reshaped_jobs import found_in
from rule import Edit, rule
from safetensors.torch import load_file, save_file
from shoal.checkpoint.__main__ import main
from shoal.checkpoint.export import export, export_dcp
from shoal.checkpoint.model_file import DcpFolder
from shoal.checkpoint.named import states, tensors
from shoal_protos.shape import Shape
from tensor_parallel import TWO, CellTask, Parallel, crew_of
from tiers import check
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

MOMENTUM = 0.5
NOTHING = 1e-30
"""A norm of gradients that changes no bit of what it is added to."""


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def still(model: nn.Module) -> torch.optim.Optimizer:
    """Weights stay, momenta get smaller by a power of two."""
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=MOMENTUM)


def task_of(shape: Shape, model: Any, **more: Any) -> CellTask:
    task = CellTask(shape=shape, **more)
    return in_stages(task) if shape.pipeline > 1 else replace(task, model=model)


def saved_by(task: CellTask, place: Path, steps: int, **options: Any) -> None:
    """Trains them, and saves in the last one."""
    checkpoint = {"path": str(place), "every_steps": steps, **options.pop("checkpoint", {})}
    options |= {"max_steps": steps, "shoal": {"checkpoint": checkpoint}}
    with crew_of("abcdefgh"[: task.shape.processes], replace(task, options=task.options | options)) as crew:
        crew.finish()


def momenta(folder: Path) -> Mapping[str, Tensor]:
    found = DcpFolder(folder)
    sizes = {name: math.prod(found.known[name].shape) for name in found.states}
    return {name: found.state_part(name, "momentum_buffer", 0, size) for name, size in sizes.items()}


@rule(
    "Each process of a cell takes its part of whole tensors, and of optimizer states, that were imported",
    "Cells",
    broken_by=[
        Edit("shoal.checkpoint.other_layout", "self._part) for one in slots if", "self._part) for one in () if"),
        Edit("shoal.checkpoint.other_layout", "[part.piece(Division(by_expert=True))]", "[0]"),
        Edit("shoal.checkpoint.other_shape", "of = Divided(tensor, self", "of = Divided(0, self"),
    ],
)
@pytest.mark.parametrize(
    ("shape", "model"),
    [
        (TWO, Parallel),
        (BOTH, Divided),
        (SQUARE, None),
        pytest.param(EXPERT, Divided, marks=check("as with tensor besides")),
        pytest.param(OF_TOKENS, DividedTokens, marks=check("as of tensor alone")),
        pytest.param(PIPELINE, None, marks=check("as with tensor besides")),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
@pytest.mark.parametrize("form", ["model.safetensors", "folder"])
def test_a_job_of_cells_begins_with_the_tensors_of_a_file(shape: Shape, model: Any, form: str, tmp_path: Path) -> None:
    """A step that leaves weights alone shows them, and momenta."""
    task = task_of(shape, model)
    saved_by(replace(task, optimizer=momentum), tmp_path / "first", 2)
    source = found_in(tmp_path / "first").reader()
    export(source, tmp_path / "model.safetensors", None)
    export_dcp(source, tmp_path / "folder", None)
    assert main(["import", str(tmp_path / form), str(tmp_path / "imported")]) == 0
    resume = {"checkpoint": {"resume": str(tmp_path / "imported")}}
    saved_by(replace(task, optimizer=still), tmp_path / "second", 1, gradient_clipping=NOTHING, **resume)
    made = found_in(tmp_path / "second").reader()
    assert made.manifest.step == 1
    export(made, tmp_path / "made.safetensors", None)
    before, after = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "made.safetensors")
    moved = {"running_mean", "running_var", "num_batches_tracked"}
    names = [name for name in before if name.rpartition(".")[2] not in moved]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in names)
    if form == "folder":
        export_dcp(made, tmp_path / "made", None)
        first, second = momenta(tmp_path / "folder"), momenta(tmp_path / "made")
        assert first.keys() == second.keys()
        assert all(torch.equal(MOMENTUM * first[name], second[name]) for name in first)


# ---- what is refused


class Unsaid(Parallel):
    """Megatron's attribute alone says that a parameter is divided."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.up = nn.Parameter(self.up.detach())
        self.up.tensor_model_parallel = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        (Parallel, lambda found: found.pop("up"), 'does not fit: only the model has "up"'),
        (Parallel, lambda found: found.update(up=found["up"][1:].clone()), '"up" has shape (512, 64), the checkpoint'),
        (Unsaid, lambda _: None, 'each process of a cell has a part of parameter "up", and nothing says along which'),
    ],
)
def test_a_file_that_does_not_fit_the_whole_model_is_refused(
    model: Any, change: Any, words: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    found = {name: value.clone() for name, value in tensor_parallel.Whole().state_dict().items()}
    change(found)
    save_file(found, tmp_path / "model.safetensors")
    assert main(["import", str(tmp_path / "model.safetensors"), str(tmp_path / "imported")]) == 0
    shoal = {"checkpoint": {"resume": str(tmp_path / "imported")}}
    with crew_of("ab", CellTask({"max_steps": 1, "shoal": shoal}, model=model)) as crew:
        crew.allow()
        crew.until("its error", lambda: bool(crew.workers["a"].failure))
        assert words in crew.workers["a"].failure


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_that_differ_in_count_are_refused_of_a_pipeline(tmp_path: Path) -> None:
    saved_by(task_of(PIPELINE, None), tmp_path / "first", 1)
    found = found_in(tmp_path / "first").reader()
    model = {name: tensor.clone() for name, tensor in tensors(found)}
    state = {name: dict(of) for name, of in states(found) if of}
    state["1.head.weight"]["step"] = state["1.head.weight"]["step"] + 1
    content = {"model": model, "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}}
    save(content, storage_writer=FileSystemWriter(tmp_path / "odd"), no_dist=True)
    assert main(["import", str(tmp_path / "odd"), str(tmp_path / "imported")]) == 0
    task, shoal = task_of(PIPELINE, None), {"checkpoint": {"resume": str(tmp_path / "imported")}}
    with crew_of("ab", replace(task, options=task.options | {"max_steps": 1, "shoal": shoal})) as crew:
        crew.allow()
        crew.until("its error", lambda: bool(crew.workers["a"].failure))
        assert "states that differ in kind or count between parameters, which is not" in crew.workers["a"].failure
