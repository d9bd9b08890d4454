"""What a job owes at its end: each export, and each checkpoint that was due, or a later one. Without them it fails, and
says why.

With real processes: tests/integration/test_checkpoints.py.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import ONE_AT_A_TIME, PATIENCE_SECONDS, Crew, Task, engine_of, train, undisturbed
from crew_saves import saved
from rule import Edit, holds, rule
from shoal.checkpoint.catalogue import checkpoints
from shoal.checkpoint.saver import Saver, SaveResult, SaveTask
from shoal.checkpoint.storage import LocalStorage
from shoal.core.checkpoint_errors import StorageFailed
from shoal.deepspeed.deepspeed_engine import DeepSpeedEngine
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from tiers import check

pytestmark = check("starts processes")

STEPS = 5


def saving(place: Path, **others: Any) -> Task:
    options = {"max_steps": STEPS, "shoal": {"checkpoint": {"path": str(place), "every_steps": 3}}}
    return Task(options, **others)


def made(place: Path) -> list[int]:
    """Steps of the whole checkpoints, newest first."""
    return [one.name.step for one in checkpoints(LocalStorage(place), lambda _: None)]


class Disk:
    """Of every saver: saves of the steps in `broken` fail, and those in `slow` wait until `free`. `dies`, by worker: it
    writes nothing, and this says when its process is no more. `failures`: so many more writes fail.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken: set[int] = set()
        self.slow: set[int] = set()
        self.dies: dict[str, Callable[[], bool]] = {}
        self.failures = 0
        self.free, self._write = threading.Event(), Saver._write
        monkeypatch.setattr(Saver, "_write", lambda *called: self._turn(*called))

    def _turn(self, saver: Saver, save: SaveTask, outcome: SaveResult) -> None:
        dead = self.dies.get(save.part.member.worker)
        if dead is not None:
            while not dead():
                self.free.wait(0.01)
            raise StorageFailed("its process is no more.")
        if save.name.step in self.slow:
            assert self.free.wait(PATIENCE_SECONDS)
        if save.name.step in self.broken:
            raise StorageFailed("the disk is full.")
        if self.failures:
            self.failures -= 1
            raise StorageFailed("the place is away.")
        self._write(saver, save, outcome)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def end(crew: Crew) -> str:
    """How the job ends, and why."""
    crew.allow()
    crew.until("the end", lambda: crew.job.durable.phase.is_over)
    return f"{crew.job.durable.phase.value}: {crew.job.durable.reason}"


def without_patience(crew: Crew) -> None:
    """A save that fails is not tried again."""
    for worker in crew.workers.values():
        worker.link.dialogue.job = replace(worker.link.job, stall_seconds=0.0)


def all_done(crew: Crew) -> bool:
    return all(worker.engine.global_step == STEPS for worker in crew.members())


@rule(
    "A job that has succeeded has the last checkpoint that was due, or a later one: what was skipped, lost or "
    "failed is saved at its end, and nobody has ended before; where that fails, so does the job",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal.training.checkpoint_saving",
            "return not (self.busy or self._saving.asked_at is not None or (self._saver and self._saving.is_owed))",
            "return not self.busy",
        ),
        Edit("shoal.checkpoint.failure", "JobFailed | ExportFailed | SaveFailed", "JobFailed | ExportFailed"),
        Edit(
            "shoal.training.training_loop",
            "            patience.check()\n            self.vote()\n        self._parts",
            "            self.vote()\n        self._parts",
            by="test_a_last_save_that_hangs_fails_the_job_and_names_the_worker_and_the_place",
        ),
    ],
)
def test_a_save_that_was_due_with_a_dead_member_is_made_though_its_first_try_outlasts_the_last_step(
    disk: Disk, tmp_path: Path
) -> None:
    disk.slow = {3}
    with Crew("abc", saving(tmp_path)) as crew:
        disk.dies["c"] = lambda: crew.workers["c"].killed
        crew.train_to(3)
        crew.until("a save in all", lambda: all(worker.engine.parts.saving.busy for worker in crew.members()))
        crew.kill("c")
        crew.allow()
        crew.until("the last step", lambda: all_done(crew))
        disk.free.set()
        assert crew.finish() == undisturbed(Task({"max_steps": STEPS}))
        assert [one.step for one in crew.job.durable.checkpoints] == [STEPS]
    assert made(tmp_path) == [STEPS]


