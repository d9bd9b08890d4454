"""Folders of torch.distributed.checkpoint come back: what our export wrote, and what FSDP2 wrote."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from allocated_bytes import most_bytes
from checkpoints import fresh, save, trained
from crew import Crew, Task, undisturbed
from dcp_folders import changed, found_in, plain, written
from shoal.checkpoint import snapshot
from shoal.checkpoint.__main__ import main
from shoal.checkpoint.dcp_folder import INDEX
from shoal.checkpoint.fingerprint import block_digests
from shoal.checkpoint.importing import import_model
from shoal.checkpoint.model_file import DcpFolder
from shoal.checkpoint.restore import load_model
from shoal.checkpoint.storage import LocalStorage
from shoal.state.training_state import Limits, TrainingState
from shoal.training.residency import residency_of
from shoal_protos.errors import UserError
from shoal_protos.runs import Runs
from tiers import check
from torch import nn

pytestmark = check("starts processes")

STEPS = 6


def test_what_was_exported_comes_back_with_parameters_buffers_and_optimizer_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = trained(3)
    save(state, LocalStorage(tmp_path / "c"))
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    assert main(["import", str(tmp_path / "dcp"), str(tmp_path / "i")]) == 0
    assert capsys.readouterr().out.endswith(
        f"the model of {tmp_path / 'dcp'} with optimizer states of 6 parameters after 3 updates, step 0\n"
        "not taken, as a job has its own config: learning rates 0.001, 0.01\n"
    )
    assert main(["verify", str(tmp_path / "i")]) == 0
    other = fresh(seed=1)
    matched = load_model(found_in(tmp_path / "i").reader(), other, ())
    assert str(matched).endswith("training begins at step 0 with the optimizer states that came with them.")
    other.begin_anew(other.everything)
    assert block_digests(other, other.everything) == block_digests(state, state.everything)
    for name, value in state.module.state_dict().items():
        assert torch.equal(other.module.state_dict()[name], value), name


def test_a_world_of_another_size_and_stage_goes_on_from_an_export(tmp_path: Path) -> None:
    def task(place: str, stage: int = 1, max_steps: int = STEPS, **checkpoint: Any) -> Task:
        settings = {"checkpoint": {"path": str(tmp_path / place), **checkpoint}}
        return Task({"max_steps": max_steps, "stage": stage, "mirrors": 1, "shoal": settings})

    with Crew("abc", task("first", max_steps=3, every_steps=3)) as crew:
        crew.finish()
    assert main(["export", str(tmp_path / "first"), str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    fingerprints = {}
    for kind, words in (("all", []), ("model", ["--model-only"])):
        assert main(["import", str(tmp_path / "dcp"), str(tmp_path / kind), *words]) == 0
        resume = next(str(one) for one in (tmp_path / kind).iterdir() if one.is_dir())
        fingerprints[kind] = undisturbed(task(f"alone {kind}", 0, resume=resume))
        with Crew("ab", task(f"sharded {kind}", 3, resume=resume)) as crew:
            assert crew.finish() == fingerprints[kind]
    assert fingerprints["all"] != fingerprints["model"]


FSDP = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

child = os.fork()  # after the imports: they are all that takes long
dist.init_process_group("gloo", init_method=sys.argv[2], world_size=2, rank=0 if child else 1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 7), nn.Linear(7, 3))
fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.arange(24.0).view(2, 12)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
parts = get_state_dict(model, optimizer)
save({"model": parts[0], "optimizer": parts[1]}, storage_writer=FileSystemWriter(sys.argv[1]))
flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
content = {**flat[0], "optimizer": flat[1], "lr_scheduler": {"last_epoch": 2}}
save(content, storage_writer=FileSystemWriter(sys.argv[1] + "-flat"))
whole = {name: value.full_tensor() for name, value in parts[0].items()}
whole |= {f"{name} m": value["exp_avg"].full_tensor() for name, value in parts[1]["state"].items()}
if dist.get_rank() == 0:
    torch.save(whole, sys.argv[1] + ".pt")
dist.destroy_process_group()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_what_two_processes_of_fsdp_wrote_is_taken_with_its_optimizer(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FSDP, str(tmp_path / "fsdp"), f"file://{tmp_path / 'store'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert subprocess.run(command, env=environment, timeout=110, check=False).returncode == 0
    for form in ("fsdp", "fsdp-flat"):
        theirs = torch.load(tmp_path / "fsdp.pt", weights_only=True)
        import_model(tmp_path / form, LocalStorage(tmp_path / f"{form}-c"))
        model = nn.Sequential(nn.Linear(12, 7), nn.Linear(7, 3))
        state = TrainingState(
            model,
            torch.optim.AdamW(model.parameters()),
            None,
            Limits(lanes=1, clipping=0.0, last_step=1),
            residency_of(0),
        )
        load_model(found_in(tmp_path / f"{form}-c").reader(), state, ())
        state.begin_anew(state.everything)
        for stretch, kept in state.held.home.states(state.everything).items():
            assert kept["step"] == 2.0
            for slot in state.layout.buckets[stretch.bucket].slots:
                name = slot.parameter.name
                assert torch.equal(model.get_parameter(name), theirs.pop(name))
                m = kept["exp_avg"][slot.start : slot.start + slot.parameter.elements]
                assert torch.equal(m.view(slot.parameter.shape), theirs.pop(f"{name} m"))
        assert not theirs


def test_neither_the_import_nor_a_worker_of_stage_3_has_more_in_memory_than_a_tensor_and_what_it_keeps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(snapshot, "PART_BYTES", 1 << 20)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    tensor = 4 * 512 * 512
    kept = {name: {"momentum_buffer": torch.randn(512, 512)} for name, _ in model.named_parameters()}
    folder = written({"model": model.state_dict(), "optimizer": {"state": kept}}, tmp_path / "dcp")
    assert most_bytes(lambda: import_model(folder, LocalStorage(tmp_path / "c"))) < 6 * tensor < 16 * tensor
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = TrainingState(model, optimizer, None, Limits(4, 0.0, 1), residency_of(3))
    keeps, found = Runs([(0, state.layout.blocks // 8)]), found_in(tmp_path / "c")

    def begin() -> None:
        load_model(found.reader(), state, ())
        state.begin_anew(keeps)

    assert most_bytes(begin) <= 2 * tensor + 3 * tensor
    assert state.held.home.state_bytes() == tensor


# ---- what cannot be read


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"epoch": 3}, "is a torch.distributed.checkpoint folder without a model: it holds epoch; expected a state"),
        (changed(lambda c: c["model"].update(extra=b"x")), 'holds "model.extra" without a tensor; expected tensors'),
        (changed(lambda c: c["model"].update(z=torch.zeros(1, dtype=torch.complex128))), 'holds "model.z" with dtype'),
        (
            changed(lambda c: c["optimizer"]["state"].update({"0": {"exp_avg": torch.zeros(1)}})),
            'has optimizer state "exp_avg" of "0", which its model does not have; import the model alone',
        ),
        (
            changed(lambda c: c["optimizer"]["state"]["w"].update(row=torch.zeros(3))),
            'has optimizer state "row" of "w" with shape (3,); expected a state of its shape (3, 2), or one number.',
        ),
    ],
)
def test_a_folder_with_other_content_gets_a_sentence(content: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        _ = DcpFolder(written(content, tmp_path / "dcp")).states
    assert str(refused.value).startswith(f"{tmp_path / 'dcp'} {sentence}")


def test_what_is_no_folder_or_has_no_index_gets_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("nothing", "empty"):
        if name == "empty":
            (tmp_path / name).mkdir()
        assert main(["import", str(tmp_path / name), str(tmp_path / "c")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"shoal: {tmp_path / 'nothing'} cannot be read: No such file or directory."
    assert second.startswith(f"shoal: {tmp_path / 'empty'} is neither a torch.distributed.checkpoint folder nor one of")
    assert not (tmp_path / "c").exists()


def test_an_index_that_wants_to_run_code_runs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (Path("attacked"),))

    monkeypatch.chdir(tmp_path)
    folder = written(plain(), tmp_path / "dcp")
    for content, why in (
        (pickle.dumps(Attack()), r"it names pathlib\.(_local\.)?Path\.touch, which no index needs"),
        (b"no pickle", ""),
        (pickle.dumps({"a": 1}), "it holds something else"),
    ):
        (folder / INDEX).write_bytes(content)
        with pytest.raises(UserError, match=f"is not the index of a torch.distributed.checkpoint folder: .*{why}"):
            DcpFolder(folder)
    assert not (tmp_path / "attacked").exists()


def test_a_folder_that_is_not_whole_gets_a_sentence(tmp_path: Path) -> None:
    folder = written(plain(), tmp_path / "dcp")
    (file,) = folder.glob("*.distcp")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r'bytes, and ".*" ends at byte [\d,]+; copy the whole folder'):
        _ = DcpFolder(folder).states
    file.write_bytes(b"\0" * len(content))
    with pytest.raises(UserError, match=r'is damaged: "model.w" cannot be read: .'):
        DcpFolder(folder).part("w", 0, 1)
    file.unlink()
    with pytest.raises(UserError, match=r'lacks the file __0_0.distcp, which holds "model.w"; copy the whole folder'):
        DcpFolder(folder)
    folder = written(plain(), tmp_path / "hole")
    index = pickle.loads((folder / INDEX).read_bytes())
    (chunk,) = index.state_dict_metadata["model.w"].chunks
    chunk.sizes = torch.Size([2, 2])
    (folder / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match=r'"model.w" has shape \(3, 2\), which is 6 elements, and 4 are there'):
        DcpFolder(folder)
    chunk.sizes = torch.Size([4, 2])
    (folder / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match=r"shape \(4, 2\) does not lie in its shape \(3, 2\)"):
        DcpFolder(folder)


def test_another_optimizer_than_the_states_are_of_is_refused_and_the_model_alone_is_not(tmp_path: Path) -> None:
    folder = written(plain(), tmp_path / "dcp")
    for model_only, place in ((False, tmp_path / "a"), (True, tmp_path / "b")):
        import_model(folder, LocalStorage(place), model_only)
        model = nn.Module()
        model.w = nn.Parameter(torch.zeros(3, 2))
        state = TrainingState(
            model, torch.optim.SGD(model.parameters(), momentum=0.9), None, Limits(1, 0.0, 1), residency_of(0)
        )
        if model_only:
            assert str(load_model(found_in(place).reader(), state, ())).endswith("with a fresh optimizer.")
            continue
        with pytest.raises(UserError) as refused:
            load_model(found_in(place).reader(), state, ())
        assert str(refused.value) == (
            'the checkpoint has exp_avg, step as optimizer state of parameter "w"; SGD keeps momentum_buffer. Use the '
            "optimizer that made it, or import the model alone (--model-only)."
        )
