"""What has failed, how often, and when trying again is given up."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from machine_driver import MADE_OF, NEW, Driver
from rule import Edit, holds, rule
from shoal_controller.core.machine.durable import Place
from shoal_controller.core.machine.events import Exited, Spawned
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.overview.attention import attention
from shoal_protos.acts import DrainWorker
from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.messages import NO_CONTROLLER, WRONG_USE, Fault, MemberState, Result
from shoal_protos.runs import every

FAULT = Fault("ValueError", "NaN in the loss", "train.py:31 forward")
MEMORY = replace(FAULT, exception="OutOfMemoryError")
OUTAGE = replace(FAULT, exception="FileNotFoundError", outage=True)


def job_of(wanted: int, **spec: object) -> Driver:
    return Driver(wanted=wanted, launcher="local", command=("x",), **spec)


def start(job: Driver) -> list[str]:
    """The next world: its processes are started, say hello, and are ready."""
    here: list[str] = []
    while not here:
        job.wait(1.0, beating=False)
        here = [r.worker for r in job.job.durable.roster.values() if r.serves and not r.incarnation]
        if job.view.phase.is_over:
            return []
    for worker in here:
        job.hello(worker)
    job.wait(11)
    for worker in here:
        job.stop(worker, job.statuses[worker])
    plan = job.planned()
    for member in plan.members:
        job.beat(member.worker, state=MemberState.READY, promised=plan.generation)
    return here


def live(job: Driver, steps: int) -> list[str]:
    """The next world commits so many steps."""
    here = start(job)
    world = job.job.durable.current
    for worker in here:
        assert world is not None
        job.train(worker, world, steps)
    return here


def raise_in(job: Driver, workers: list[str], step: int, fault: Fault | None) -> None:
    for worker in workers:
        if not job.view.phase.is_over:
            job.say(worker, Result(step, failure="ValueError: NaN in the loss", fault=fault))
    for worker in workers:
        job.exit(worker, 1, "its process ended with status 1")
    job.statuses.clear()


def kill(job: Driver, workers: list[str]) -> None:
    for worker in workers:
        job.exit(worker, -9, "its process was killed by SIGKILL")
    job.statuses.clear()


def lives(job: Driver, steps: int, end: object) -> int:
    """How many worlds there were until the job was given up."""
    for count in range(100):
        workers = live(job, steps)
        if job.view.phase.is_over:
            return count
        end(workers)  # type: ignore[operator]
    return 100


# ---- how often


@rule(
    "Two worlds in which all members fail in the same way at the same step end a job; who fails before it has "
    "built the world of those who are left is a member of it all the same",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.failures",
            "    if world is None or worker not in world.workers:\n",
            "    if world is None or _generation(turn, worker) != world.generation:\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.failures",
            "    elif common_fault and common_fault == failures.common_fault:\n",
            "    elif False:\n",
        ),
    ],
)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("fault", "worlds"), [(None, 4), (OUTAGE, 4), (FAULT, 2)])
def test_a_script_that_always_fails_at_one_step_is_given_up(workers: int, fault: Fault | None, worlds: int) -> None:
    job = job_of(workers)
    assert lives(job, 10, lambda here: raise_in(job, here, 10, fault)) == worlds
    assert job.view.phase is Phase.FAILED
    assert "at step 10: ValueError: NaN in the loss" in job.view.reason


def test_the_reason_says_how_often_it_was_tried_and_how_far_it_came() -> None:
    job = job_of(1)
    lives(job, 10, lambda here: raise_in(job, here, 10, None))
    assert job.view.reason.startswith(
        "4 attempts have failed without a committed step beyond 10 (max_restarts is 3); worker w3 at step 10: "
    )
    job = job_of(1)
    lives(job, 10, lambda here: raise_in(job, here, 10, FAULT))
    assert job.view.reason.startswith(
        "two generations failed in the same way in all their members, so a third would too; "
        "worker w1 at step 10: ValueError: "
    )


def test_the_same_fault_at_another_step_or_not_in_all_members_is_tried_again() -> None:
    job = job_of(2)
    steps = iter((10, 9, 8, 7))
    assert lives(job, 10, lambda here: raise_in(job, here, next(steps), FAULT)) == 4
    job = job_of(2)
    raised = iter(([FAULT, None], [FAULT, None], [None, FAULT], [None, None]))

    def end(here: list[str]) -> None:
        for worker, fault in zip(here, next(raised), strict=True):
            job.say(worker, Result(10, failure="ValueError", fault=fault))
        raise_in(job, here, 10, None)

    assert lives(job, 10, end) == 4


@holds("Two worlds in which all members")
def test_a_member_that_fails_before_it_has_built_the_world_of_those_who_are_left_counts_as_in_it() -> None:
    def end(here: list[str]) -> None:
        first, second = here
        job.say(first, Result(10, failure="ValueError", fault=FAULT))
        job.exit(first, 1, "its process ended with status 1")
        del job.statuses[first]
        job.stop(second, replace(job.statuses[second], holds=every(MADE_OF.blocks)))
        job.beat(second, state=MemberState.READY, promised=job.planned().generation)
        assert [member.worker for member in job.job.durable.current.members] == [second]  # type: ignore[union-attr]
        raise_in(job, [second], 10, FAULT)

    job = job_of(2)
    assert lives(job, 10, end) == 2


def test_a_job_fails_at_the_step_that_its_workers_say_they_have_made_not_at_the_one_that_was_last_shown() -> None:
    job = job_of(1)
    for _ in range(2):
        raise_in(job, live(job, 0), 2, FAULT)
    assert job.view.phase is Phase.FAILED and "at step 2: ValueError" in job.view.reason
    assert job.view.step == job.job.figures.step == 2
    assert attention(job.view, job.now).sentence.startswith("failed at step 2: two generations failed in the same way")
    assert job.counted("shoal_job_lost_steps_total") == 2


@rule(
    "Deaths by an unexplained signal end a job only after ten times `max_restarts`: kills that come faster than "
    "steps are not the script's fault",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.failures", "DEATHS_PER_RESTART = 10\n", "DEATHS_PER_RESTART = 1\n"
    ),
)
def test_workers_that_are_killed_at_the_same_step_again_and_again_are_given_up_after_ten_times_as_many() -> None:
    job = job_of(2)
    assert lives(job, 10, lambda here: kill(job, here)) == 31
    assert job.view.reason.startswith(
        "31 attempts have failed without a committed step beyond 10 (30 deaths by a signal are allowed); worker w60: "
    )


def test_joiners_that_die_of_a_signal_before_any_world_are_given_up_too_with_a_back_off() -> None:
    job = job_of(1)
    died = []
    while not job.view.phase.is_over:
        (worker,) = (r.worker for r in job.job.durable.roster.values() if r.serves)
        job.feed(Spawned(worker, Place.of_process(7, "log")))
        died.append(job.now)
        job.exit(worker, -11, "its process 7 was killed by SIGSEGV")
        while not job.view.phase.is_over and not any(r.serves for r in job.job.durable.roster.values()):
            job.wait(0.5)
    assert len(died) == 31
    assert [later - at for at, later in pairwise(died)][:7] == [0, 1, 2, 4, 8, 16, 30]


@rule(
    "All failures within one generation count once",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.failures",
            "    return _generation(turn, record.worker) > failures.generation or record.join_order >= "
            "failures.join_order\n",
            "    return True\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.failures",
            "min(2.0 ** (failures.times - 2), LONGEST_BACKOFF)",
            "2.0 ** (failures.times - 2)",
            by="test_workers_that_fail_again_and_again_are_replaced_later_and_later_up_to_half_a_minute",
        ),
    ],
)
def test_all_that_fails_in_one_generation_counts_once() -> None:
    job = job_of(4, max_restarts=1)
    raise_in(job, live(job, 10), 10, None)
    assert job.view.phase is not Phase.FAILED
    assert job.job.durable.failures.script == 1


# ---- before the first step

KEY_ERROR = """Traceback (most recent call last):
  File "/project/train.py", line 9, in <module>
    os.environ["LOCAL_RANK"]
    ~~~~~~~~~~^^^^^^^^^^^^^^