@holds("A job that has succeeded has the last checkpoint")
def test_a_save_that_was_skipped_because_of_the_one_before_is_made_at_the_end(disk: Disk, tmp_path: Path) -> None:
    disk.slow = {2}
    task = Task({"max_steps": STEPS, "shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": 2}}})
    with Crew("ab", task) as crew:
        crew.allow()
        crew.until("the last step", lambda: all_done(crew))
        disk.free.set()
        crew.finish()
        assert [one.step for one in crew.job.durable.checkpoints] == [STEPS, 2]


class Meeting:
    """A script that looks at the place after its loop, and votes no more until all members have come so far."""

    def __init__(self, place: Path, in_loop: Callable[[Engine], None] = lambda _: None) -> None:
        self.place, self.in_loop, self.seen = place, in_loop, list[list[int]]()
        self.crew: Crew

    def script(self, engine: Engine, before: Any) -> None:
        for batch in engine:
            before()
            self.in_loop(engine)
            engine.backward(engine.module(**batch))
            engine.step()
        self.seen.append(made(self.place))
        self.crew.changed.notify_all()
        worker = next(worker for worker in self.crew.workers.values() if worker.engine is engine)
        worker.wait(lambda: len(self.seen) == engine.world_size)


@rule(
    "A loop ends once the last checkpoint that was due is there, or a save of the last step has failed, and so it "
    "ends on all members after the same vote, also on one that joined after the last step: code after the loop can "
    "fail without losing it",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit("shoal.training.training_loop", "        self._settle_saves()\n", ""),
        Edit(
            "shoal.core.saving",
            "return self._quiet >= QUIET_VOTES",
            "return not self.is_owed",
            by="test_a_loop_ends_though_the_last_save_fails",
        ),
    ],
)
@pytest.mark.parametrize("names", ["a", "ab", "abc"])
@pytest.mark.parametrize("asked", [False, True], ids=["by steps", "by the script"])
def test_a_loop_ends_with_the_last_save_that_was_due(asked: bool, names: str, disk: Disk, tmp_path: Path) -> None:
    disk.slow = {1, 4}
    meeting = Meeting(tmp_path, lambda engine: engine.save_checkpoint() if asked and engine.global_step == 3 else None)
    every = None if asked else 1
    options = {"max_steps": STEPS, "shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": every}}}
    with Crew(names, Task(options, script=meeting.script)) as crew:
        meeting.crew = crew
        crew.allow()
        crew.until("the last step", lambda: all_done(crew))
        assert not meeting.seen
        disk.free.set()
        crew.finish()
    newest = 4 if asked else STEPS
    assert [steps[0] for steps in meeting.seen] == [newest] * len(names)


@rule(
    "The job's fingerprint is of its last step, and given before the loop ends: what a script writes into parameters "
    "afterwards, such as averaged weights, is not in it",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal.training.training_loop", "while self._context.is_over and not self._context.done:", "while False:"
    ),
)
@pytest.mark.parametrize("names", ["a", "ab"])
def test_what_a_script_writes_after_its_loop_is_not_in_the_jobs_fingerprint(names: str) -> None:
    def script(engine: Engine, before: Callable[[], None]) -> None:
        for batch in engine:
            before()
            engine.backward(engine.module(**batch))
            engine.step()
        if engine.rank == 0:
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    parameter.zero_()

    with Crew(names, Task({"max_steps": STEPS}, script=script)) as crew:
        assert crew.finish() == undisturbed(Task({"max_steps": STEPS}))


