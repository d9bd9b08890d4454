"""Places for checkpoints that are away, that cannot be read, or that are not one place: real engines and the real job
machine in one process, real files.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crew import Crew, Task, undisturbed
from crew_saves import rests, saved
from reference import reference
from rule import Edit, holds, rule
from shoal.checkpoint.catalogue import saves
from shoal.checkpoint.manifest import VERSION
from shoal.checkpoint.storage import LocalStorage, Storage
from shoal.core.checkpoint_errors import NoneReadable, TransientStorageFailure
from shoal_controller.core.machine.phases import waiting

pytestmark = pytest.mark.xdist_group("places of checkpoints")

STEPS = 14
PLAIN = Task({"max_steps": STEPS})


def task(place: Path, mirrors: int = 1, max_steps: int = STEPS, **checkpoint: Any) -> Task:
    """A job that saves to a place."""
    shoal = {"checkpoint": {"path": str(place), **checkpoint}}
    return Task({"max_steps": max_steps, "stage": 1, "mirrors": mirrors, "shoal": shoal})


def messages(crew: Crew, kind: str) -> list[str]:
    return [message for one, message in crew.events if one == kind]


# ---- what the job has saved, and cannot be seen for a while


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers look again soon."""
    monkeypatch.setattr("shoal.training.checkpoint_loading.FIRST_LOOK_SECONDS", 0.01)


def take_away(place: Path) -> Path:
    """A mount is late: its folder is there, and empty."""
    away = place.with_name("away")
    place.rename(away)
    place.mkdir()
    return away


def put_back(away: Path, place: Path) -> None:
    shutil.rmtree(place)
    away.rename(place)


def spoil(place: Path) -> Path:
    """An older image runs: all manifests are of a later version."""
    away = place.with_name("away")
    shutil.copytree(place, away)
    for manifest in place.glob("step-*/manifest.json"):
        written, later = f'"version":{VERSION}'.encode(), f'"version":{VERSION + 1}'.encode()
        manifest.write_bytes(manifest.read_bytes().replace(written, later, 1))
    return away


