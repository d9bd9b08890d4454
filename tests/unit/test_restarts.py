"""What a controller's restart changes, besides numbers: nothing. Each promise and each deadline is held over one."""

from dataclasses import replace

from machine_driver import MADE_OF, Driver
from rule import Edit, holds, rule
from shoal_controller.core.machine.effects import Adopt, Effect, Kill, Note, Spawn
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.events import Exited, NeverStarted, Tick
from shoal_controller.core.machine.figures import series_key
from shoal_controller.core.machine.phases.ending import LINGER_SECONDS as STOP_SECONDS
from shoal_controller.core.machine.phases.scaling import LINGER_SECONDS
from shoal_controller.core.machine.spec import Phase
from shoal_protos.acts import Cancel, DrainWorker, Save
from shoal_protos.checkpoint import CheckpointRef, SaveOutcome, SaveReport
from shoal_protos.messages import Ask, AskKind, Ending, Request, RequestKind, Result, Telemetry
from tiers import check

pytestmark = check("starts processes")

SAVING = replace(MADE_OF, can_checkpoint=True)
LAUNCHED = {"launcher": "local", "command": ("train",)}


def restarted(job: Driver) -> None:
    """Another controller, to which all that were connected come back."""
    statuses = {worker: job.statuses[worker] for worker in job.connections}
    job.restart()
    for worker, status in statuses.items():
        job.hello(worker, status=status)


def asks(job: Driver, worker: str) -> list[Ask]:
    return [message for message in job.messages_to(worker) if isinstance(message, Ask)]


def skipped_events(effects: list[Effect]) -> int:
    return sum(isinstance(one, Note) and one.kind is EventKind.CHECKPOINT_SKIPPED for one in effects)


def training(workers: int = 2, **spec: object) -> Driver:
    job = Driver(wanted=workers, **spec)
    job.start(workers)
    job.wait(1)
    return job


# ---- leaving


@rule(
    "Besides numbers, a controller's restart changes nothing: a drain's grace period goes on",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.scaling",
        "leaves_at=min(record.leaves_at, turn.now + record.grace_seconds))",
        "leaves_at=turn.now + record.grace_seconds)",
    ),
)
def test_a_drains_grace_goes_on() -> None:
    job = training(workers=1, made_of=SAVING)
    job.feed(DrainWorker("w0", 100.0))
    job.wait(30)
    restarted(job)
    job.wait(10)
    assert job.job.durable.roster["w0"].ending is None and not job.job.durable.final_drain
    job.wait(12)
    assert job.job.durable.final_drain, "half of its grace is over"


def test_a_grace_is_no_longer_than_it_was_though_the_clock_was_set_back() -> None:
    job = training(workers=1)
    job.now += 1000
    job.say("w0", Request(RequestKind.DRAIN, 30.0))
    job.now -= 1000
    restarted(job)
    job.wait(20)
    assert job.job.durable.roster["w0"].ending is None
    job.wait(20)
    assert job.job.durable.roster["w0"].ending is Ending.DRAINED


def test_the_last_ones_state_is_saved_though_the_controller_dies_while_no_steps_run_any_more() -> None:
    job = training(workers=1, made_of=SAVING)
    job.feed(DrainWorker("w0", 10.0))
    job.wait(6)
    assert job.job.durable.final_drain
    restarted(job)
    job.wait(1)
    assert job.job.durable.final_drain
    [stands] = [plan for plan in job.job.durable.planned if not plan.steps]
    assert stands.members[0].worker == "w0"


# ---- saves


@rule(
    "… a save that was accepted is made",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.checkpoints",
        "        turn.keep(saves_requested=number, save=replace(turn.durable.save, number=number))\n",
        "        turn.keep(saves_requested=number, save=None)\n",
    ),
    after="Besides numbers, a controller's restart",
)
def test_a_save_that_was_accepted_is_asked_for_again_by_a_number_of_its_own() -> None:
    job = training(made_of=SAVING)
    job.feed(Save())
    [first] = asks(job, "w0")
    restarted(job)
    job.beat("w0")
    job.wait(1)
    assert job.job.durable.save is not None
    effects = job.hello("w0")
    again = [
        effect.message for effect in effects if getattr(effect, "message", None) and isinstance(effect.message, Ask)
    ]
    assert [ask.kind for ask in again] == [AskKind.SAVE] and again[0].number > first.number