KeyError: 'LOCAL_RANK'"""


@rule(
    "A script that fails in the same way in every worker before its first step is not started again, be it before "
    "they join; one that another fault or an outage struck is",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.failures",
            "    return bool(fault) and not any(one.serves or one.fault != fault for one in judged)\n",
            "    return False\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.failures",
            "not any(one.serves or one.fault != fault for one in judged)",
            "not any(one.serves for one in judged)",
        ),
        Edit(
            "shoal_controller.core.machine.phases.failures",
            "    return step == 0 and not turn.durable.committed_in and not known_step(turn)\n",
            "    return False\n",
            by="test_a_script_that_fails_in_all_members_in_its_first_step_is_not_started_again",
        ),
    ],
)
@pytest.mark.parametrize(
    ("tails", "is_given_up"),
    [
        ([KEY_ERROR, f"a line of its own\n{KEY_ERROR}\nand one below"], True),
        (["\n".join(f"[rank{rank}]: {line}" for line in KEY_ERROR.splitlines()) for rank in (0, 1)], True),
        (["train.sh: line 2: python: command not found"] * 2, False),
        ([KEY_ERROR.replace("KeyError", "FileNotFoundError")] * 2, False),
        ([KEY_ERROR.replace("KeyError", "torch.OutOfMemoryError")] * 2, False),
        ([KEY_ERROR, KEY_ERROR.replace("line 9", "line 8")], False),
        ([KEY_ERROR.replace("KeyError", "requests.exceptions.ConnectionError")] * 2, False),
        (["", ""], False),
    ],
)
def test_a_script_that_ends_every_worker_alike_before_it_joins_is_given_up(tails: list[str], is_given_up: bool) -> None:
    job = job_of(2)
    job.exit("w0", 1, "exit status 1", tails[0])
    assert not job.view.phase.is_over and job.spawned == ["w2"], "its fellow may still join"
    job.exit("w1", 1, "exit status 1", tails[1])
    assert (job.view.phase is Phase.FAILED) == is_given_up
    if is_given_up:
        assert job.view.reason.startswith("the script failed in the same way in every worker before its first step")
        assert job.view.reason.endswith(tails[1])


def test_a_worker_that_cannot_join_does_not_end_a_job_of_which_another_one_is_here() -> None:
    job = job_of(2)
    job.hello("w0")
    job.exit("w1", 1, "exit status 1", KEY_ERROR)
    assert not job.view.phase.is_over


@holds("A script that fails in the same way")
@pytest.mark.parametrize(("fault", "worlds"), [(FAULT, 1), (MEMORY, 2), (OUTAGE, 4)])
def test_a_script_that_fails_in_all_members_in_its_first_step_is_not_started_again(fault: Fault, worlds: int) -> None:
    job, tried = job_of(2), 0
    while here := start(job):
        tried += 1
        raise_in(job, here, 0, fault)
    assert (tried, job.view.phase) == (worlds, Phase.FAILED)


@holds("A script that fails in the same way")
def test_a_job_that_has_trained_is_not_ended_by_one_start_that_fails() -> None:
    job = job_of(2)
    kill(job, live(job, 50))
    new: list[str] = []
    while len(new) < 2:
        job.wait(1.0, beating=False)
        new = [one.worker for one in job.job.durable.roster.values() if one.serves and not one.incarnation]
    for worker in new:
        job.exit(worker, 1, "exit status 1", KEY_ERROR)
    assert not job.view.phase.is_over


@holds("A script that fails in the same way")
def test_a_world_of_one_does_not_speak_for_workers_that_warm_up_to_join_it() -> None:
    job = job_of(3, min_workers=1)
    job.hello("w0")
    job.wait(30)
    job.stop("w0", job.statuses["w0"])
    plan = job.planned()
    assert [member.worker for member in plan.members] == ["w0"]
    for name in ("w1", "w2"):
        job.hello(name, status=replace(NEW, state=MemberState.WARMING_UP))
    job.say("w0", Result(0, failure="ValueError: NaN in the loss", fault=FAULT))
    job.exit("w0", 1, "exit status 1")
    assert not job.view.phase.is_over


# ---- what forgives, and what is no failure


@rule(
    "A failure is forgiven only by a committed step above the one at which it happened, never by a fresh start",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.failures", " and status.step > turn.durable.failures.step:\n", ":\n"
    ),
)
def test_only_a_committed_step_above_the_one_of_the_failure_forgives_it() -> None:
    job = job_of(2)
    raise_in(job, live(job, 10), 10, None)
    job.wait(2)
    live(job, 10)
    assert job.job.durable.failures.script == 1, "the steps before were committed in another life"
    for worker in list(job.statuses):
        job.beat(worker, step=11)
    assert job.job.durable.failures.times == 0


def test_a_step_that_was_only_restored_forgives_nothing() -> None:
    job = job_of(1, max_restarts=9, made_of=replace(MADE_OF, can_checkpoint=True))
    workers = live(job, 10)
    job.beat(workers[0], checkpoint=CheckpointRef(1, 40, "/checkpoints/40", 1))
    raise_in(job, workers, 10, None)
    (worker,) = start(job)
    job.beat(worker, generation=2, state=MemberState.TRAINING, step=40, committed_in=0)
    assert job.job.durable.failures.script == 1


def test_a_controllers_restart_forgets_no_failure() -> None:
    job = job_of(1)
    raise_in(job, live(job, 10), 10, FAULT)
    job.restart()
    raise_in(job, live(job, 10), 10, FAULT)
    assert "two generations failed in the same way" in job.view.reason


def test_kills_among_survivors_are_no_failures_of_the_script_however_many_there_are() -> None:
    job = job_of(2, max_restarts=0)
    live(job, 1)
    for _ in range(40):
        victim = sorted(job.connections)[-1]
        job.statuses.pop(victim)
        job.exit(victim, -9)
        job.recover()
        for worker in [r.worker for r in job.job.durable.roster.values() if r.serves and not r.incarnation]:
            job.hello(worker)
        plan = job.job.durable.planned[-1]
        for member in plan.members:
            job.train(member.worker, plan)
    assert job.view.phase is Phase.RUNNING and job.job.durable.failures.times == 0


@pytest.mark.parametrize("code", [-15, -2, NO_CONTROLLER])
def test_a_process_that_was_asked_to_end_counts_nowhere(code: int) -> None:
    job = job_of(1, max_restarts=0)
    job.hello("w0")
    job.exit("w0", code, "asked")
    assert job.job.durable.failures.times == 0 and job.spawned == ["w1"]


def test_a_member_that_was_drained_and_then_killed_counts_nowhere() -> None:
    job = job_of(2)
    live(job, 10)
    job.feed(DrainWorker("w1"))
    job.exit("w1", -9)
    assert job.job.durable.failures.times == 0


def test_an_adopted_worker_of_unknown_exit_status_has_died_and_not_failed() -> None:
    job = job_of(2, max_restarts=0)
    live(job, 10)
    statuses = dict(job.statuses)
    job.restart()
    for worker, status in statuses.items():
        job.hello(worker, status=status)
    job.exit("w1", None, "its exit status is not known")
    assert job.job.durable.failures.script == 0 and job.view.phase is Phase.RESIZING


def test_a_process_that_could_not_be_started_has_failed() -> None:
    job = job_of(1)
    job.exit("w0", None, "it could not be started: no such file")
    assert job.job.durable.failures.script == 1


def test_an_exit_status_that_comes_after_the_end_of_the_stream_turns_a_death_into_a_failure() -> None:
    job = job_of(2)
    live(job, 10)
    job.die("w1")
    assert (job.job.durable.failures.script, job.job.durable.failures.deaths) == (0, 1)
    job.feed(Exited("w1", 1, "its process ended with status 1"))
    assert (job.job.durable.failures.script, job.job.durable.failures.deaths) == (1, 0)


# ---- mistakes


@pytest.mark.parametrize("rank", ["", "[rank0]: "])
def test_a_mistake_that_a_script_tells_at_its_start_fails_the_job_at_once_with_its_sentence(rank: str) -> None:
    job = job_of(2)
    job.feed(Spawned("w0", Place.of_process(12, "/logs/w0.log")))
    tail = f"warming up\n{rank}shoal: optimizer.lr is -1;\n{rank}expected 0 or more\n"
    job.exit("w0", WRONG_USE, "exit status 2", tail)
    assert job.view.phase is Phase.FAILED
    assert job.view.reason == (
        "worker w0 cannot run as started: optimizer.lr is -1;\nexpected 0 or more (log: /logs/w0.log)"
    )


def test_a_script_that_ends_as_for_a_mistake_and_writes_nothing_fails_the_job_with_a_sentence_all_the_same() -> None:
    job = job_of(2)
    job.feed(Spawned("w0", Place.of_process(12, "/logs/w0.log")))
    job.exit("w0", WRONG_USE, "exit status 2", " \n")
    assert job.view.reason.startswith("worker w0 cannot run as started: its script ended with status 2 and wrote noth")


def test_a_replacement_that_cannot_start_does_not_end_a_world_that_trains() -> None:
    job = job_of(2)
    live(job, 10)
    job.statuses.pop("w1")
    job.exit("w1", -9)
    job.exit("w2", WRONG_USE, "exit status 2", "shoal: no such file")
    assert job.view.phase is Phase.RESIZING and job.job.durable.failures.script == 1


def test_a_job_has_failed_where_all_its_scripts_fail_after_the_last_step() -> None:
    job = Driver(wanted=2)
    job.start(2)
    for worker in ("w0", "w1"):
        job.say(worker, Result(100, "cafe", 0.5))
        job.beat(worker, done=True, step=100)
    for worker in ("w0", "w1"):
        job.say(worker, Result(100, failure="ValueError: it is full", fault=Fault("ValueError", worker, "")))
    job.wait(5)
    assert job.view.phase is Phase.FAILED
    assert job.view.reason.endswith("and then every worker has failed; worker w1: ValueError: it is full")
