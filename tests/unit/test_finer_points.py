"""Who is blamed, named and believed: what the tests of each phase leave out (tests/mutants breaks each of it)."""

from __future__ import annotations

from dataclasses import replace

from machine_driver import MADE_OF, NEW, Driver, cut, notes, training
from rule import Edit, holds, rule
from shoal_controller.core.machine.effects import Send
from shoal_controller.core.machine.events import Disconnected
from shoal_protos.activity import StepPhase
from shoal_protos.acts import DrainWorker
from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.messages import MemberState, Refusal

VOTE, LANES, REDUCTION = StepPhase.VOTE, StepPhase.LANES, StepPhase.REDUCTION


def all_stop(job: Driver) -> None:
    for worker in tuple(job.connections):
        job.stop(worker, job.statuses[worker])


def quarantined(job: Driver) -> list[str]:
    return [record.worker for record in job.job.durable.roster.values() if record.quarantined]


# ---- the progress watch


@rule(
    "… and a chain that ends in user code is a straggler: it is named, and evicted only if its code has made no "
    "progress for `stall_seconds`, and not after it has sent its digests",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "process is None or process.status.done or not record.serves",
            "process is None or not record.serves",
        ),
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "    return max(process.moved_at, _last_vote_at(job))\n",
            "    return _last_vote_at(job)\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            ", named_stragglers=frozenset())",
            ")",
            by="test_a_straggler_is_told_of_each_time_that_it_holds_the_others_up",
        ),
    ],
    after="… and what a worker did while it",
)
def test_a_straggler_is_told_of_each_time_that_it_holds_the_others_up() -> None:
    job = training(workers=2)
    for boundary in (2, 3):
        job.does("w0", boundary, REDUCTION, "w1")
        job.does("w1", boundary, LANES)
        assert len(notes(job.wait(30), "straggler")) == 1
        for worker in job.connections:
            job.beat(worker, step=boundary, boundaries=boundary)
        job.wait(1)


@holds("When no vote passes although")
def test_links_that_are_nearly_as_old_count_too_so_that_who_is_on_most_of_them_goes() -> None:
    job = training(workers=4)
    job.does("w0", 2, VOTE, "w1", "w2")
    job.does("w2", 2, VOTE, "w0")
    job.does("w3", 2, StepPhase.HAND_OUT, "w0")
    job.wait(1)
    job.does("w1", 2, VOTE, "w0")
    while job.job.attempt is None:
        job.wait(0.5)
    all_stop(job)
    assert quarantined(job) == ["w0"]


@holds("When no vote passes although")
def test_nobody_is_judged_while_a_members_stream_is_away() -> None:
    job = training()
    cut(job, "w0", "w1")
    job.wait(9.5)
    job.feed(Disconnected(job.connections.pop("w2"), "cut"))
    assert notes(job.wait(2), "prepare") == []
    job.hello("w2", status=job.statuses["w2"])
    assert job.job.attempt is not None


@holds("… the same applies while")
def test_a_joiner_that_waits_for_its_first_message_in_a_world_that_has_begun_is_one_end_of_a_broken_link() -> None:
    job = training(workers=2)
    job.hello("w2")
    plan = job.job.durable.planned[-1]
    for worker in ("w0", "w1"):
        job.beat(worker, generation=plan.generation, promised=plan.generation, boundaries=1)
    job.builds_a_group("w2", plan.generation, "w0")
    job.does("w0", 2, VOTE, "w2")
    job.does("w1", 2, VOTE, "w2")
    [why] = notes(job.wait(15), "prepare")
    assert "w0 and w2 cannot reach each other" in why or "w2 and w0 cannot reach each other" in why