def test_only_a_save_of_that_step_or_a_later_one_answers_what_was_asked_for() -> None:
    job = training(made_of=SAVING)
    before = job.statuses["w0"].step
    job.beat("w0", step=before + 5)
    job.beat("w1", step=before + 5)
    job.feed(Save())
    job.beat("w0", checkpoint=CheckpointRef(1, before, "earlier"))
    assert job.job.durable.save is not None
    job.beat("w0", checkpoint=CheckpointRef(1, before + 6, "later"))
    assert job.job.durable.save is None


def test_a_save_that_was_told_is_not_told_or_counted_again_after_a_restart() -> None:
    job = training(made_of=SAVING)
    skipped = SaveReport(1, job.statuses["w0"].step, SaveOutcome.SKIPPED, why="another one is still being written")
    assert skipped_events(job.beat("w0", Telemetry(saves=(skipped,)))) == 1
    restarted(job)
    assert skipped_events(job.beat("w0", Telemetry(saves=(skipped, replace(skipped, number=2))))) == 1
    assert job.job.figures.counters[series_key("shoal_checkpoints_skipped_total", {})] == 2


@holds("… a save that was accepted is made")
def test_a_failure_that_may_have_been_before_the_request_does_not_answer_it_after_a_restart() -> None:
    job = training(made_of=SAVING)
    failed = SaveReport(1, job.statuses["w0"].step, SaveOutcome.FAILED, why="the disk is full")
    job.beat("w0", Telemetry(saves=(failed,)))
    job.feed(Save())
    restarted(job)
    job.beat("w0", Telemetry(saves=(failed,)))
    assert job.job.durable.save is not None
    job.beat("w0", Telemetry(saves=(failed, replace(failed, number=2))))
    assert job.job.durable.save is None


# ---- processes


@rule(
    "… a process that was told to end is killed if it does not, and a job that is being cancelled ends, also "
    "where the clock was set back",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.scaling",
            "ending_since=min(record.ending_since, turn.now)",
            "ending_since=record.ending_since",
            by="test_a_process_that_does_not_end_is_killed_though_the_clock_was_set_back",
        ),
        Edit(
            "shoal_controller.core.machine.turn",
            "ended_at=min(self.durable.ended_at, self.now)",
            "ended_at=self.durable.ended_at",
            by="test_a_job_is_cancelled_though_its_workers_are_silent_and_the_clock_was_set_back",
        ),
        Edit(
            "shoal_controller.core.machine.phases.scaling",
            "        turn.do(Adopt((*(record.worker for record in launched), *turn.durable.ending_since)))\n",
            "        turn.do(Adopt(tuple(unheard)))\n"
            "        for worker in turn.durable.roster:\n"
            "            turn.mark(worker, ending_since=None)\n",
        ),
    ],
    after="… a save that was accepted is made",
)
def test_a_process_that_failed_and_does_not_end_is_killed_by_the_next_controller() -> None:
    job = training(**LAUNCHED)
    job.say("w0", Result(3, failure="boom"))
    job.connections.pop("w0")
    job.restart()
    assert not [effect for effect in job.wait(LINGER_SECONDS - 1, beating=False) if effect == Kill("w0")]
    assert Kill("w0") in job.wait(2, beating=False)


@holds("… a process that was told to end")
def test_a_process_that_does_not_end_is_killed_though_the_clock_was_set_back() -> None:
    job = training(**LAUNCHED)
    job.say("w0", Result(3, failure="boom"))
    job.connections.pop("w0")
    job.now -= 1000.0
    job.restart()
    assert Kill("w0") in job.wait(LINGER_SECONDS + 1, beating=False)


def failed_six_times() -> Driver:
    """Its seventh process is waited for."""
    job = Driver(wanted=1, launcher="local", command=("train",), max_restarts=9)
    for number in range(5):
        job.feed(Exited(f"w{number}", 1, "boom"))
        job.now = max(job.now, job.job.durable.spawn_after)
        job.feed(Tick())
    job.feed(Exited("w5", 1, "boom"))
    return job


@rule(
    "… the back-off after failures goes on",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.scaling",
            "    turn.keep(spawn_after=min(turn.durable.spawn_after, turn.now + LONGEST_BACKOFF))\n",
            "    turn.keep(spawn_after=0.0)\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.scaling",
            "min(turn.durable.spawn_after, turn.now + LONGEST_BACKOFF)",
            "turn.durable.spawn_after",
            by="test_a_clock_that_was_set_back_makes_the_back_off_after_failures_no_longer_than_half_a_minute",
        ),
    ],
    after="… a worker that was about to be",
)
def test_the_back_off_after_failures_goes_on() -> None:
    job = failed_six_times()
    seconds = job.job.durable.spawn_after - job.now
    assert seconds > 4
    job.restart()
    assert Spawn("w6") not in job.wait(seconds - 1)
    assert Spawn("w6") in job.wait(2)


