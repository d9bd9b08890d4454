"""Folders of torch.distributed.checkpoint that lie, break, or change while they are read."""

from __future__ import annotations

import enum
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_folders import plain, written
from shoal.checkpoint import importing
from shoal.checkpoint.__main__ import main
from shoal.checkpoint.dcp_folder import INDEX, read_index
from shoal.checkpoint.importing import import_model
from shoal.checkpoint.model_file import DcpFolder
from shoal.checkpoint.storage import LocalStorage
from shoal.core.checkpoint_errors import StorageFailed
from shoal_protos.errors import UserError
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex


def endless() -> list[Any]:
    """A list within a list within a list, twice each time: as text it would never end."""
    found: list[Any] = []
    for _ in range(60):
        found = [found, found]
    return found


def entry(index: Any) -> Any:
    return index.state_dict_metadata["model.w"]


def stored(index: Any) -> Any:
    (found,) = index.storage_data.values()
    return found


def enlarge(index: Any) -> None:
    entry(index).size = entry(index).chunks[0].sizes = torch.Size((1 << 40, 2))


def overlap(index: Any) -> None:
    index.storage_data[MetadataIndex("model.w", (2, 0))] = stored(index)
    entry(index).size = torch.Size((6, 2))
    entry(index).chunks = [ChunkStorageMetadata(torch.Size((at, 0)), torch.Size((3, 2))) for at in (0, 2)]


LIES: list[tuple[Callable[[Any], object], str]] = [
    (enlarge, r'a part of "model.w" with shape \(1099511627776, 2\) takes [\d,]+ bytes, and [\d,]+ are there'),
    (overlap, r"which is 12 elements, and some of its parts overlap"),
    (lambda index: setattr(index, "storage_data", 3), "its storage_data is a int"),
    (lambda index: setattr(index, "state_dict_metadata", {3: 4}), "it holds a int where a name is expected"),
    (lambda index: index.planner_data.update({"model.w": endless()}), r'the place of "model.w" in it is not a path'),
    (lambda index: index.planner_data.update({"model.w": ("model", "w\x1b[2J")}), r"the name 'w\\x1b\[2J', which is"),
    (lambda index: setattr(entry(index), "size", "big"), "where a shape or a place is expected"),
    (lambda index: setattr(entry(index), "size", (1 << 70, 2)), "where a shape or a place is expected"),
    (lambda index: setattr(entry(index), "size", (-3, -2)), "where a shape or a place is expected"),
    (lambda index: setattr(entry(index), "size", endless()), "where a shape or a place is expected"),
    (lambda index: setattr(entry(index), "chunks", None), r"is not the index of a torch\.distributed"),
    (lambda index: setattr(entry(index).properties, "dtype", 3), '"model.w" has no dtype in it'),
    (lambda index: setattr(stored(index), "relative_path", "../x"), r"lacks the file \.\./x, which holds"),
    (lambda index: setattr(stored(index), "relative_path", "."), r"lacks the file \., which holds"),
    (lambda index: setattr(stored(index), "length", 1 << 50), "ends at byte [0-9,]+; copy the whole folder"),
    (
        lambda index: setattr(stored(index), "transform_descriptors", ["stream.zstd"]),
        r"in another form \(stream.zstd\); save it without",
    ),
]


@pytest.mark.parametrize(("lie", "sentence"), LIES)
def test_an_index_that_lies_gets_a_sentence(lie: Callable[[Any], object], sentence: str, tmp_path: Path) -> None:
    folder = written({"model": {"w": torch.ones(3, 2)}}, tmp_path / "dcp")
    index = pickle.loads((folder / INDEX).read_bytes())
    lie(index)
    (folder / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match=sentence):
        DcpFolder(folder)


class OldPickler(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, one: Any) -> Any:
        return (getattr, (type(one), one.name)) if isinstance(one, enum.Enum) else NotImplemented


def test_an_index_that_an_early_python_3_11_has_written_is_read(tmp_path: Path) -> None:
    folder = written({"model": {"w": torch.ones(3, 2)}}, tmp_path / "dcp")
    index = pickle.loads((folder / INDEX).read_bytes())
    with (folder / INDEX).open("wb") as file:
        OldPickler(file).dump(index)
    assert b"getattr" in (folder / INDEX).read_bytes()
    assert read_index(folder).tensors["model.w"].shape == (3, 2)


def test_an_index_gets_no_attribute_of_anything_else(tmp_path: Path) -> None:
    folder = written(plain(), tmp_path / "dcp")
    (folder / INDEX).write_bytes(b"cbuiltins\ngetattr\n(cpathlib\nPath\nVhome\ntR.")
    with pytest.raises(UserError, match=r"it names an attribute of something, which no index needs"):
        DcpFolder(folder)


