"""A job without a launcher whose blocks are lost, and that has no checkpoint: it begins anew, with whoever comes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machine_driver import MADE_OF, NEW, Driver, notes, training
from rule import Edit, rule
from shoal_controller.core.machine.effects import Effect, Send
from shoal_controller.core.machine.events import Disconnected
from shoal_controller.core.machine.phases import admission
from shoal_controller.core.machine.phases.waiting import PATIENCE_SECONDS, SHORT_PATIENCE_SECONDS
from shoal_controller.core.machine.spec import Phase
from shoal_protos.acts import ConfirmLost
from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.messages import FRESH_PROCESS, Ending, Fault, MemberState, Result, Shutdown
from shoal_protos.plan import EVERYONE

STALL_SECONDS = 100.0
LOST = "no living copy of"


def losing_blocks(joiners: int = 0, **spec: object) -> tuple[Driver, list[Effect]]:
    """Of three members two have died, with all copies of some blocks; and the effects of the third one's answer."""
    job = training(workers=3, stall_seconds=STALL_SECONDS, **spec)  # type: ignore[arg-type]
    for number in range(joiners):
        job.hello(f"j{number}")
    for worker in ("w0", "w1"):
        job.feed(Disconnected(job.connections.pop(worker), "reset"))
        job.feed(ConfirmLost(worker))
    job.stop("w2", job.statuses["w2"])
    effects = job.effects
    for number in range(joiners):  # they were to be filled: until they say so, they may have been
        assert not shutdowns(job.effects)
        job.stop(f"j{number}", job.statuses[f"j{number}"])
        effects = job.effects
    return job, effects


def shutdowns(effects: list[Effect]) -> list[Shutdown]:
    messages = [effect.message for effect in effects if isinstance(effect, Send)]
    return [message for message in messages if isinstance(message, Shutdown)]


@rule(
    "Where all who hold a block are dead, there is no checkpoint and no launcher, the job begins anew: joiners that "
    "have not trained count at once, who has trained is told to be replaced",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.lost_blocks",
        "        how = Ending.REPLACED if record.launched or found is None else Ending.START_OVER\n",
        "        how = Ending.REPLACED if record.launched else Ending.START_OVER\n",
    ),
)
def test_the_job_begins_anew_with_joiners_and_the_survivor_is_told_that_it_takes_a_fresh_process() -> None:
    job, effects = losing_blocks(joiners=2)
    [goodbye] = shutdowns(effects)
    assert goodbye.ending is Ending.REPLACED
    assert LOST in goodbye.reason and "begins anew, which takes a fresh process" in goodbye.reason
    del job.connections["w2"], job.statuses["w2"]
    job.tick()
    assert "the job begins anew, for up to 100 s more: no living copy of" in job.view.reason
    job.wait(PATIENCE_SECONDS + 1)
    job.recover()
    world = job.job.durable.current
    assert world is not None and world.workers == {"j0", "j1"}
    assert (job.view.phase, job.job.durable.anew) == (Phase.RUNNING, None)


@pytest.mark.parametrize(("coming", "patience"), [((), SHORT_PATIENCE_SECONDS), (("w8",), PATIENCE_SECONDS)])
def test_a_job_that_has_lost_its_world_waits_long_only_for_workers_that_are_on_the_way(
    coming: tuple[str, ...], patience: float
) -> None:
    job, _ = losing_blocks()
    del job.connections["w2"], job.statuses["w2"]
    for worker in coming:
        job.hello(worker, status=replace(NEW, state=MemberState.WARMING_UP))
    job.hello("w9")
    job.wait(patience - 0.5)
    assert job.job.attempt is None
    job.wait(1.0)
    assert job.job.attempt is not None
    job.recover()
    world = job.job.durable.current
    assert world is not None and world.workers == {"w9"}