@holds("A loop ends once the last checkpoint that was due")
@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_a_loop_ends_though_the_last_save_fails(names: str, disk: Disk, tmp_path: Path) -> None:
    disk.broken = {3, STEPS}
    meeting = Meeting(tmp_path)
    with Crew(names, saving(tmp_path, script=meeting.script)) as crew:
        meeting.crew = crew
        crew.until("all", lambda: len(crew.members()) == len(names))
        without_patience(crew)
        ending = end(crew)
    assert meeting.seen == [[]] * len(names)
    assert "all steps are done, but the last checkpoint that was due is missing: " in ending


@holds("A loop ends once the last checkpoint that was due")
def test_each_of_two_engines_of_a_script_has_its_last_save_before_the_next_one_trains(
    disk: Disk, tmp_path: Path
) -> None:
    for number in range(2):
        place = tmp_path / str(number)
        disk.broken = {3}
        with ONE_AT_A_TIME:
            train(engine_of(saving(place), AloneLink(), Faults([])), saving(place), lambda: None)
        assert made(place)


def test_all_who_wait_for_the_last_save_go_back_with_a_loss_and_train_on(disk: Disk, tmp_path: Path) -> None:
    disk.slow = {12}
    checkpoint = {"path": str(tmp_path), "every_steps": 2}
    with Crew("ab", Task({"max_steps": 12, "mirrors": 0, "shoal": {"checkpoint": checkpoint}})) as crew:
        crew.train_to(2)
        saved(crew, 2)
        crew.plant("b", 12, "after_last")
        crew.allow()
        crew.until("the loss", lambda: crew.workers["b"].killed)
        disk.free.set()
        assert crew.finish() == undisturbed(Task({"max_steps": 12}))
        (restore,) = [world for world in crew.job.durable.history if world.reason.value == "restore"]
        assert 2 <= restore.from_step < 12


def test_a_save_that_failed_and_was_followed_by_none_is_tried_again_at_the_end(disk: Disk, tmp_path: Path) -> None:
    disk.broken = {3}
    with Crew("ab", saving(tmp_path)) as crew:
        crew.finish()
        assert [one.step for one in crew.job.durable.checkpoints] == [STEPS]


def test_nothing_is_saved_at_the_end_where_all_that_was_due_is_there(disk: Disk, tmp_path: Path) -> None:
    with Crew("ab", saving(tmp_path)) as crew:
        crew.finish()
    assert made(tmp_path) == [3]


@holds("A job that has succeeded has the last checkpoint")
def test_a_job_whose_last_save_fails_again_at_its_end_fails_and_names_where_it_would_go_on(
    disk: Disk, tmp_path: Path
) -> None:
    disk.broken = {3, STEPS}
    with Crew("ab", saving(tmp_path)) as crew:
        without_patience(crew)
        ending = end(crew)
        assert crew.job.durable.step == STEPS
    assert ending.startswith("failed: worker ")
    missing = "all steps are done, but the last checkpoint that was due is missing: the checkpoint of step 5 failed: "
    assert missing in ending and ending.endswith("Started again, the job begins anew.")