@holds("… the back-off after failures")
def test_a_clock_that_was_set_back_makes_the_back_off_after_failures_no_longer_than_half_a_minute() -> None:
    job = failed_six_times()
    job.now -= 1000.0
    job.restart()
    assert Spawn("w6") in job.wait(31)


@rule(
    "… a worker that was about to be started is started, under its id; one that was already started is found",
    "Not marked in the design, but needed as much",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.scaling",
        "        turn.do(Adopt((*(record.worker for record in launched), *turn.durable.ending_since)))\n",
        "        turn.do(Adopt(tuple(turn.durable.ending_since)))\n",
    ),
    after="… a process that was told to end",
)
def test_whoever_was_being_started_is_asked_about_and_started_if_it_never_was() -> None:
    job = Driver(wanted=2, **LAUNCHED)
    job.hello("w1")
    job.restart()
    assert Adopt(("w0", "w1")) in job.effects
    effects = job.feed(NeverStarted("w0"))
    assert Spawn("w0") in effects and [e.worker for e in effects if isinstance(e, Note)] == ["w0"]


def test_one_that_was_to_end_and_was_never_started_is_not_waited_for() -> None:
    job = Driver(wanted=1, **LAUNCHED)
    job.feed(DrainWorker("w0", 0.0))
    job.feed(Tick())
    assert "w0" in job.job.durable.ending_since
    job.restart()
    assert Spawn("w0") not in job.feed(NeverStarted("w0"))
    assert "w0" not in job.job.durable.ending_since


def test_a_job_that_is_over_asks_for_those_that_have_not_ended() -> None:
    job = training(**LAUNCHED)
    job.feed(Exited("w1", 0, "ended"))
    job.feed(Cancel())
    job.wait(60)
    assert job.job.durable.phase is Phase.CANCELLED
    job.restart()
    assert Adopt(("w0", "w2")) in job.effects
    job.feed(NeverStarted("w2"))
    effects = job.wait(30, beating=False)
    assert Kill("w0") in effects and Kill("w2") not in effects


# ---- the end


def test_workers_have_two_steps_to_stop_in_when_a_job_is_cancelled() -> None:
    job = training()
    for worker in ("w0", "w1"):
        job.beat(worker, Telemetry(step_seconds=20.0))
    job.feed(Cancel())
    for _ in range(70):
        job.now += 0.5
        for worker in ("w0", "w1"):
            job.beat(worker, Telemetry(step_seconds=20.0))
        job.feed(Tick())
    assert job.job.durable.phase is Phase.RUNNING
    job.wait(6)
    assert job.job.durable.phase is Phase.CANCELLED


@holds("… a process that was told to end")
def test_a_job_is_cancelled_though_its_workers_are_silent_and_the_clock_was_set_back() -> None:
    job = training()
    job.now += 1000.0
    job.feed(Cancel())
    job.now -= 1000.0
    job.restart()
    job.wait(STOP_SECONDS + 1, beating=False)
    assert job.job.durable.phase is Phase.CANCELLED


# ---- a clock that was set back


@holds("… a process that was told to end")
def test_a_job_that_ended_in_what_is_now_the_future_ended_by_now_and_is_forgotten_in_time() -> None:
    job = training()
    job.now += 1e8
    job.feed(Cancel())
    job.wait(STOP_SECONDS + 1, beating=False)
    assert job.job.durable.phase is Phase.CANCELLED
    job.now -= 1e8
    job.restart()
    assert job.job.durable.ended_at == job.now


def test_figures_stay_what_they_were_though_the_clock_was_set_back() -> None:
    job = training()
    job.now += 1000.0
    for worker in ("w0", "w1"):
        job.train(worker, job.job.durable.current, steps=3)
    job.wait(1)
    before = job.job.durable.figures
    assert before.training_began is not None and before.last_commit is not None and before.last_commit > job.now - 5
    trained = before.last_commit - before.training_began
    job.now -= 5000.0
    restarted(job)
    after = job.job.durable.figures
    assert after == job.job.figures
    assert after.created <= job.now and after.last_commit == job.now
    assert after.training_began is not None and after.last_commit - after.training_began == trained
