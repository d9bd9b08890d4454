"""Optimizer state in files: the bits of a job that keeps it in memory, through kills, joins, drains and saves."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crew import Crew, Killed, Task, Worker, undisturbed
from crew_saves import saved
from matrices import shortened
from reference import reference
from shoal.offload.state_file import StateFile
from shoal.offload.state_place import InFile
from shoal_protos.acts import DrainWorker
from tiers import check

pytestmark = check("trains many small jobs")

HALF = {"bf16": {"enabled": True}}
STEPS = 6


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two blocks, so that the model has more of them than there are buffers."""
    monkeypatch.setattr("shoal.offload.state_pieces.PIECE_ELEMENTS", 2 * 4096)


def options(**more: Any) -> dict[str, Any]:
    return {"max_steps": STEPS, "stage": 1, "mirrors": 1, **more}


def filed(worker: Worker) -> InFile:
    home = worker.engine.context.state.held.home
    assert isinstance(home, InFile)
    return home


@pytest.mark.parametrize(
    ("stage", "names", "mirrors", "precision"),
    [
        (0, "ab", 0, {}), (1, "a", 0, {}), (1, "ab", 0, {}), (1, "abcd", 1, {}), (2, "a", 0, {}), (2, "abc", 2, {}),
        (1, "abc", 2, HALF), (2, "ab", 0, HALF), (2, "abcd", 1, HALF),
        (3, "a", 0, {}), (3, "ab", 0, {}), (3, "abc", 1, {}), (3, "abcd", 2, HALF),
    ],
)  # fmt: skip
def test_state_in_files_gives_the_bits_of_state_in_memory(
    stage: int, names: str, mirrors: int, precision: dict[str, Any], tmp_path: Path
) -> None:
    task = options(max_steps=3, precision=precision)
    with Crew(names, Task({**task, "stage": stage, "mirrors": mirrors, "offload": tmp_path})) as crew:
        fingerprint = crew.finish()
        assert all(filed(worker).bytes_by_place()["state_files"] > 0 for worker in crew.workers.values())
    assert fingerprint == undisturbed(Task(task))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", shortened([1, 2, 3], 2, 3))
def test_kills_joins_and_drains_change_no_bit(stage: int, tmp_path: Path) -> None:
    with Crew("abc", Task(options(max_steps=9, stage=stage, offload=tmp_path))) as crew:
        crew.train_to(2)
        crew.plant("b", 3, "exchange")
        crew.train_to(3)
        crew.add("d")
        crew.train_until("all have joined", crew.at_rest)
        crew.request(DrainWorker("a"))
        fingerprint = crew.finish()
    assert fingerprint == undisturbed(Task(options(max_steps=9)))


def test_a_member_that_passed_the_vote_alone_is_followed_by_roll_forward(tmp_path: Path) -> None:
    with Crew("abc", Task(options(mirrors=2, offload=tmp_path))) as crew:
        crew.train_to(2)
        crew.plant("a", 3, "in_vote")
        crew.train_to(4)
        assert any("roll_forward" in worker.seen for worker in crew.workers.values())
        assert crew.finish() == reference(Task(options()))


def of_later_call(method: Callable[..., None], calls: int, error: BaseException) -> Callable[..., None]:
    """The method, which raises at its call of that number."""
    left = [calls]

    def failing(self: StateFile, at: int, memory: memoryview) -> None:
        left[0] -= 1
        if not left[0]:
            raise error
        method(self, at, memory)

    return failing