def test_an_index_cannot_change_the_classes_that_it_names(tmp_path: Path) -> None:
    """By BUILD with two mappings an unpickler sets attributes of whatever lies on its stack, so of a class too."""
    folder = written(plain(), tmp_path / "dcp")
    (folder / INDEX).write_bytes(b"\x80\x04cpathlib\nPath\nN}\x8c\x07is_filecpathlib\nPath\ns\x86b.")
    with pytest.raises(UserError, match=r"is not the index of a torch\.distributed\.checkpoint folder"):
        DcpFolder(folder)
    assert (folder / INDEX).is_file() is True


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (torch.zeros(3, 2, dtype=torch.float64), r"torch.float64 of shape \(3, 2\)"),
        (torch.zeros(2, 3), r"torch.float32 of shape \(2, 3\)"),
        (torch.zeros(3, 2, device="meta"), r"torch.float32 of shape \(3, 2\)"),
        ({"w": torch.zeros(3, 2)}, "a dict"),
    ],
)
def test_a_file_that_holds_another_thing_than_its_index_says_is_damaged(value: Any, found: str, tmp_path: Path) -> None:
    folder = written({"model": {"w": torch.ones(3, 2)}}, tmp_path / "dcp")
    index = pickle.loads((folder / INDEX).read_bytes())
    (stored,) = index.storage_data.values()
    torch.save(value, folder / "other.distcp")
    stored.relative_path, stored.offset = "other.distcp", 0
    stored.length = (folder / "other.distcp").stat().st_size
    (folder / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match=rf'"model.w" cannot be read: a part of it is {found}, and by the index'):
        import_model(folder, LocalStorage(tmp_path / "c"))
    assert list((tmp_path / "c").iterdir()) == []


def test_a_value_that_wants_to_run_code_runs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (Path("attacked"),))

    monkeypatch.chdir(tmp_path)
    content = plain()
    content["optimizer"]["state"]["w"]["step"] = content["optimizer"]["param_groups"][0]["lr"] = Attack()
    model = DcpFolder(written(content, tmp_path / "dcp"))
    with pytest.raises(UserError, match=r'"optimizer.state.w.step" cannot be read: it is neither a plain tensor nor'):
        _ = model.states
    assert model.rates == []
    assert not (tmp_path / "attacked").exists()


def test_places_that_cannot_be_read_get_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    folder = written(plain(), tmp_path / "dcp")
    (file,) = folder.glob("*.distcp")
    file.unlink()
    file.symlink_to("/dev/zero")
    for name in ("pipe", "n" * 300, "dcp"):
        assert main(["import", str(tmp_path / name), str(tmp_path / "c")]) == 2
    pipe, long, device = capsys.readouterr().err.splitlines()
    assert pipe == f"shoal: {tmp_path / 'pipe'} is neither a file nor a folder; name the model's file, or its folder."
    assert long.endswith("n cannot be read: File name too long.")
    assert device.startswith(f"shoal: {folder} lacks the file {file.name}, which holds ")


def test_a_folder_that_is_written_to_while_it_is_read_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(plain(), tmp_path / "dcp")
    opened = importing.open_model

    def opened_and_written(file: Path) -> Any:
        model = opened(file)
        written(plain(), folder)
        return model

    monkeypatch.setattr(importing, "open_model", opened_and_written)
    with pytest.raises(UserError) as refused:
        import_model(folder, LocalStorage(tmp_path / "c"))
    assert str(refused.value) == f"{folder} was written to while it was read; import it again when its program is done."
    assert list((tmp_path / "c").iterdir()) == []


def test_an_import_for_which_there_is_no_room_leaves_nothing(tmp_path: Path) -> None:
    folder = written({"model": {"w": torch.ones(1 << 20)}}, tmp_path / "dcp")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(StorageFailed, match=r"^cannot write \S+ in \S+: file too large; raise the limit of file"):
            import_model(folder, LocalStorage(tmp_path / "c"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "c").iterdir()) == []


def test_an_import_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    folder = written(plain(), tmp_path / "dcp")
    monkeypatch.setattr(DcpFolder, "part", interrupted)
    assert main(["import", str(folder), str(tmp_path / "c")]) == 130
    assert list((tmp_path / "c").iterdir()) == []


def test_a_bit_that_has_changed_in_a_file_is_seen_unless_the_file_has_no_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        unchecked = written({"model": {"w": torch.arange(5000.0)}}, tmp_path / "unchecked")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(DcpFolder(unchecked).part("w", 0, 5000), torch.arange(5000.0))
    checked = written({"model": {"w": torch.arange(5000.0)}}, tmp_path / "checked")
    (file,) = checked.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r'is damaged: "model.w" cannot be read: Bad CRC-32 for file'):
        DcpFolder(checked).part("w", 0, 5000)


def test_not_a_numbers_in_weights_and_states_come_as_they_are(tmp_path: Path) -> None:
    content = plain()
    content["model"]["w"][1, 1] = content["optimizer"]["state"]["w"]["exp_avg"][0, 0] = float("nan")
    model = DcpFolder(written(content, tmp_path / "dcp"))
    assert model.states and model.part("w", 0, 6).isnan().tolist() == [False, False, False, True, False, False]
    assert model.state_part("w", "exp_avg", 0, 6).isnan().tolist() == [True, *[False] * 5]
