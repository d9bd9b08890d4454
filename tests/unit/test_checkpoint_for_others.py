"""Checkpoints meet the rest of the world: safetensors, state dicts, torch.distributed.checkpoint, the command."""

from __future__ import annotations

import errno
import os
import re
import resource
from pathlib import Path

import pytest
import torch
from allocated_bytes import most_bytes
from checkpoints import Model, check_last_update, fresh, save, train, trained
from rule import Edit, rule
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shoal.checkpoint import named, snapshot
from shoal.checkpoint.__main__ import main
from shoal.checkpoint.catalogue import resolve
from shoal.checkpoint.importing import import_model
from shoal.checkpoint.manifest import MANIFEST
from shoal.checkpoint.model_export import export as export_live
from shoal.checkpoint.restore import load_model
from shoal.checkpoint.storage import LocalStorage
from shoal.state.training_state import TrainingState
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

SINGLE_PROCESS = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def state() -> TrainingState:
    return trained(2)


@pytest.fixture
def place(tmp_path: Path, state: TrainingState) -> Path:
    """A folder with the checkpoint of `state`."""
    save(state, LocalStorage(tmp_path / "c"))
    return tmp_path / "c"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def metadata(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as opened:
        return dict(opened.metadata())


def test_the_export_is_what_the_engine_exports(place: Path, state: TrainingState, capsys, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    export_live(state.module, tmp_path / "live.safetensors")
    code, out, _ = run(capsys, "export", place, tmp_path / "m.safetensors")
    assert (code, out) == (0, f"{tmp_path / 'm.safetensors'}: the model of step 2\n")
    mine, theirs = load_file(tmp_path / "m.safetensors"), load_file(tmp_path / "live.safetensors")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype for name in mine)
    assert metadata(tmp_path / "m.safetensors") == metadata(tmp_path / "live.safetensors")
    assert metadata(tmp_path / "m.safetensors")["head.weight"] == "embedding.weight"


def test_the_export_has_the_dtype_that_is_asked_for(place: Path, state: TrainingState, capsys, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "m.safetensors"
    assert run(capsys, "export", place, file, "--dtype", "bfloat16")[0] == 0
    mine = load_file(file)
    assert torch.equal(mine["up.weight"], state.module.get_parameter("up.weight").bfloat16())
    assert {name for name, tensor in mine.items() if tensor.dtype != torch.bfloat16} == {"norm.num_batches_tracked"}
    assert run(capsys, "export", place, file, "--dtype", "int4")[::2] == (
        2,
        "shoal: --dtype is int4; expected float64, float32, bfloat16, float16.\n",
    )


@SINGLE_PROCESS
def test_plain_pytorch_loads_the_model_of_a_dcp_directory(
    place: Path, state: TrainingState, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(capsys, "export", place, tmp_path / "dcp", "--format", "dcp")[0] == 0
    model = Model()
    content = {"model": model.state_dict()}
    load(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    model.load_state_dict(content["model"])
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.module.state_dict().items())


@SINGLE_PROCESS
def test_plain_pytorch_goes_on_from_a_dcp_directory_with_the_same_bits(
    place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(capsys, "export", place, tmp_path / "dcp", "--format", "dcp")[0] == 0
    model = Model()
    trained_parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained_parameters if (p.ndim > 1) is wide]} for wide in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    content = {"model": model_state, "optimizer": optimizer_state}
    load(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    undisturbed = trained(3)
    check_last_update(undisturbed, model, optimizer)


# ---- import


def safetensors_of(model: Model, file: Path) -> Path:
    tensors = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    save_file(tensors, file)
    return file


def test_a_plain_model_is_imported_and_a_job_begins_with_it(capsys, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(4)
    model = Model()
    torch.save(model.state_dict(), tmp_path / "m.pt")
    torch.save({"state_dict": model.state_dict()}, tmp_path / "wrapped.pt")
    safetensors_of(model, tmp_path / "m.safetensors")
    for file in ("m.pt", "wrapped.pt", "m.safetensors"):
        code, out, _ = run(capsys, "import", tmp_path / file, tmp_path / f"to-{file}")
        assert code == 0 and out.endswith(f"the model of {tmp_path / file}, step 0\n")
        found = resolve(None, str(tmp_path / f"to-{file}"), print)
        assert found and found.manifest.kind == "model" and found.manifest.step == 0
        state = fresh(seed=1)
        load_model(found.reader(), state, ())
        state.begin_anew(state.everything)
        for name, tensor in model.state_dict().items():
            assert torch.equal(state.module.state_dict()[name], tensor), (file, name)
        assert run(capsys, "verify", tmp_path / f"to-{file}")[0] == 0


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_an_import_has_a_part_of_the_file_in_memory_at_a_time(
    ending: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(snapshot, "PART_BYTES", 1 << 20)
    tensors = {str(number): torch.full((1 << 18,), float(number)) for number in range(15)}
    tensors["large"] = torch.arange(1.0 * (1 << 20)).view(1 << 10, 1 << 10)
    file = tmp_path / f"m.{ending}"
    save_file(tensors, file) if ending == "safetensors" else torch.save(tensors, file)
    mapped = file.stat().st_size
    assert most_bytes(lambda: import_model(file, LocalStorage(tmp_path / "c"))) < mapped + (4 << 20)
    found = resolve(None, str(tmp_path / "c"), print)
    assert found is not None
    for name, tensor in named.tensors(found.reader()):
        assert torch.equal(tensor, tensors[name]), name


def test_an_import_in_half_precision_is_widened_by_the_job(capsys, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(4)
    model = Model().bfloat16()
    safetensors_of(model, tmp_path / "m.safetensors")
    assert run(capsys, "import", tmp_path / "m.safetensors", tmp_path / "c")[0] == 0
    found, state = resolve(None, str(tmp_path / "c"), print), fresh(seed=1)
    assert found
    load_model(found.reader(), state, ())
    state.begin_anew(state.everything)
    assert torch.equal(state.module.get_parameter("wide"), model.wide.double())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is neither safetensors nor a torch state dict: "),
        (b"not a model at all", "is neither safetensors nor a torch state dict: "),
        (b"\xff" * 8 + b"{", "is neither safetensors nor a torch state dict: "),
    ],
)
def test_a_file_that_is_no_model_gets_a_sentence(
    content: bytes, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "m").write_bytes(content)
    code, _, err = run(capsys, "import", tmp_path / "m", tmp_path / "c")
    assert code == 2 and err.startswith(f"shoal: {tmp_path / 'm'} {sentence}") and err.count("\n") == 1
    assert not (tmp_path / "c").exists()


class Attack:
    """Runs code where a pickle is loaded carelessly."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("attacked"),))


def test_a_file_that_wants_to_run_code_runs_none(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Attack()}, tmp_path / "m.pt")
    code, _, err = run(capsys, "import", tmp_path / "m.pt", tmp_path / "c")
    assert code == 2 and "is neither safetensors nor a torch state dict: " in err
    assert "GLOBAL" in err and "weights_only" not in err and "safe_globals" not in err, (
        "it says what was found, not how to run it nevertheless"
    )
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([1, 2], "holds a list; expected a state dict, names with tensors."),
        ({}, "holds a dict; expected a state dict, names with tensors."),
        ({"a": 1}, 'holds a int under "a"; expected a state dict, names with tensors.'),
        ({"a": torch.zeros(1, dtype=torch.complex128)}, 'holds "a" with dtype torch.complex128, which a checkpoint'),
    ],
)
def test_another_content_than_a_state_dict_gets_a_sentence(
    content: object, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "m.pt")
    code, _, err = run(capsys, "import", tmp_path / "m.pt", tmp_path / "c")
    assert code == 2 and sentence in err


@rule(
    "An import is bounded by the size of its file, whatever the file says",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal.checkpoint.model_file", "    if size > most:\n", "    if False:\n"),
)
@pytest.mark.parametrize(
    "tensors", [{f"t{at}": torch.zeros(9999).expand(9, 9999) for at in range(2)}, {"a": torch.zeros(1).expand(1 << 40)}]
)
def test_tensors_that_repeat_what_a_file_has_without_end_are_not_imported(
    tensors: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torch.save(tensors, tmp_path / "m.pt")
    code, _, err = run(capsys, "import", tmp_path / "m.pt", tmp_path / "c")
    assert code == 2 and err.count("\n") == 1 and not (tmp_path / "c").exists()
    assert re.search(r'm\.pt has [\d,]+ bytes, and its tensors would have [\d,]+: "\w+", of shape ', err)


def test_tensors_that_share_a_buffer_are_imported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flat = torch.arange(6.0)
    torch.save({"flat": flat, "first": flat[:4], "last": flat[4:]}, tmp_path / "m.pt")
    assert run(capsys, "import", tmp_path / "m.pt", tmp_path / "c")[0] == 0


# ---- the command


def test_verify_tells_of_every_checkpoint_and_fails_where_one_is_damaged(
    place: Path, state: TrainingState, capsys: pytest.CaptureFixture[str]
) -> None:
    later, _ = save(train(state, 1), LocalStorage(place))
    code, out, _ = run(capsys, "verify", place)
    lines = out.splitlines()
    assert code == 0 and [" step 3, " in lines[0], " step 2, " in lines[1], len(lines)] == [True, True, 2]
    assert lines[0].startswith(f"{place / later.folder}: step 3, ")
    assert re.search(r" bytes in 2 files, valid, fingerprint [0-9a-f]{64}$", lines[0])
    file = next((place / later.folder).glob("*-w0-*"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    code, out, _ = run(capsys, "verify", place)
    assert code == 1 and "differs" in out.splitlines()[0] and "valid" in out.splitlines()[1]
    assert run(capsys, "verify", place / later.folder)[0] == 1
    (place / later.folder / MANIFEST).unlink()
    code, out, _ = run(capsys, "verify", place)
    assert code == 0 and "is incomplete" in out.splitlines()[0]
    assert run(capsys, "export", place, place / "m.safetensors")[:2] == (
        0,
        f"{place}/m.safetensors: the model of step 2\n",
    )


def test_a_place_without_checkpoints_gets_a_sentence(capsys, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert run(capsys, "verify", tmp_path)[::2] == (2, f"shoal: there is no checkpoint in {tmp_path}.\n")
    assert run(capsys, "export", tmp_path, tmp_path / "m")[::2] == (
        2,
        f"shoal: there is no complete checkpoint in {tmp_path}.\n",
    )


def test_an_export_does_not_write_into_a_directory_that_holds_something(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "export", place, place, "--format", "dcp")
    assert (code, err) == (2, f"shoal: {place} already exists; choose a new directory for the export.\n")


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_an_export_to_a_place_that_cannot_be_written_ends_in_a_sentence(
    kind: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "export", place, "/proc/m", "--format", kind) == (
        2,
        "",
        "shoal: cannot export the model to /proc/m: No such file or directory; choose a place that can be written and "
        "has room.\n",
    )


def test_an_export_that_finds_no_room_ends_in_a_sentence_and_leaves_nothing(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(file: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", no_room)
    (tmp_path / "out").mkdir()
    assert run(capsys, "export", place, tmp_path / "out" / "m") == (
        2,
        "",
        f"shoal: cannot export the model to {tmp_path / 'out' / 'm'}: there is no room; choose a place that can be "
        "written and has room.\n",
    )
    assert list((tmp_path / "out").iterdir()) == []


def test_an_export_for_torch_that_is_cut_off_ends_in_a_sentence(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, hard))
    try:
        code, out, err = run(capsys, "export", place, tmp_path / "m", "--format", "dcp")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (code, out) == (2, "")
    assert err.startswith(f"shoal: cannot export the model to {tmp_path / 'm'}: ")
    assert err.endswith("; choose a place that can be written and has room.\n")


def test_an_export_to_a_folder_asks_for_a_file_and_leaves_nothing(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    code, _, err = run(capsys, "export", place, tmp_path)
    assert (code, err) == (
        2,
        f"shoal: {tmp_path} is a folder; name the file to write, such as {tmp_path / 'model.safetensors'}.\n",
    )
    assert sorted(tmp_path.iterdir()) == before


def test_what_verify_prints_may_go_to_a_reader_that_has_read_enough(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", output)
        assert main(["verify", str(place)]) == 1
    assert capsys.readouterr().err == ""


def test_a_full_disk_under_the_output_of_verify_is_a_sentence(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("w") as output, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", output)
        assert main(["verify", str(place)]) == 1
    assert capsys.readouterr().err == "shoal: the output cannot be written: No space left on device\n"
