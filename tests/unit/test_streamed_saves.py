"""`shoal.checkpoint.stream`: files that are written from what training holds say the same as those from a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from checkpoints import fresh, save, trained
from crew import Crew, Task, undisturbed
from reference import reference
from shoal.checkpoint import saver
from shoal.checkpoint.catalogue import look_into, saves
from shoal.checkpoint.fingerprint import verify
from shoal.checkpoint.manifest import FileEntry
from shoal.checkpoint.snapshot import streamed_state
from shoal.checkpoint.storage import LocalStorage, Storage
from shoal.checkpoint.writer import write_content
from shoal.core.checkpoint_errors import StorageFailed
from shoal.training.engine import Engine
from shoal_protos.runs import Runs

OPTIONS: dict[str, Any] = {"max_steps": 6, "lanes": 4, "stage": 3}


def straight(place: Path, **more: Any) -> dict[str, Any]:
    return {"shoal": {"checkpoint": {"path": str(place), "stream": True, **more}}}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop])
def test_a_streamed_file_says_what_one_from_a_copy_says(
    kind: type[torch.optim.Optimizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rprop counts where no parameter lies; SGD has no state; scattered owners have many stretches."""
    state = trained(3, kind=kind)
    owners = [Runs.of(range(at, state.layout.blocks, 3)) for at in range(3)]
    found = []
    for place in ("copied", "streamed"):
        if place == "streamed":
            monkeypatch.setattr(checkpoints, "take_snapshot", lambda *given: streamed_state(*given[:-1]))
        storage = LocalStorage(tmp_path / place)
        name, manifest = save(state, storage, owners)
        found.append((verify(look_into(storage, name).reader()).fingerprint, manifest.data_bytes))
    assert found[0] == found[1]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("in_files", [False, True])
def test_a_job_goes_on_from_streamed_saves_with_the_same_bits(stage: int, in_files: bool, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    options = {**OPTIONS, "stage": stage} | ({"offload": tmp_path / "files"} if in_files else {})
    saved = straight(tmp_path / "saves", every_steps=2)
    with Crew("abc", Task({**options, "max_steps": 4, **saved})) as crew:
        crew.finish()
    with Crew("ab", Task({**options, **saved})) as crew:
        assert crew.finish() == reference(Task(OPTIONS))
        assert any(kind == "resumed" or "step 4" in text for kind, text in crew.events), crew.story()


def test_it_is_written_when_the_step_returns(tmp_path: Path) -> None:
    there: list[bool] = []

    def look(engine: Engine) -> Any:
        engine.save_checkpoint()
        done = engine.step()
        there.append(engine.warming_up or any(tmp_path.rglob("*.safetensors")))
        return done

    undisturbed(Task({**OPTIONS, "lanes": 1, **straight(tmp_path)}, step=look))
    assert there and all(there)
    assert saves(LocalStorage(tmp_path))


def test_a_disk_that_fails_while_training_waits_fails_the_save_and_not_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(storage: Storage, folder: str, step: int, *rest: Any) -> FileEntry:
        if step < OPTIONS["max_steps"]:
            raise StorageFailed("the disk is gone")
        return write_content(storage, folder, step, *rest)

    monkeypatch.setattr(saver, "write_content", fails)
    with Crew("ab", Task({**OPTIONS, **straight(tmp_path, every_steps=2)})) as crew:
        assert crew.finish() == undisturbed(Task(OPTIONS))
    assert "the disk is gone" in capsys.readouterr().err
    assert [name.step for name in saves(LocalStorage(tmp_path))] == [OPTIONS["max_steps"]]


def test_a_state_without_blocks_is_an_empty_file() -> None:
    state = fresh()
    content = streamed_state(state.layout, state.weights, state.held, Runs(()), {})
    assert (content.regions, content.pieces, list(content.contents())) == ((), (), [])