@rule(
    "Where there are checkpoints to go on from and none can be read, a job waits and then fails: only `resume: false` "
    "begins at step 0",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit("shoal.checkpoint.catalogue", "    if unread:\n", "    if False:\n"),
        Edit(
            "shoal.training.checkpoint_loading",
            '        if found is None and resume == "latest" and job.checkpoint:\n',
            "        if False:\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.recovery",
            "    if checkpoints.latest(turn.durable) is None:\n        anew",
            "    if False:\n        anew",
            by="test_without_a_checkpoint_that_can_be_read_the_job_fails_and_does_not_begin_anew",
        ),
    ],
)
@pytest.mark.parametrize(("lose", "sentence"), [(take_away, "the job has saved"), (spoil, "none can be read")])
@pytest.mark.usefixtures("hasty")
def test_workers_that_start_wait_for_what_the_job_has_saved(
    lose: Callable[[Path], Path], sentence: str, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    with Crew("ab", task(place, every_steps=3)) as crew:
        crew.train_to(3)
        saved(crew, 3)
        for name in "ab":
            crew.kill(name)
        crew.until("the job to wait", lambda: crew.job.durable.current is None)
        away = lose(place)
        crew.add("c")
        crew.add("d")
        crew.until("the reason", lambda: messages(crew, "checkpoint_passed_over") != [])
        crew.beat(20)
        why = waiting.sentence(crew.job, crew.now)
        assert crew.job.durable.current is None and "0 of 2 workers ready" in why
        assert "this worker waits, and does not begin at step 0: " in why and sentence in why
        put_back(away, place)
        assert crew.finish() == reference(PLAIN)
        assert [resize.from_step for resize in crew.job.durable.history if resize.reason.value == "start"] == [0, 3]


def test_a_place_that_comes_back_between_two_looks_is_no_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    with Crew("abc", task(place, mirrors=0, every_steps=3)) as crew:
        crew.train_to(3)
        saved(crew, 3)
        crew.until("the disks", lambda: all(rests(worker) for worker in crew.members()))
        away, once = take_away(place), threading.Lock()

        def comes_back(storage: Storage) -> bool:
            if once.acquire(blocking=False):
                put_back(away, place)
            return saves(storage)

        monkeypatch.setattr("shoal.training.checkpoint_loading.saves", comes_back)
        crew.kill("b")
        assert crew.finish() == reference(PLAIN)
        assert messages(crew, "checkpoint_damaged") == []


@pytest.mark.usefixtures("hasty")
def test_members_that_go_back_wait_for_a_place_that_is_away(tmp_path: Path) -> None:
    place = tmp_path / "place"
    with Crew("abc", task(place, mirrors=0, every_steps=3)) as crew:
        crew.train_to(3)
        saved(crew, 3)
        crew.until("the disks", lambda: all(rests(worker) for worker in crew.members()))
        away = take_away(place)
        crew.kill("b")
        crew.until("the plan", lambda: any("from step 3" in one for one in messages(crew, "plan")))
        crew.beat(20)
        assert crew.job.durable.phase.value == "resizing" and messages(crew, "checkpoint_damaged") == []
        put_back(away, place)
        assert crew.finish() == reference(PLAIN)


@pytest.mark.usefixtures("hasty")
def test_members_that_go_back_wait_for_a_place_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails, look = threading.Event(), LocalStorage.list

    def listed(storage: LocalStorage, folder: str = "") -> dict[str, int | None]:
        if fails.is_set():
            raise TransientStorageFailure("stale file handle.")
        return look(storage, folder)

    monkeypatch.setattr(LocalStorage, "list", listed)
    monkeypatch.setattr("shoal.checkpoint.retrying_storage.TRIES", 1)
    with Crew("abc", task(tmp_path, mirrors=0, every_steps=3)) as crew:
        crew.train_to(3)
        saved(crew, 3)
        crew.until("the disks", lambda: all(rests(worker) for worker in crew.members()))
        fails.set()
        crew.kill("b")
        crew.until("the plan", lambda: any("from step 3" in one for one in messages(crew, "plan")))
        crew.beat(20)
        assert crew.job.durable.phase.value == "resizing" and messages(crew, "checkpoint_damaged") == []
        assert all(crew.workers[name].alive for name in "ac")
        fails.clear()
        assert crew.finish() == reference(PLAIN)


@pytest.mark.usefixtures("hasty")
def test_workers_that_wait_in_vain_end_and_say_why(tmp_path: Path) -> None:
    with Crew("ab", task(tmp_path, every_steps=3)) as crew:
        crew.train_to(3)
        saved(crew, 3)
    spoil(tmp_path)
    with Crew("a", task(tmp_path)) as crew:
        crew.workers["a"].link.dialogue.job = replace(crew.workers["a"].link.job, stall_seconds=0.0)
        crew.until("its end", lambda: not crew.workers["a"].alive)
        assert "none can be read" in crew.workers["a"].failure and crew.job.durable.current is None


def test_alone_it_ends_at_once_and_begins_at_step_0_only_where_it_is_told_to(tmp_path: Path) -> None:
    place = tmp_path / "place"
    undisturbed(task(place, max_steps=3, every_steps=3))
    spoil(place)
    with pytest.raises(NoneReadable, match=rf"has format version {VERSION + 1}, written by shoal "):
        undisturbed(task(place, every_steps=3))
    assert undisturbed(task(place, every_steps=7, keep=1, resume=False)) == reference(PLAIN)
    assert len(saves(LocalStorage(place))) > 1, "what could not be read is still there"


# ---- where members save


@rule(
    "All members save to one place: its resolved path, and a file that the first one has left there, are compared "
    "before a worker takes part",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.admission",
            "    if theirs == place or (other := _other(turn, hello)) is None:\n",
            "    if (other := _other(turn, hello)) is None or True:\n",
            by="test_a_worker_that_saves_elsewhere_is_refused_before_the_first_step",
        ),
        Edit(
            "shoal.training.checkpoint_loading",
            "        if elsewhere and not job.checkpoint:\n",
            "        if False:\n",
            by="test_a_worker_for_which_the_same_path_is_another_disk_is_told",
        ),
    ],
)
def test_a_worker_that_saves_elsewhere_is_refused_before_the_first_step(tmp_path: Path) -> None:
    here, there = tmp_path / "x", tmp_path / "y"
    with Crew("ab", task(here, every_steps=3), odd={"b": task(there, every_steps=3)}) as crew:
        crew.until("the refusal", lambda: messages(crew, "refused") != [])
        (sentence,) = messages(crew, "refused")
        assert all(
            part in sentence for part in ("worker b", "host of b", str(there), "worker a", "host of a", str(here))
        )
        assert crew.job.durable.step == 0 and sentence in waiting.sentence(crew.job, crew.now)


@pytest.mark.parametrize("other", [None, "y"])
def test_so_is_a_joiner(other: str | None, tmp_path: Path) -> None:
    here = task(tmp_path / "x", every_steps=3)
    with Crew("ab", here) as crew:
        crew.train_to(2)
        crew.add("c", task(tmp_path / other, every_steps=3) if other else PLAIN)
        assert messages(crew, "refused")[0].startswith("worker c on host of c saves checkpoints to ")
        assert crew.finish() == reference(PLAIN)


@holds("All members save to one place")
def test_a_worker_for_which_the_same_path_is_another_disk_is_told(tmp_path: Path) -> None:
    with Crew("a", task(tmp_path, every_steps=3)) as crew:
        crew.train_to(2)
        (mark,) = crew.job.durable.description.checkpoint_marks
        (tmp_path / mark).unlink()  # the other host's disk does not have it
        crew.add("b")
        crew.until("its end", lambda: not crew.workers["b"].alive)
        failure = crew.workers["b"].failure
        assert failure.startswith("worker b on ") and f"does not see {mark} there" in failure
        assert crew.finish() == reference(PLAIN)


def test_a_job_whose_workers_are_all_gone_may_be_continued_with_another_path(tmp_path: Path) -> None:
    with Crew("ab", task(tmp_path / "x")) as crew:
        for name in "ab":
            crew.kill(name)
        crew.until("their death to be known", lambda: not any(one.serves for one in crew.job.durable.roster.values()))
        crew.add("c", task(tmp_path / "y", every_steps=3))
        crew.add("d", task(tmp_path / "y", every_steps=3))
        assert crew.finish() == reference(PLAIN)
        assert crew.job.durable.description.saves_to == str(tmp_path / "y")
