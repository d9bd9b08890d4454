"""A file of optimizer state by itself, where it may be, and passes over what it has."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import pytest
import torch
from rule import Edit, holds, rule
from shoal.offload import transfers
from shoal.offload.state_file import StateFile
from shoal_protos.errors import UserError

FORKING = """
import os, sys
from shoal.offload.state_file import StateFile
file = StateFile(sys.argv[1])
child = os.fork()
if not child:
    try:
        os.fstat(file._fd)
    except OSError:
        os._exit(0)
    os._exit(1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture
def folder() -> Iterator[str]:
    """On a disk."""
    with tempfile.TemporaryDirectory() as name:
        yield name


class GatedFile:
    """Every byte read is the lowest of its address; some addresses are answered when the gate opens."""

    folder = "/disk"

    def __init__(self, *gated: int) -> None:
        self._gated, self.gate, self.landed = gated, threading.Event(), threading.Event()

    def read(self, at: int, target: memoryview) -> None:
        if at in self._gated:
            self.gate.wait(100)
        target[:] = bytes([at & 0xFF]) * len(target)
        if at in self._gated:
            self.landed.set()


@holds("A buffer of optimizer state is")
def test_a_pass_that_is_given_up_is_waited_for_before_its_buffers_are_used_again() -> None:
    file = GatedFile(2)
    passes = transfers.Transfers(file)  # type: ignore[arg-type]
    first = passes.carry([(transfers.FileRange(at, 0, 8),) for at in (1, 2, 3)], 8)
    next(first)
    opener = threading.Timer(0.02, file.gate.set)
    opener.start()
    later = passes.carry([(transfers.FileRange(at, 0, 8),) for at in (4, 5, 6)], 8)
    next(later)
    buffer = next(later)
    assert file.landed.wait(100)
    assert buffer.view(0, 8, torch.uint8).tolist() == [5] * 8
    first.close()
    later.close()
    opener.join()


@rule(
    "A buffer of optimizer state is used, or written, or read, one at a time: nothing is read into what is still "
    "being written, nothing is used before it is there, and a pass that was given up is waited for, but not what "
    "of it has not begun",
    "A step",
    broken_by=[
        Edit(
            "shoal.offload.transfers",
            "            buffer.end_turn(self._file.folder)\n            yield buffer\n",
            "            yield buffer\n",
        ),
        Edit(
            "shoal.offload.transfers",
            "        for at, start, count in writes:\n"
            "            file.write(at, memory[start : start + count])\n"
            "        self.read(file, reads)\n",
            "        self.read(file, reads)\n"
            "        for at, start, count in writes:\n"
            "            file.write(at, memory[start : start + count])\n",
        ),
        Edit(
            "shoal.offload.transfers",
            "            buffer.settle()\n",
            "            buffer.to_write = ()\n",
            by="test_a_pass_that_is_given_up_is_waited_for_before_its_buffers_are_used_again",
        ),
        Edit(
            "shoal.offload.transfers",
            "        if self._turn is not None and not self._turn.cancel():\n",
            "        if self._turn is not None:\n",
        ),
    ],
)
def test_what_a_pass_that_is_given_up_has_not_begun_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a save fails that streams: an update stood still for two minutes."""

    def waits(turns: Sequence[Future[None]], _: float) -> None:
        assert not wait(turns, 5.0).not_done

    monkeypatch.setattr(transfers, "wait", waits)
    file = GatedFile(2, 3)
    passes = transfers.Transfers(file, buffers=4)  # type: ignore[arg-type]
    first = passes.carry([(transfers.FileRange(at, 0, 8),) for at in (1, 2, 3, 4)], 8)
    next(first)
    opener = threading.Timer(0.02, file.gate.set)
    opener.start()
    first.close()
    opener.join()
    found = [
        buffer.view(0, 8, torch.uint8).tolist() for buffer in passes.carry([(transfers.FileRange(5, 0, 8),)] * 4, 8)
    ]
    assert found == [[5] * 8] * 4


@rule(
    "A file of optimizer state has no name from its first moment on: no other process, this worker's next one "
    "included, finds what is in it",
    "A step",
    broken_by=Edit(
        "shoal.offload.state_file",
        '        with tempfile.TemporaryFile(dir=folder, prefix="shoal-", buffering=0) as file:\n',
        '        with (Path(folder) / "state").open("a+b", buffering=0) as file:\n',
    ),
)
def test_a_file_has_no_name_and_is_gone_with_its_process(folder: str) -> None:
    left, right = StateFile(folder), StateFile(folder)
    assert list(Path(folder).iterdir()) == []
    assert os.fstat(left._fd).st_nlink == 0
    assert os.fstat(left._fd).st_ino != os.fstat(right._fd).st_ino
    descriptor = left._fd
    del left
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_forked_child_keeps_no_space_on_the_disk(folder: str) -> None:
    assert subprocess.run([sys.executable, "-c", FORKING, folder], check=False).returncode == 0


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_path_that_is_no_folder_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / name
    with pytest.raises(UserError) as caught:
        StateFile(str(path))
    assert str(caught.value) == (
        f"`zero_optimization.offload_optimizer.nvme_path` is {path}, which is not a folder here; name one on a local "
        "disk."
    )


def test_a_folder_that_nobody_may_write_to_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(UserError, match=f"nvme_path` is {folder}, where no file can be made: Permission"):
        StateFile(folder)


def test_a_system_that_cannot_reserve_space_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    with pytest.raises(UserError, match="optimizer state in files needs Linux"):
        StateFile(folder)
