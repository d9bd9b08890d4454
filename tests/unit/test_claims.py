"""What a worker claims is checked before any of it is believed: its run, its numbers, its results, its checkpoints."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from machine_driver import MADE_OF, NEW, RUN, Driver
from rule import Edit, holds, rule
from shoal_controller.api.answers import CheckpointAnswer
from shoal_controller.api.page_answers import JobRow
from shoal_controller.core.machine.durable import Standing
from shoal_controller.core.machine.effects import Close
from shoal_controller.core.machine.events import Started
from shoal_controller.core.machine.job import restore
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.overview.attention import attention
from shoal_controller.observe.job_series import JobSeries
from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.messages import (
    Heartbeat,
    Inventory,
    MemberState,
    Ready,
    Refusal,
    Result,
    Shutdown,
    Status,
    Telemetry,
    Welcome,
)
from shoal_protos.runs import every
from shoal_protos.wire.bounds import MAX_NUMBER

OLD = Status(900, 1, MemberState.TRAINING, 1, step=5000, committed_in=1, boundaries=5000, holds=every(8))


# ---- the run


@rule(
    "Every run of a job has a uid; a worker of another run is turned away before anything in its status is read",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.claims",
            "    if sentence := run_mismatch(turn.spec, event.opening):\n",
            "    if (sentence := run_mismatch(turn.spec, event.opening)) and False:\n",
        ),
        Edit("shoal_controller.jobs.shell", "        spec = replace(spec, run=secrets.token_hex(8))\n", ""),
    ],
)
@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (
            "run-0",
            "worker w7 on host belongs to run run-0 of job job, which is over or was replaced; this is run run-1.",
        ),
        ("", "worker w7 on host says that it is in generation 1 of job job and names no run;"),
    ],
)
def test_a_worker_of_another_run_is_turned_away_before_anything_of_its_status_is_read(run: str, sentence: str) -> None:
    job = Driver(wanted=2)
    job.start(2)
    before = job.job
    job.hello("w7", status=OLD, run=run)
    (refusal,) = job.messages_to("w7")
    assert isinstance(refusal, Refusal) and refusal.final and refusal.sentence.startswith(sentence)
    assert job.of(Close) and job.notes == [refusal.sentence]
    assert job.job == before, "nothing of it is remembered"


def test_a_worker_of_another_run_cannot_have_the_place_of_a_worker_that_was_launched_and_not_heard_of_yet() -> None:
    job = Driver(wanted=1, launcher="local", command=("x",))
    job.hello("w0", status=OLD, run="run-0")
    assert job.view.phase is Phase.WAITING and job.job.durable.roster["w0"].incarnation == ""
    job.hello("w0", status=NEW, run=RUN)
    assert isinstance(job.messages_to("w0")[0], Welcome)


def test_a_controllers_restart_keeps_the_run_and_its_workers_go_on() -> None:
    job = Driver(wanted=2)
    job.start(2)
    statuses = dict(job.statuses)
    job.restart()
    for worker, status in statuses.items():
        job.hello(worker, status=status)
        assert isinstance(job.messages_to(worker)[0], Welcome)
    assert job.view.phase is Phase.RUNNING


def test_a_job_that_is_over_tells_its_own_workers_how_it_ended_and_turns_others_away() -> None:
    job = Driver(wanted=1, launcher="local", command=("x",))
    job.hello("w0")
    job.say("w0", Result(0, failure="no such file", everyone=True))
    job.hello("w0")
    assert isinstance(job.messages_to("w0")[0], Shutdown)
    job.hello("w0", run="run-0")
    assert isinstance(job.messages_to("w0")[0], Refusal)


def test_a_checkpoint_of_another_run_is_read_and_the_event_names_that_run() -> None:
    job = Driver(wanted=2, made_of=replace(MADE_OF, can_checkpoint=True))
    found = CheckpointRef(step=7, generation=3, path="/checkpoints/7", bytes=1, run="run-0")
    job.hello("w0", status=Status(0, 0, MemberState.WAITING, 0, -1, 0, checkpoint=found))
    assert job.view.last_checkpoint_step == 7
    assert "a checkpoint of step 7 was found at /checkpoints/7; run run-0 has saved it, this is run run-1" in job.notes


def test_a_checkpoint_has_an_age_only_where_its_world_was_heard_to_save_it() -> None:
    """One that is found, or that was saved while nobody was there, may be of any age; no age goes over to another."""
    found, old, saved = (
        CheckpointRef(generation, 7 * generation, f"/c/{generation}", run=RUN) for generation in (1, 2, 3)
    )
    job = Driver(wanted=2, made_of=replace(MADE_OF, can_checkpoint=True))
    job.hello("w0", status=replace(NEW, checkpoint=found))
    job.hello("w1", status=replace(NEW, checkpoint=found))
    assert ages(job) == {7: None}, "it lay there"
    job.recover()
    job.now += 100.0
    job.beat("w0", checkpoint=saved)
    assert ages(job) == {21: 100.0, 7: None}
    job.restart()
    job.now += 100.0
    job.hello("w0")
    job.beat("w0")
    assert ages(job) == {21: 100.0, 7: None}, "it is stored"
    away = CheckpointRef(3, 30, "/c/30", run=RUN)
    job.hello("w1", status=replace(job.statuses["w1"], checkpoint=away))
    job.beat("w1")
    assert ages(job) == {30: None, 21: 100.0, 7: None}, "it was saved while no controller was there"
    job.job = replace(job.job, durable=replace(job.job.durable, checkpoints=()))
    job.beat("w0", checkpoint=old)
    assert ages(job) == {14: None}, "it is an older one, taken where a newer one could not be read"


def ages(job: Driver) -> dict[int, float | None]:
    """Of every checkpoint that the job knows: when it was saved."""
    shown = [CheckpointAnswer.of(one) for one in job.view.checkpoints]
    row = JobRow.of(job.view, attention(job.view, job.now), JobSeries(0.0), job.now)
    assert row.last_checkpoint is not None and row.last_checkpoint.time == shown[0].saved
    assert ("ago" in row.last_checkpoint.sentence) is (shown[0].saved is not None)
    return {one.step: one.saved for one in shown}


@holds("For a worker that is")
def test_only_another_run_or_a_second_process_ends_a_worker_that_trains() -> None:
    job = Driver(wanted=2)
    job.start(2)
    refusals = {}
    for case, changed in {
        "another run": {"run": "run-0"},
        "another process": {"incarnation": "a second one", "run": RUN},
        "another model": {"description": replace(MADE_OF, mirrors=3), "run": RUN},
        "no store knows it": {"status": replace(OLD, promised=1 << 40), "run": RUN},
        "it names no run": {"run": ""},
    }.items():
        connection = job.connections["w0"]
        job.hello("w0", **{"status": replace(OLD, step=1), **changed})
        (refusals[case],) = job.messages_to("w0")
        job.connections["w0"] = connection
    assert [case for case, refusal in refusals.items() if refusal.ends_members] == ["another run", "another process"]


def test_a_worker_that_is_refused_every_second_is_told_of_once() -> None:
    job = Driver(wanted=2)
    notes = []
    for _ in range(3):
        job.hello("w9", status=replace(OLD, promised=1 << 40), run=RUN)
        notes += job.notes
    assert len(notes) == 1


# ---- numbers

ABSURD = (10**6, 1 << 40, MAX_NUMBER)


def numbers_of(kind: type) -> list[str]:
    return [field.name for field in fields(kind) if field.type in ("int", int)]


def goes_on_well(job: Driver, workers: int) -> None:
    """One of the workers is lost, the others recover and train on, also under the next controller."""
    job.die("w1")
    job.statuses.pop("w1")
    job.wait(2)
    job.recover()
    statuses = dict(job.statuses)
    job.restart()
    for worker, status in statuses.items():
        job.hello(worker, status=status)
    job.wait(2)
    assert job.view.phase is Phase.RUNNING and job.view.active == workers - 1
    assert job.view.step == 2 and job.job.durable.last_generation < 1 << 22 and not job.view.checkpoints


@rule(
    "A claim is checked before it is believed: committed_in ≤ generation ≤ promised ≤ the highest number given "
    "out; only a process's first hello may exceed that, by at most 2^20",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.claims",
            "    if claim.committed_in <= claim.generation <= promised <= highest:\n",
            "    if True:\n",
        ),
        Edit("shoal_controller.core.machine.phases.claims", "GREATEST_LEAP = 1 << 20\n", "GREATEST_LEAP = 1 << 60\n"),
        Edit(
            "shoal_controller.core.machine.phases.claims",
            "(0 if known or turn.world is None else GREATEST_LEAP)",
            "(0 if turn.world is None else GREATEST_LEAP)",
            by="test_a_process_that_is_known_may_not_leap_in_a_later_hello",
        ),
        Edit(
            "shoal_controller.core.machine.phases.claims",
            "max([last, durable.step, *(one.step for one in durable.checkpoints)])",
            "max([last, durable.step])",
            by="test_a_step_may_be_as_high_as_a_checkpoint_that_is_known_before_its_world_has_begun",
        ),
    ],
)
@pytest.mark.parametrize("value", ABSURD)
@pytest.mark.parametrize("name", numbers_of(Status))
def test_one_absurd_number_in_a_heartbeat_or_ready_harms_nothing(name: str, value: int) -> None:
    for message in (lambda status: Heartbeat(status, Telemetry()), lambda status: Ready(1, status)):
        job = Driver(wanted=3)
        job.start(3)
        job.say("w0", message(replace(job.statuses["w0"], **{"sequence": job.sequence + 1, name: value})))
        job.sequence += 1
        goes_on_well(job, 3)


@holds("A claim is checked before")
@pytest.mark.parametrize("value", ABSURD)
@pytest.mark.parametrize("name", numbers_of(Inventory))
def test_one_absurd_number_in_an_inventory_harms_nothing(name: str, value: int) -> None:
    job = Driver(wanted=3)
    job.start(3)
    job.die("w1")
    job.statuses.pop("w1")
    inventory = Inventory(job.job.attempt.generation, 1, 1, 1, b"r", every(8), every(8), every(8))
    job.say("w0", replace(inventory, **{name: value}))
    job.recover()
    job.wait(1)
    assert job.view.phase is Phase.RUNNING and job.view.active == 2 and job.view.step == 2


@pytest.mark.parametrize("value", ABSURD)
def test_one_absurd_step_in_a_result_harms_nothing(value: int) -> None:
    job = Driver(wanted=3)
    job.start(3)
    job.say("w0", Result(value, fingerprint="a" * 64, loss=1.0))
    assert job.job.durable.fingerprint == ""
    goes_on_well(job, 3)


@holds("A claim is checked before")
@pytest.mark.parametrize("value", [*ABSURD[1:], (1 << 20) + 2])
@pytest.mark.parametrize("name", ["generation", "promised", "committed_in", "next_generation"])
def test_one_absurd_number_in_a_hello_is_refused_in_a_sentence(name: str, value: int) -> None:
    job = Driver(wanted=3)
    job.start(3)
    if name == "next_generation":
        job.hello("w9", next_generation=value)
    else:
        job.hello("w9", status=replace(OLD, **{name: value}), run=RUN)
    (refusal,) = job.messages_to("w9")
    assert isinstance(refusal, Refusal) and str(value) in refusal.sentence
    del job.connections["w9"], job.statuses["w9"]
    goes_on_well(job, 3)


def test_a_broken_heartbeat_is_told_of_once_and_its_worker_stays() -> None:
    job = Driver(wanted=2)
    job.start(2)
    notes = []
    for _ in range(3):
        job.beat("w0", promised=10**6)
        notes += job.notes
    assert notes == [
        "worker w0 says that it has committed in generation 1, is in 1 and has promised 1000000; expected numbers that "
        "do not decrease, and at most 1. Such messages are ignored."
    ]
    job.beat("w0", promised=1)
    job.wait(5)
    assert job.view.phase is Phase.RUNNING and job.view.active == 2


@holds("A claim is checked before")
def test_a_store_from_a_backup_believes_the_higher_numbers_of_its_workers_and_makes_a_world_of_them() -> None:
    job = Driver(wanted=2)
    job.start(2)
    backup = job.job.durable
    statuses = {
        worker: replace(status, generation=7, promised=7, committed_in=7, step=90)
        for worker, status in job.statuses.items()
    }
    job.job = restore(backup, job.now)
    job.connections, job.statuses = {}, {}
    job.feed(Started())
    for worker, status in statuses.items():
        job.hello(worker, status=status)
    assert job.job.attempt is not None and job.job.attempt.generation == 8
    job.wait(job.job.spec.reconnect_seconds)  # others of their generation may be alive, whom the store does not know
    job.recover()
    job.wait(1)
    assert job.view.phase is Phase.RUNNING and job.view.generation == 8 and job.view.step == 91


# ---- results and checkpoints


@rule(
    "… nobody is believed to be in a world of which it is not a member: a stranger's word would begin a change "
    "that is planned",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.claims",
        "plan.generation != generation or is_member(plan, worker) for",
        "plan.generation != generation or True for",
    ),
    after="A claim is checked before",
)
def test_nobody_is_believed_to_be_in_a_world_of_which_it_is_not_a_member() -> None:
    job = Driver(wanted=2, max_workers=3)
    job.start(2)
    job.hello("stranger")
    job.hello("w9")
    (planned,) = job.job.durable.planned
    others = {"stranger", "w9"} - set(planned.workers)
    assert len(others) == 1, "there is room for one of them"
    (other,) = others
    for generation in (1, planned.generation):
        claim = replace(OLD, sequence=901, generation=generation, promised=generation, step=2, committed_in=generation)
        before = job.job
        for message in (Heartbeat(claim, Telemetry()), Ready(generation, claim)):
            job.say(other, message)
            assert job.job.durable == before.durable
            assert job.job.processes[other].status == before.processes[other].status
        job.hello(other, status=claim)
        assert f"is in generation {generation}, of which it is not a member" in job.messages_to(other)[0].sentence
        job.hello(other, status=NEW)
    assert job.job.durable.current.generation == 1


@rule(
    "… results count only from members, and checkpoints only if they are where the config or `resume` puts them",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.claims",
            "    if is_member(turn.world, worker) or is_member(attempt.plan if attempt is not None else None, "
            "worker):\n",
            "    if True:\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.checkpoints",
            "    if why := claims.false_checkpoint(turn, worker, claimed):\n",
            "    if (why := claims.false_checkpoint(turn, worker, claimed)) and False:\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.claims",
            "or (description.can_checkpoint and not places)",
            "or not places",
            by="test_a_job_that_cannot_save_has_no_checkpoint_whatever_a_worker_says",
        ),
    ],
    after="… nobody is believed to be",
)
def test_only_a_member_says_something_of_the_whole_job() -> None:
    job = Driver(wanted=2)
    job.start(2)
    job.hello("w9")
    job.say("w9", Result(1, fingerprint="b" * 64, loss=1.0))
    assert job.job.durable.fingerprint == ""
    job.say("w9", Result(0, failure="no such file", everyone=True))
    assert job.view.phase is Phase.RUNNING and job.job.durable.roster["w9"].standing is Standing.DEAD


@rule(
    "… and a worker that was in no world and that nobody launched fails for itself alone: a few of them with a "
    "wrong path would end a job that trains",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.failures",
        "        return  # ● it fails for itself alone",
        "        pass  # ● it fails for itself alone",
    ),
    after="… results count only from",
)
def test_workers_that_were_in_no_world_and_that_nobody_launched_fail_for_themselves_alone() -> None:
    job = Driver(wanted=2, max_workers=2)
    job.start(2)
    for number in range(6):
        job.hello(f"stranger-{number}")
        job.say(f"stranger-{number}", Result(90, failure="no such file"))
    assert job.view.phase is Phase.RUNNING and job.job.durable.failures.times == 0
    job.say("w1", Result(2, failure="no such file"))
    assert job.job.durable.failures.times == 1


@holds("… results count only from")
@pytest.mark.parametrize(
    ("path", "resume", "is_one"),
    [
        ("/checkpoints/run/step-1", None, True),
        ("/checkpoints/running/step-1", None, False),
        ("s3://elsewhere/step-1", None, False),
        ("s3://elsewhere/step-1", "s3://elsewhere", True),
        ("s3://elsewhere/step-1", "s3://elsewhere/step-1", True),
        ("/data/old/step-1", "./old", True),
        ("/data/older/step-1", "./old", False),
        ("/data/old/step-1", "file://" + "/data/old", True),
    ],
)
def test_a_checkpoint_is_one_of_the_jobs_only_where_its_config_or_resume_says_that_they_lie(
    path: str, resume: str | None, is_one: bool
) -> None:
    places = ("/checkpoints/run",)
    job = Driver(made_of=replace(MADE_OF, can_checkpoint=True, checkpoint_places=places), resume=resume)
    job.start(2)
    job.beat("w0", checkpoint=CheckpointRef(step=1, generation=1, path=path, bytes=1))
    assert [one.path for one in job.view.checkpoints] == ([path] if is_one else [])
    assert ("expected one in /checkpoints/run" in "".join(job.notes)) is not is_one


@holds("… results count only from")
@pytest.mark.parametrize(
    "reference", [CheckpointRef(1, 10**12, "/checkpoints/x", 1), CheckpointRef(1 << 40, 1, "/checkpoints/x")]
)
def test_a_checkpoint_of_a_step_or_generation_that_cannot_be_is_ignored(reference: CheckpointRef) -> None:
    job = Driver(made_of=replace(MADE_OF, can_checkpoint=True, checkpoint_places=("/checkpoints",)))
    job.start(2)
    job.beat("w0", checkpoint=reference)
    assert not job.view.checkpoints and job.job.durable.last_generation == 1