class Raises:
    """An object of the script's whose state cannot be had after the last step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def state_dict(self) -> dict[str, int]:
        if self.engine.global_step == STEPS:
            raise ValueError("it is full")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        del state


@holds("A job that has succeeded has the last checkpoint")
@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_last_save_without_the_states_of_the_script_fails_the_job_and_names_what_raised(
    names: str, tmp_path: Path
) -> None:
    options = {"max_steps": STEPS, "shoal": {"checkpoint": {"path": str(tmp_path), "every_steps": STEPS}}}
    task = Task(options, prepare=lambda engine: engine.register_state("the log", Raises(engine)))
    with Crew(names, task) as crew:
        ending = end(crew)
        assert crew.now < 100, "in virtual seconds: nothing is tried again that would go the same way"
    assert ending.startswith("failed: worker ") and "the last checkpoint that was due is missing: " in ending
    assert 'state_dict of the state registered as "the log" raised ValueError: it is full' in ending


@holds("A job that has succeeded has the last checkpoint")
def test_a_save_that_is_asked_for_after_the_loop_and_fails_in_every_worker_fails_the_job(
    disk: Disk, tmp_path: Path
) -> None:
    disk.broken = {STEPS}
    task = Task({"max_steps": STEPS, "shoal": {"checkpoint": {"path": str(tmp_path)}}}, script=_save_at_the_end)
    with Crew("ab", task) as crew:
        without_patience(crew)
        ending = end(crew)
    assert ending.startswith("failed: worker ") and "the checkpoint of step 5 failed: " in ending


@holds("A job that has succeeded has the last checkpoint")
@pytest.mark.parametrize(
    ("hangs", "asks"),
    [("a", "by steps"), ("b", "by steps"), ("a", "after the loop"), ("b", "where nothing else says the end")],
)
def test_a_last_save_that_hangs_fails_the_job_and_names_the_worker_and_the_place(
    hangs: str, asks: str, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.training.checkpoint_saving.LEAST_SECONDS", 0.0)  # the other one has its time
    monkeypatch.setattr("shoal.checkpoint.saver.PATIENCE_SECONDS", 0.2)

    def epoch(engine: Engine, before: Any) -> None:
        mine = DeepSpeedEngine(engine)
        for batch in mine.training_dataloader:
            before()
            mine.backward(mine(**batch))
            mine.step()
        mine.save_checkpoint(tmp_path)

    place = {"shoal": {"checkpoint": {"path": str(tmp_path)}}}
    task = {
        "by steps": saving(tmp_path),
        "after the loop": Task({"max_steps": STEPS, **place}, script=_save_at_the_end),
        "where nothing else says the end": Task({"max_steps": None, **place}, script=epoch),
    }[asks]
    with Crew("ab", task) as crew:
        crew.until("both", lambda: len(crew.members()) == 2)
        hanging = crew.workers[hangs]
        hanging.link.dialogue.job = replace(hanging.link.job, stall_seconds=0.0)
        disk.dies[hanging.link.worker] = disk.free.is_set
        ending = end(crew)
        disk.free.set()
        crew.until("their ends", lambda: not any(worker.alive for worker in crew.workers.values()))
        for worker in crew.workers.values():
            worker.engine.parts.saving.close()
    assert ending.startswith(f"failed: worker {crew.workers[hangs].link.worker}: all steps are done, but a checkpoint")
    assert f"a write to {tmp_path}/step-00000000000{3 if asks == 'by steps' else STEPS}" in ending


@rule(
    "A save that has failed is tried again, later and later, for `stall_seconds`; the end of the job gives the whole "
    "time again: its workers hold the only copy",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal.core.saving", "        if now - self._since >= patience_seconds:\n", "        if True:\n"),
)
@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_a_last_save_is_tried_again_until_the_place_is_back(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    monkeypatch.setattr("shoal.core.saving.FIRST_PAUSE_SECONDS", 0.01)
    with Crew(names, saving(tmp_path)) as crew:
        disk.failures = 6
        assert crew.finish() == undisturbed(Task({"max_steps": STEPS}))
        assert [one.step for one in crew.job.durable.checkpoints] == [STEPS]
    assert not disk.failures


def test_a_save_that_failed_is_made_up_for_before_the_next_one_is_due(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.core.saving.FIRST_PAUSE_SECONDS", 0.0)
    disk.broken = {3}
    with Crew("ab", saving(tmp_path)) as crew:
        crew.train_to(3)
        crew.until("the failure", lambda: all(w.engine.parts.saving.status == "failed" for w in crew.members()))
        crew.finish()
        assert [one.step for one in crew.job.durable.checkpoints] == [4]


def _save_at_the_end(engine: Engine, before: Any) -> None:
    for batch in engine:
        before()
        engine.backward(engine.module(**batch))
        engine.step()
    engine.save_checkpoint()


def test_a_leader_that_dies_in_the_last_save_is_followed_by_one_that_makes_it(disk: Disk, tmp_path: Path) -> None:
    disk.broken, disk.slow = {3}, {STEPS}
    with Crew("abc", saving(tmp_path)) as crew:
        crew.allow()
        leader = crew.workers["a"]
        crew.until("the last save", lambda: all_done(crew) and leader.engine.parts.saving.busy)
        leader.killed = True
        disk.free.set()
        crew.finish()
        assert [one.step for one in crew.job.durable.checkpoints] == [STEPS]


@pytest.mark.parametrize("asks", [0, 1], ids=["rank 0", "another rank"])
def test_an_export_of_the_loop_that_failed_fails_the_job_at_its_end(asks: int, tmp_path: Path) -> None:
    def ask(engine: Engine) -> None:
        if engine.rank == asks and engine.global_step == 2:
            engine.export(tmp_path)

    with Crew("ab", Task({"max_steps": STEPS}, in_loop=ask)) as crew:
        ending = end(crew)
        assert crew.job.durable.step == STEPS, "training is not stopped by it"
    assert ending.startswith("failed: worker ") and f"cannot export the model to {tmp_path}" in ending


def test_an_export_that_only_another_rank_waits_for_fails_the_job(tmp_path: Path) -> None:
    def script(engine: Engine, before: Any) -> None:
        for batch in engine:
            before()
            engine.backward(engine.module(**batch))
            engine.step()
        if engine.rank == 1:
            engine.export(tmp_path)

    with Crew("ab", Task({"max_steps": STEPS}, script=script)) as crew:
        ending = end(crew)
    assert ending.startswith("failed: worker ") and f"cannot export the model to {tmp_path}" in ending


def test_an_export_that_failed_is_made_good_by_a_later_one_to_the_same_place(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.mkdir()

    def ask(engine: Engine) -> None:
        if engine.rank == 0 and engine.global_step in (1, 3):
            if engine.global_step == 3 and file.is_dir():
                file.rmdir()
            engine.export(file)

    with Crew("ab", Task({"max_steps": STEPS}, in_loop=ask)) as crew:
        crew.finish()
    assert file.is_file()


ALONE = """
import atexit, dataclasses, sys, threading
from pathlib import Path
import shoal, torch
from torch.utils.data import TensorDataset