@holds("… the same applies while")
def test_where_pieces_are_slow_the_building_of_a_group_has_more_time() -> None:
    job = training(workers=4, mirrors=2)
    job.die("w3")
    all_stop(job)
    generation = job.planned().generation
    for worker, peer in (("w0", "w2"), ("w1", "w2"), ("w2", "w0")):
        job.builds_a_group(worker, generation, peer)
    activity, since = job.activities.get("w0", (job.job.processes["w0"].activity, job.now))
    job.activities["w0"] = replace(activity, slowest_piece_seconds=3.0), since
    assert notes(job.wait(28), "prepare") == []
    assert notes(job.wait(5), "prepare")


@holds("When no vote passes although")
def test_of_a_broken_link_whose_one_end_has_died_meanwhile_the_other_stays() -> None:
    job = training(workers=4, mirrors=2)
    cut(job, "w1", "w2")
    while job.job.attempt is None:
        job.wait(0.5)
    job.die("w1")
    all_stop(job)
    assert quarantined(job) == []
    assert [member.worker for member in job.planned().members] == ["w0", "w2", "w3"]


# ---- back-offs, and reports of broken connections


def with_one_quarantined() -> Driver:
    """w1 was evicted for a while, and a world trains without it."""
    job = training()
    cut(job, "w0", "w1")
    while job.job.attempt is None:
        job.wait(0.5)
    job.recover()
    assert quarantined(job) == ["w1"]
    return job


@holds("When the same pair has")
def test_a_back_off_of_an_address_where_nobody_is_any_more_is_forgotten_when_it_is_over_as_long_as_it_lasted() -> None:
    job = with_one_quarantined()
    job.die("w1")
    assert job.job.durable.backoff_counts
    job.wait(15)
    assert job.job.durable.backoff_counts
    job.wait(15)
    assert not job.job.durable.backoff_counts and not job.job.durable.backoff_until


@holds("When the same pair has")
def test_a_clock_that_was_set_back_makes_no_back_off_longer() -> None:
    job = with_one_quarantined()
    job.now -= 1000.0
    job.restart()
    assert all(until <= job.now + 10.0 for until in job.job.durable.backoff_until.values())


@holds("When the same pair has")
def test_who_is_stuck_in_the_world_before_may_blame_one_that_is_not_in_the_new_one() -> None:
    job = training(mirrors=2)
    job.feed(DrainWorker("w1", 30.0))
    plan = job.job.durable.planned[-1]
    assert "w1" not in [member.worker for member in plan.members]
    job.beat("w0", generation=plan.generation, promised=plan.generation)
    assert job.job.durable.current.generation == plan.generation and job.job.attempt is None
    job.beat("w2", broken=("w1",))
    assert job.job.attempt is not None


# ---- what is believed


@holds("A claim is checked before")
def test_a_process_that_is_known_may_not_leap_in_a_later_hello() -> None:
    job = training()
    job.feed(Disconnected(job.connections.pop("w1"), "cut"))
    leaping = replace(job.statuses["w1"], promised=job.job.durable.last_generation + 5)
    effects = job.hello("w1", status=leaping)
    assert [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Refusal)]
    assert job.job.durable.last_generation < leaping.promised


@holds("… results count only from")
def test_a_job_that_cannot_save_has_no_checkpoint_whatever_a_worker_says() -> None:
    job = training()
    job.beat("w0", checkpoint=CheckpointRef(1, 1, "/elsewhere/step-1"))
    assert job.job.durable.checkpoints == ()


@holds("A claim is checked before")
def test_a_step_may_be_as_high_as_a_checkpoint_that_is_known_before_its_world_has_begun() -> None:
    job = Driver(wanted=1, made_of=replace(MADE_OF, can_checkpoint=True))
    beyond = CheckpointRef(3, MADE_OF.max_steps + 50, "/saves/of-a-longer-run")
    job.hello("w0", status=replace(NEW, checkpoint=beyond))
    all_stop(job)
    job.beat("w0", step=beyond.step, state=MemberState.BUILDING, promised=job.planned().generation)
    assert job.job.processes["w0"].status.step == beyond.step
