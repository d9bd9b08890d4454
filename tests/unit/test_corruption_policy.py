"""What the machine makes of copies that differ: it tells them once, goes back to a sound checkpoint, evicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from machine_driver import MADE_OF, NEW, Driver
from rule import Edit, holds, rule
from shoal_controller.core.machine.effects import Note, Persist
from shoal_controller.core.machine.events import PlannerAnswered, Tick
from shoal_controller.core.machine.figures import series_key
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.planning.question import answer
from shoal_protos.acts import Resume
from shoal_protos.checkpoint import CheckpointRef, UnreadableCheckpoint
from shoal_protos.corruption import CorruptBlock, OnCorruption
from shoal_protos.messages import Ending, Prepare
from shoal_protos.plan import Reason

SOUND = CheckpointRef(1, 10, "/c/sound", 5, verified=True)
NEWER = CheckpointRef(1, 20, "/c/newer", 5)


def job(policy: OnCorruption = OnCorruption.RESTORE, workers: int = 3, **spec: Any) -> Driver:
    """It trains at step 31."""
    made = Driver(workers, replace(MADE_OF, on_corruption=policy, can_checkpoint=True), **spec)
    made.start(workers)
    for worker in tuple(made.statuses):
        made.beat(worker, step=31)
    return made


def differ(block: int, *workers: str, step: int = 30) -> CorruptBlock:
    return CorruptBlock(block, step - 4, step, workers)


def noted(driver: Driver, *kinds: str) -> list[str]:
    return [effect.message for effect in driver.of(Note) if effect.kind in kinds]


def counted(driver: Driver) -> float:
    return driver.job.figures.counters[series_key("shoal_corrupt_blocks_total", {})]


def test_a_block_is_told_and_counted_once_though_all_members_say_it_again_and_again() -> None:
    driver = job(OnCorruption.CONTINUE)
    effects = []
    for worker in ("w0", "w1", "w2", "w0"):
        driver.beat(worker, corrupt=(differ(3, "w0", "w1"),))
        effects += driver.effects
    driver.effects = effects
    assert noted(driver, "corrupt_block") == [
        "the copies of block 3 of workers w0 and w1 differ; one was changed between steps 26 and 30"
    ]
    assert counted(driver) == 1
    assert driver.job.attempt is None and not driver.job.durable.paused


def test_what_no_member_says_or_of_no_worker_is_not_believed() -> None:
    driver = job(OnCorruption.PAUSE)
    driver.hello("w9", status=replace(NEW, corrupt=(differ(3, "w0", "w1"),)))
    driver.beat("w0", corrupt=(differ(4, "w0", "w77"), differ(5)))
    assert noted(driver, "corrupt_block") == []
    assert not driver.job.durable.paused


def test_a_job_that_is_to_pause_says_why_until_it_goes_on() -> None:
    driver = job(OnCorruption.PAUSE)
    driver.beat("w0", corrupt=(differ(3, "w0", "w1"),))
    assert driver.job.durable.paused
    assert driver.job.durable.paused_because.endswith("between steps 26 and 30; on_corruption is pause")
    driver.recover()
    assert driver.job.durable.current is not None and not driver.job.durable.current.steps
    driver.feed(Resume())
    assert not driver.job.durable.paused and not driver.job.durable.paused_because


@rule(
    "When copies differ, all members return to a checkpoint whose copies were compared when it was saved, and to "
    "no newer one",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.checkpoints",
            "[one for one in durable.checkpoints if one.verified] if durable.corruption.restoring else []",
            "list[CheckpointRef]()",
        ),
        Edit(
            "shoal.training.corruption_watch",
            "not (record.corrupt or record.single)",
            "not record.corrupt",
            by="test_a_checkpoint_of_which_a_block_has_one_valid_copy_only_is_not_verified",
        ),
        Edit(
            "shoal.training.corruption_watch",
            "            self._sound = self._sound and not (",
            "            self._sound = not (",
            by="test_a_checkpoint_of_which_a_block_differs_is_not_verified_though_all_that_is_compared_after_it_agrees",
        ),
    ],
)
@pytest.mark.parametrize("restarts", [False, True])
def test_all_go_back_to_the_newest_checkpoint_whose_copies_were_compared(restarts: bool) -> None:
    driver = job()
    driver.beat("w0", checkpoint=SOUND)
    driver.beat("w1", checkpoint=NEWER)
    driver.beat("w2", corrupt=(differ(3, "w0", "w1"),))
    assert noted(driver, "restoring")[0].startswith(
        "all members go back to the checkpoint of step 10: the copies of block 3 of"
    )
    assert any(isinstance(message, Prepare) for message in driver.messages_to("w1"))
    if restarts:
        driver.restart()
        for worker in ("w0", "w1", "w2"):
            driver.hello(worker)
        driver.wait(1)
    for worker in ("w0", "w1", "w2"):
        driver.stop(worker, driver.statuses[worker])
    plan = driver.planned()
    assert plan.recovery is not None
    assert (plan.recovery.checkpoint, plan.recovery.step, plan.reason) == (SOUND.path, 10, Reason.RESTORE)


@rule(
    "… but the step from which all go back to a checkpoint is stored before they are asked to, so that every "
    "life says how far they went back; and a checkpoint that is told of while the planner thinks is one that all "
    "may begin at",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit("shoal_controller.core.machine.phases.recovery", "    turn.do(Persist())\n", ""),
        Edit(
            "shoal_controller.core.machine.phases.recovery",
            "    if isinstance(question, StartQuestion) and not planner_questions.begins_where_all_would(turn, "
            "question):\n",
            "    if False:\n",
        ),
    ],
    after="… the shown step goes back",
)
def test_the_step_from_which_all_go_back_is_written_before_anyone_is_asked_to() -> None:
    driver = job()
    driver.beat("w0", checkpoint=SOUND)
    driver.feed(Tick())
    driver.beat("w2", corrupt=(differ(3, "w0", "w1"),))
    driver.planner_answers = False
    for worker in ("w0", "w1"):
        driver.stop(worker, driver.statuses[worker])
    driver.beat("w2", step=32)
    driver.stop("w2", driver.statuses["w2"])
    assert driver.job.attempt is not None and driver.job.attempt.back_from == driver.job.durable.step == 32
    assert driver.of(Persist) == driver.effects[:1] == [Persist()]


@holds("… but the step from which all go back")
def test_a_better_checkpoint_that_is_told_of_while_the_planner_thinks_is_where_all_begin() -> None:
    driver = job()
    driver.beat("w0", checkpoint=SOUND)
    driver.beat("w2", corrupt=(differ(3, "w0", "w1"),))
    driver.planner_answers = False
    for worker in ("w0", "w1", "w2"):
        driver.stop(worker, driver.statuses[worker])
    driver.planner_answers = True
    driver.beat("w1", checkpoint=replace(NEWER, verified=True))
    asked = driver.questions[-1]
    driver.feed(PlannerAnswered(asked, answer(asked.question)))
    plan = driver.planned()
    assert plan.recovery is not None
    assert (plan.recovery.checkpoint, plan.recovery.step) == (NEWER.path, NEWER.step)
    assert len(driver.questions) == asked.number + 1


def back_at_the_checkpoint(driver: Driver) -> None:
    driver.beat("w0", checkpoint=SOUND)
    driver.beat("w2", corrupt=(differ(3, "w0", "w1"),))
    driver.statuses = {worker: replace(status, corrupt=()) for worker, status in driver.statuses.items()}
    driver.recover()
    assert driver.job.durable.corruption.returned_at == 31


@holds("… what was saved after")
def test_what_was_saved_after_that_checkpoint_counts_no_more() -> None:
    driver = job()
    driver.beat("w1", checkpoint=NEWER)
    back_at_the_checkpoint(driver)
    assert driver.job.durable.checkpoints == (SOUND,)
    driver.beat("w1", checkpoint=NEWER)
    assert driver.job.durable.checkpoints == (SOUND,)
    assert driver.job.durable.current is not None
    late = CheckpointRef(driver.job.durable.current.generation, 15, "/c/after")
    driver.beat("w1", checkpoint=late)
    assert driver.job.durable.checkpoints == (late, SOUND)


@holds("A worker that is part")
def test_a_second_return_without_a_step_above_the_highest_pauses() -> None:
    driver = job(workers=4)
    back_at_the_checkpoint(driver)
    driver.beat("w0", step=31, corrupt=(differ(5, "w2", "w3"),))
    assert driver.job.durable.paused and not driver.job.durable.corruption.restoring
    assert driver.job.durable.paused_because.endswith(
        "; all members already went back from step 31 for this, and have not passed it since"
    )


def test_beyond_the_highest_step_all_go_back_again() -> None:
    driver = job()
    back_at_the_checkpoint(driver)
    for worker in ("w0", "w1", "w2"):
        driver.beat(worker, step=32)
    driver.beat("w0", corrupt=(differ(5, "w2", "w1", step=32),))
    assert driver.job.attempt is not None and not driver.job.durable.paused


@rule(
    "A worker that is part of two differences is evicted; a second return without progress beyond the highest "
    "step pauses the job",
    "Not marked in the design, but needed as much",
    broken_by=Edit("shoal_controller.core.machine.phases.corruption", "PATIENCE = 2\n", "PATIENCE = 3\n"),
)
@pytest.mark.parametrize(("launcher", "ending"), [("none", Ending.FAILED), ("local", Ending.REPLACED)])
def test_a_worker_in_two_differences_is_evicted(launcher: str, ending: Ending) -> None:
    driver = job(OnCorruption.CONTINUE, launcher=launcher)
    driver.beat("w0", corrupt=(differ(3, "w0", "w1"), differ(4, "w0", "w1")))
    assert driver.job.durable.phase is Phase.RUNNING, "two blocks that one vote has found are one difference"
    driver.beat("w0", corrupt=(differ(6, "w1", "w2", step=33),))
    record = driver.job.durable.roster["w1"]
    assert record.ending is ending and "it was part of 2 differences between copies of blocks" in record.why
    assert [name for name, one in driver.job.durable.roster.items() if one.ending is not None] == ["w1"]
    assert driver.job.attempt is not None
    assert driver.job.durable.corruption.implicated == {}


def test_of_two_workers_that_differ_twice_the_younger_is_evicted() -> None:
    driver = job(OnCorruption.CONTINUE)
    driver.beat("w0", corrupt=(differ(3, "w0", "w1"),))
    driver.beat("w0", corrupt=(differ(6, "w0", "w1", step=33),))
    assert [name for name, one in driver.job.durable.roster.items() if one.ending is not None] == ["w1"]


@holds("Where there are checkpoints to go on from")
@pytest.mark.parametrize("launcher", ["local", "none"])
def test_without_a_checkpoint_that_can_be_read_the_job_fails_and_does_not_begin_anew(launcher: str) -> None:
    driver = job(launcher=launcher)
    driver.beat("w0", checkpoint=SOUND)
    driver.beat("w2", corrupt=(differ(3, "w0", "w1"),))
    for worker in ("w0", "w1", "w2"):
        driver.stop(worker, driver.statuses[worker])
    driver.beat("w1", unreadable_checkpoint=UnreadableCheckpoint(SOUND.path, "a part is not there."))
    driver.tick()
    assert driver.job.durable.phase is Phase.FAILED
    assert "a part is not there. There is no other checkpoint. To begin at step 0, start" in driver.job.durable.reason