def test_who_has_trained_goes_back_in_the_same_process_where_there_is_a_checkpoint() -> None:
    made_of = replace(MADE_OF, can_checkpoint=True)
    job = training(workers=3, made_of=made_of)
    job.beat("w0", checkpoint=CheckpointRef(1, 1, "/c/step-1", 1))
    for worker in ("w0", "w1"):
        job.feed(Disconnected(job.connections.pop(worker), "reset"))
        job.feed(ConfirmLost(worker))
    job.stop("w2", job.statuses["w2"])
    assert not shutdowns(job.effects) and job.planned().workers == {"w2"}


def test_a_job_that_begins_anew_waits_for_stall_seconds_and_then_fails_with_its_reason() -> None:
    job, _ = losing_blocks(min_workers=2)
    del job.connections["w2"], job.statuses["w2"]
    job.wait(STALL_SECONDS - 1)
    assert job.view.phase is Phase.WAITING
    job.hello("w9")
    job.wait(2)
    assert job.view.phase is Phase.FAILED
    assert LOST in job.view.reason and job.view.reason.endswith(
        "every process that held them is dead; 1 of 2 workers came to begin anew within 100 s (stall_seconds). "
        "Set checkpoint.path or more mirrors."
    )


def test_another_controller_goes_on_with_the_wait_and_gives_workers_their_time_to_come_back() -> None:
    job, _ = losing_blocks(min_workers=2)
    del job.connections["w2"], job.statuses["w2"]
    job.wait(STALL_SECONDS - 1)
    job.restart()
    job.wait(STALL_SECONDS - 1)
    assert job.view.phase is Phase.WAITING
    job.wait(2)
    assert job.view.phase is Phase.FAILED and LOST in job.view.reason


def test_enough_workers_at_the_last_moment_are_enough() -> None:
    job, _ = losing_blocks(min_workers=2)
    del job.connections["w2"], job.statuses["w2"]
    job.wait(STALL_SECONDS - 1)
    job.hello("w8")
    job.hello("w9")
    job.wait(PATIENCE_SECONDS + 1)
    job.recover()
    assert job.view.phase is Phase.RUNNING


def test_a_joiner_that_has_trained_before_is_left_out_and_has_not_failed() -> None:
    job, _ = losing_blocks(joiners=2)
    del job.connections["w2"], job.statuses["w2"]
    job.wait(PATIENCE_SECONDS + 1)
    for worker in ("j0", "j1"):
        job.stop(worker, job.statuses[worker])
    job.say("j0", Result(0, failure="it has trained before", fault=Fault(FRESH_PROCESS, "", "")))
    del job.connections["j0"], job.statuses["j0"]
    job.recover()
    world = job.job.durable.current
    assert world is not None and world.workers == {"j1"} and not job.job.durable.failures.script


@pytest.mark.parametrize(
    ("mirrors", "saves", "sentence"),
    [
        (0, False, "each block is kept by one worker alone (mirrors 0), so none may be lost; "),
        (1, False, "each block is kept by 2 workers, so 1 worker may be lost at once; "),
        (2, True, "each block is kept by 3 workers, so 2 workers may be lost at once; "),
        (EVERYONE, True, "every worker keeps every block, so the job goes on while one of them lives; "),
    ],
)
def test_the_first_line_of_a_job_says_what_its_mirrors_and_saves_are_worth(
    mirrors: int, saves: bool, sentence: str
) -> None:
    places = ("/mnt/ckpt",) if saves else ()
    job = Driver(made_of=replace(MADE_OF, mirrors=mirrors, can_checkpoint=saves, checkpoint_places=places))
    job.hello("w0")
    where = "go back to the newest checkpoint in /mnt/ckpt" if saves else "begins anew at step 0, because no checkpoint"
    [line] = notes(job.effects, "survives")
    assert line == job.notes[0] == admission.survival_sentence(job.made_of)
    assert line.startswith(sentence) and where in line
    job.hello("w1")
    assert not notes(job.effects, "survives")
