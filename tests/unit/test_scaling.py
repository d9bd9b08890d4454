"""How many workers there are: started, replaced with back-off, let go, killed where they do not go."""

from __future__ import annotations

from dataclasses import replace

from machine_driver import MADE_OF, Driver, training
from rule import Edit, holds, rule
from shoal_controller.core.machine.durable import Leaving, Place, Standing
from shoal_controller.core.machine.effects import Kill, Note, Persist, Send
from shoal_controller.core.machine.events import Spawned
from shoal_controller.core.machine.spec import JobSpec, Phase, State
from shoal_controller.elastic_jobs.resource_forms import size_change
from shoal_protos.acts import DrainWorker, Scale
from shoal_protos.messages import (
    NO_CONTROLLER,
    Ending,
    Result,
    Telemetry,
)

OUTAGE = 'Traceback…\n  File "train.py", line 1, in <module>\nConnectionError: no such host'
"""The end of a log of a script that may do better the next time."""


def test_the_launcher_starts_what_is_wanted_and_the_ids_are_stored_first() -> None:
    job = Driver(wanted=3, launcher="local")
    assert job.spawned == ["w0", "w1", "w2"]
    assert isinstance(job.effects[0], Persist)


def test_a_lost_worker_is_replaced_at_once_with_a_new_id() -> None:
    job = Driver(wanted=2, launcher="local")
    job.start(2)
    job.exit("w1")
    assert job.spawned == ["w2"]
    assert job.view.phase is Phase.RESIZING


@holds("All failures within one generation")
def test_workers_that_fail_again_and_again_are_replaced_later_and_later_up_to_half_a_minute() -> None:
    job = Driver(wanted=1, launcher="local", max_restarts=9)
    times = []
    for number in range(8):
        job.exit(f"w{number}", 1, "exit status 1", OUTAGE)
        failed_at = job.now
        while not job.spawned:
            job.wait(0.5)
        times.append(job.now - failed_at)
    assert times == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_after_max_restarts_the_job_fails_with_the_workers_reason_and_log() -> None:
    job = Driver(wanted=1, launcher="local", max_restarts=0)
    job.feed(Spawned("w0", Place.of_process(12, "/logs/w0.log")))
    job.exit("w0", 1, "exit status 1", OUTAGE)
    assert job.view.phase is Phase.FAILED
    assert job.view.reason == (
        "1 attempt has failed without a committed step (max_restarts is 0); "
        f"worker w0 before its first step: exit status 1 (log: /logs/w0.log)\n{OUTAGE}"
    )


def test_a_committed_step_forgives_failures() -> None:
    job = Driver(wanted=2, launcher="local", max_restarts=1)
    job.start(2)
    job.exit("w1", 1, "exit status 1")
    assert job.job.durable.failures.times == 1
    job.recover()
    assert job.job.durable.failures.times == 0


def test_a_worker_killed_by_a_signal_after_it_trained_is_no_failure() -> None:
    job = Driver(wanted=2, launcher="local", max_restarts=0)
    job.start(2)
    job.exit("w1", -9)
    assert job.view.phase is Phase.RESIZING
    assert job.job.durable.failures.script == 0


def test_a_worker_that_found_no_controller_is_replaced_and_no_failure() -> None:
    job = Driver(wanted=1, launcher="local", max_restarts=0)
    job.exit("w0", NO_CONTROLLER)
    assert job.job.durable.failures.times == 0
    assert job.spawned == ["w1"]


def test_a_script_that_ends_without_joining_fails_its_job_at_the_first_one() -> None:
    job = Driver(wanted=2, launcher="local")
    job.exit("w0", 0)
    assert job.view.phase is Phase.FAILED
    assert job.view.reason == (
        "worker w0 cannot run as started: its script ended without calling shoal.initialize, so it never joined the job"
    )