@pytest.mark.parametrize("stage", shortened([1, 2, 3], 2))
@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_worker_that_dies_within_an_update_leaves_the_step_to_its_mirrors(
    verb: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Crew("abc", Task(options(stage=stage, offload=tmp_path))) as crew:
        crew.train_to(2)
        with crew.changed:
            file = filed(crew.workers["b"]).store.file
            failing = of_later_call(getattr(StateFile, verb), 5, Killed())
            monkeypatch.setattr(file, verb, failing.__get__(file))
        fingerprint = crew.finish()
        assert not crew.workers["b"].alive and crew.workers["b"].killed
    assert fingerprint == undisturbed(Task(options()))


@pytest.mark.parametrize("verb", ["read", "written"])
def test_a_disk_that_fails_within_an_update_costs_its_worker_and_no_step(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = {"read": "preadv", "written": "pwritev"}[verb]
    with Crew("abc", Task(options(offload=tmp_path))) as crew:
        crew.train_to(2)
        broken, right = filed(crew.workers["b"]).store.file._fd, getattr(os, call)

        def fails(fd: int, memory: Any, at: int) -> int:
            if fd == broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return int(right(fd, memory, at))

        monkeypatch.setattr(os, call, fails)
        fingerprint = crew.finish()
        assert f"cannot be {verb}: Input/output error." in crew.workers["b"].failure
        assert crew.workers["b"].engine.context.leaving
    assert fingerprint == undisturbed(Task(options()))


def test_a_worker_whose_disk_is_full_says_so_before_step_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Crew("abc", Task(options(offload=tmp_path))) as crew:
        full, right = filed(crew.workers["b"]).store.file._fd, os.posix_fallocate

        def fallocate(fd: int, at: int, count: int) -> None:
            if fd == full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            right(fd, at, count)

        monkeypatch.setattr(os, "posix_fallocate", fallocate)
        fingerprint = crew.finish()
        assert (
            "bytes left, and the optimizer state that this worker is to keep there needs" in crew.workers["b"].failure
        )
        assert crew.workers["b"].engine.global_step <= 0
    assert fingerprint == undisturbed(Task(options()))


def test_workers_may_differ_in_where_they_keep_state(tmp_path: Path) -> None:
    of_files = Task(options(offload=tmp_path))
    with Crew("abc", Task(options()), odd={"b": of_files}) as crew:
        crew.train_to(2)
        crew.kill("a")
        crew.add("d", of_files)
        assert crew.finish() == reference(Task(options()))


@pytest.mark.parametrize(
    ("first_in_files", "stage", "precision"),
    shortened([(True, 3, {}), (False, 3, {}), (True, 1, HALF), (False, 2, HALF)], (True, 3, {}), (False, 2, HALF)),
)
def test_a_checkpoint_goes_on_with_and_without_files(
    first_in_files: bool, stage: int, precision: dict[str, Any], tmp_path: Path
) -> None:
    place = {"checkpoint": {"path": str(tmp_path / "saves"), "every_steps": 3}}
    (tmp_path / "files").mkdir()
    homes = [{"offload": tmp_path / "files"}, {}]
    first, then = homes if first_in_files else homes[::-1]
    with Crew("abc", Task(options(max_steps=3, shoal=place, precision=precision, **first))) as crew:
        crew.finish()
    with Crew("ab", Task(options(shoal=place, precision=precision, stage=stage, **then))) as crew:
        assert crew.finish() == undisturbed(Task(options(precision=precision)))


def test_a_job_that_has_lost_blocks_goes_back_to_its_checkpoint(tmp_path: Path) -> None:
    place = {"checkpoint": {"path": str(tmp_path / "saves"), "every_steps": 2}}
    (tmp_path / "files").mkdir()
    with Crew("abc", Task(options(max_steps=30, mirrors=0, shoal=place, offload=tmp_path / "files"))) as crew:
        crew.train_to(2)
        saved(crew, 2)
        crew.kill("b")
        assert crew.finish() == undisturbed(Task(options(max_steps=30)))
        assert any("restore" in worker.seen for worker in crew.workers.values())


def test_between_steps_memory_has_three_buffers_and_the_numbers_that_blocks_share(tmp_path: Path) -> None:
    with Crew("a", Task(options(max_steps=2, mirrors=0, offload=tmp_path))) as crew:
        crew.finish()
        places = filed(crew.workers["a"]).bytes_by_place()
    piece = 2 * 4096 * 2 * 4
    numbers = 4 * len(filed(crew.workers["a"]).store.pieces)
    assert places["state"] == 3 * piece + numbers
    assert places["state_files"] > 3 * piece