atexit.register(print, "called early")
place = Path(sys.argv[1])
model = torch.nn.Linear(8, 2)
checkpoint = {"path": str(place), "every_steps": 2}
config = {"train_micro_batch_size_per_gpu": 2, "shoal": {"lanes": 2, "max_steps": 4, "checkpoint": checkpoint}}
data = TensorDataset(torch.randn(64, 8), torch.zeros(64).long())
engine = shoal.initialize(model=model, dataset=data, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
engine.context.link.job = dataclasses.replace(engine.context.link.job, stall_seconds=0.0)
atexit.register(print, "called late")
place.rmdir()
place.write_text("in the way")
for x, y in engine:
    engine.backward(torch.nn.functional.cross_entropy(engine.module(x), y))
    engine.step()
if sys.argv[2] == "in time":
    engine.parts.saving._saver.join()
    place.unlink()
print("done")
"""


@pytest.mark.parametrize("mended", ["in time", "never"])
def test_a_script_alone_ends_with_status_0_only_where_its_last_checkpoint_is_there(mended: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    command = [sys.executable, "-c", ALONE, str(place), mended]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.stdout.splitlines() == ["done", "called late", "called early"], "the script is not cut short"
    assert "Traceback" not in ended.stderr
    if mended == "in time":
        assert (ended.returncode, made(place)) == (0, [4])
    else:
        assert ended.returncode == 1
        last = ended.stderr.splitlines()[-1]
        assert last.startswith("shoal: all steps are done, but the last checkpoint that was due is missing: ")