def test_a_default_of_more_workers_than_lanes_is_lowered_and_an_asked_number_refused() -> None:
    one_lane = replace(MADE_OF, lanes=1)
    job = Driver(wanted=3, made_of=one_lane, wanted_by_default=True, launcher="local")
    effects = [*job.hello("w0"), *job.tick()]
    assert job.view.wanted == 1
    assert {record.worker for record in job.job.durable.roster.values() if record.leaving} == {"w1", "w2"}
    assert "the job gets 1 of 3 workers, because its config has 1 lane" in [
        effect.message for effect in effects if isinstance(effect, Note)
    ]
    for asked in ({}, {"wanted_by_default": True, "min_workers": 2}):
        job = Driver(wanted=3, made_of=one_lane, launcher="local", **asked)
        job.hello("w0")
        assert job.view.wanted == 3 and job.welcomed == set()


def test_a_job_without_bounds_of_its_own_has_those_of_its_configs_elasticity() -> None:
    made_of = replace(MADE_OF, min_workers=2, max_workers=3)
    for wanted, gets in ((1, 2), (2, 2), (4, 3)):
        job = Driver(wanted=wanted, made_of=made_of, wanted_by_default=True, launcher="local")
        job.hello("w0")
        assert (job.view.wanted, job.view.min_workers, job.view.max_workers) == (gets, 2, 3)
    job = Driver(wanted=4, made_of=made_of, launcher="local", min_workers=1, max_workers=4)
    job.hello("w0")
    assert (job.view.wanted, job.view.min_workers, job.view.max_workers) == (4, 1, 4), "its own hold"
    for asked, sentence in (
        ({"wanted": 1}, "asks for 1 worker, but its config's `elasticity` is for 2 to 3 workers. Ask for"),
        ({"wanted": 4, "min_workers": 4}, "may have 4 workers or more, and its config's `elasticity` is for 2 to"),
    ):
        job = Driver(made_of=made_of, launcher="local", **asked)
        effects = job.hello("w0")
        assert job.welcomed == set()
        assert any(sentence in one.message.sentence for one in effects if isinstance(one, Send))


def test_a_resource_without_bounds_leaves_its_job_those_of_the_config() -> None:
    job = Driver(wanted=2, made_of=replace(MADE_OF, min_workers=2, max_workers=3))
    job.hello("w0")
    asked = JobSpec("job", wanted=2)
    assert size_change(job.view, asked) is None
    assert size_change(job.view, replace(asked, min_workers=1, max_workers=8)) == Scale(least=1, most=8)


@rule(
    "A process that has not said hello is killed when its job is over, and a launched process that is in no "
    "world exits when its controller stays away",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.ending",
            "    send_all_if_due(turn)\n    _kill_the_unheard(turn)\n",
            "    send_all_if_due(turn)\n",
        ),
        Edit(
            "shoal.session.driver",
            "shared.settings.launcher and in_no_world and seconds",
            "shared.settings.launcher and seconds",
            by="test_who_has_nothing_to_lose_waits_only_so_long_for_a_controller",
        ),
        Edit(
            "shoal.session.driver",
            "shared.dialogue.script_has_ended and seconds > REPORT_SECONDS",
            "False",
            by="test_who_has_nothing_to_lose_waits_only_so_long_for_a_controller",
        ),
    ],
)
def test_a_process_that_has_not_said_hello_is_killed_as_soon_as_its_job_is_over() -> None:
    job = Driver(wanted=2, launcher="local")
    job.start(2)
    job.feed(Scale(3))
    job.feed(Spawned("w2", Place.of_process(14, "/logs/w2.log")))
    job.say("w0", Result(3, failure="lr of group 0 differs", everyone=True))
    assert job.view.phase is Phase.FAILED
    assert [effect for effect in job.effects if isinstance(effect, Kill)] == [Kill("w2")]


def test_a_failure_that_is_the_jobs_fails_it_at_once() -> None:
    job = Driver(wanted=2, launcher="local")
    job.start(2)
    job.say("w0", Result(3, failure="lr of group 0 differs", everyone=True))
    assert job.view.phase is Phase.FAILED
    assert job.view.reason == "worker w0: lr of group 0 differs"
    assert [effect.message.ending for effect in job.of(Send)] == [Ending.FAILED, Ending.FAILED]


def test_a_worker_that_says_it_failed_counts_as_dead() -> None:
    job = Driver(wanted=2)
    job.start(2)
    job.say("w1", Result(3, failure="RuntimeError: in the optimizer"))
    assert job.job.durable.roster["w1"].standing is Standing.DEAD
    assert job.view.phase is Phase.RESIZING


def test_a_process_that_never_says_hello_is_killed_and_replaced() -> None:
    job = Driver(wanted=1, launcher="local", stall_seconds=20)
    assert job.spawned == ["w0"]
    job.wait(21)
    assert job.killed == ["w0"]
    assert job.spawned == ["w1"]


def test_a_process_that_does_not_end_when_it_is_told_is_killed() -> None:
    job = Driver(wanted=2, launcher="local")
    job.start(2)
    job.say("w1", Result(3, failure="RuntimeError: in the optimizer"))
    job.wait(59)
    assert not job.of(Kill)
    job.wait(3)
    assert job.killed == ["w1"]
    job.exit("w1", -9)
    job.wait(70)
    assert job.killed == []


def test_a_change_that_never_begins_goes_on_without_its_joiner() -> None:
    job = Driver(wanted=2, stall_seconds=30)
    job.start(2)
    job.hello("w2")
    job.wait(30)
    assert job.view.workers[2].state is State.READY
    job.wait(1)
    assert "generation 2 did not begin within 30 s (stall_seconds)" in job.notes
    assert [m.worker for m in job.job.durable.planned[-1].members] == ["w0", "w1"]


def test_scaling_down_lets_the_youngest_go() -> None:
    job = Driver(wanted=3, launcher="local")
    job.start(3)
    job.feed(Scale(2))
    assert job.job.durable.roster["w2"].leaving is Leaving.SCALE_DOWN
    assert job.view.workers[2].state is State.DRAINING
    assert not job.spawned


@holds("A size that goes to and fro")
def test_a_size_that_goes_to_and_fro_costs_no_member_and_no_step() -> None:
    job = training(2, launcher="kubernetes")
    before = job.view.generation
    for _ in range(20):
        job.feed(Scale(4))
        job.feed(Scale(2))
        job.tick()
    assert [record.worker for record in job.job.durable.roster.values() if record.serves] == ["w0", "w1"]
    assert (job.view.generation, job.view.phase) == (before, Phase.RUNNING)
    assert sum(resize.lost_steps for resize in job.view.resizes) == 0


def test_a_drain_does_not_change_what_is_wanted() -> None:
    job = Driver(wanted=2, launcher="local")
    job.start(2)
    job.feed(DrainWorker("w0"))
    assert job.spawned == ["w2"]
    assert job.view.wanted == 2


def test_a_join_after_scaling_up_has_that_reason_until_all_are_here() -> None:
    job = Driver(wanted=2)
    job.start(2)
    job.feed(Scale(3))
    job.hello("w2")
    plan = job.job.durable.planned[0]
    assert plan.reason.value == "scale_up"
    for worker in ("w0", "w1", "w2"):
        job.train(worker, plan)
    job.hello("w3")
    assert job.job.durable.planned[-1].reason.value == "join"


def fill_rate(job: Driver) -> int:
    """Blocks per step and source in the newest planned change."""
    return job.job.durable.planned[-1].fill_blocks_per_step


def test_fills_take_about_a_tenth_of_a_step_and_the_number_is_in_the_plan() -> None:
    job = Driver(wanted=2, made_of=replace(MADE_OF, state_bytes=1 << 20))
    job.start(2)
    for worker in ("w0", "w1"):
        job.beat(worker, telemetry=Telemetry(step_seconds=0.4))
    job.hello("w2")
    assert fill_rate(job) == int(0.1 * 0.4 * 250e6) >> 20


def test_a_config_says_how_much_fills_move() -> None:
    job = Driver(wanted=2, made_of=replace(MADE_OF, state_bytes=1000, fill_bytes_per_step=3500))
    job.start(2)
    job.hello("w2")
    assert fill_rate(job) == 3


def test_fills_move_more_when_the_clock_of_a_drain_runs() -> None:
    made_of = replace(MADE_OF, blocks=1024, state_bytes=1 << 20, fill_bytes_per_step=1 << 20, mirrors=0)
    job = Driver(wanted=2, made_of=made_of)
    job.start(2)
    for worker in ("w0", "w1"):
        job.beat(worker, telemetry=Telemetry(step_seconds=1.0))
    job.feed(DrainWorker("w0", 8.0))
    assert fill_rate(job) == 512 // 4, "its half of the blocks in half of its grace"
