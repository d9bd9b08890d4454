"""What the page and `shoal top` say of a job: its place, its holdings, what a request would do; from a real machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_driver import MADE_OF, Driver, training
from shoal_controller.api.answers import JobAnswer
from shoal_controller.api.page_answers import worlds_of
from shoal_controller.core.machine.events import Disconnected
from shoal_controller.core.machine.machine import step
from shoal_controller.core.machine.spec import JobView, Phase, ResizeView, State, WorkerView
from shoal_controller.core.machine.view import Sample, copies_wanted, missing_copies, sample, view
from shoal_controller.core.overview.amounts import duration, listed, size
from shoal_controller.core.overview.attention import Level, attention, by_attention
from shoal_controller.core.overview.holdings import holdings
from shoal_controller.core.overview.previews import lanes_among, preview
from shoal_controller.core.overview.shown_sentences import activity_sentence, changes_of, last_telling, resize_sentence
from shoal_controller.observe.job_series import JobSeries, Span
from shoal_protos.activity import Activity, StepPhase
from shoal_protos.acts import Cancel, ConfirmLost, DrainWorker, OperatorRequest, Pause, Resume, Scale
from shoal_protos.errors import UserError
from shoal_protos.plan import EVERYONE, Reason, Share
from shoal_protos.runs import Runs, every

IDLE = JobView(
    job="train", phase=Phase.RUNNING, generation=1, wanted=2, active=2, min_workers=1, max_workers=8, lanes=8, step=40,
    max_steps=120, loss=2.5, last_checkpoint_step=None, reason="", step_seconds_median=0.5,
)  # fmt: skip
ACTIVE = WorkerView(
    worker="w0", host="h", pid=7, state=State.ACTIVE, rank=0, lanes=(0,), blocks=1, mirrored_blocks=1, step=1,
    step_seconds=0.1, memory_bytes={}, log="",
)  # fmt: skip
CALM = Sample(1, None, None, None, 0.0, 1, 1)
RESIZE = ResizeView(
    generation=2, workers=2, reason="kill", from_step=6, pause_seconds=0.063, phases={"plan": 0.01}, promoted_blocks=5,
    pause_bytes=0, fill_bytes=0, checkpoint_bytes=0, lost_steps=0,
)  # fmt: skip


def asked(job: Driver, request: OperatorRequest) -> str:
    """The sentence of a preview."""
    before = view(job.job, job.now)
    return preview(request, before, view(step(job.job, [request], job.now)[0], job.now))


# ---- amounts


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1.0, "0 ms"), (0.0634, "63 ms"), (1.5, "1.5 s"), (59.6, "60 s"), (180.0, "3 min"), (7500.0, "2 h 5 min"),
     (7200.0, "2 h"), (400_000.0, "5 d")],
)  # fmt: skip
def test_a_duration_has_the_unit_that_people_would_use(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_and_names_are_short() -> None:
    assert [size(n) for n in (0, 999, 5_600_000, 10**17)] == ["0 B", "999 B", "5.6 MB", "100000.0 TB"]
    names = [f"w{n}" for n in range(9)]
    assert [listed(names[:n]) for n in (0, 1, 2, 3)] == ["", "w0", "w0 and w1", "w0, w1 and w2"]
    assert listed(names) == "w0, w1, w2, w3, w4, w5, w6 and 2 more"


# ---- attention


@pytest.mark.parametrize(
    ("changed", "level", "sentence"),
    [
        ({}, Level.FINE, "trains: step 40 of 120, 40 s left"),
        ({"active": 1}, Level.WATCH, "trains: step 40 of 120, 40 s left, with 1 of 2 workers"),
        (
            {"unmirrored_blocks": 1, "max_steps": None}, Level.WATCH,
            "trains: step 40; 1 block with fewer copies than wanted",
        ),
        ({"phase": Phase.PAUSED, "reason": "paused by an operator"}, Level.WATCH, "paused: paused by an operator"),
        ({"phase": Phase.RESIZING, "reason": "w1 is dead"}, Level.WATCH, "changes its world: w1 is dead"),
        ({"phase": Phase.WAITING, "reason": "1 of 2", "launcher": "local"}, Level.WATCH, "waits: 1 of 2"),
        ({"phase": Phase.WAITING, "reason": "1 of 2", "workers": (ACTIVE,)}, Level.WATCH, "waits: 1 of 2"),
        ({"phase": Phase.WAITING, "reason": "0 of 2"}, Level.ACT, "waits for workers: 0 of 2"),
        ({"phase": Phase.STALLED, "reason": "blocks are lost"}, Level.ACT, "stands still: blocks are lost"),
        ({"phase": Phase.FAILED, "reason": "no\nTrace", "ended_at": 90.0}, Level.ACT, "failed at step 40: no"),
        ({"phase": Phase.FAILED, "reason": "no", "ended_at": -1e6}, Level.OVER, "failed 12 d ago at step 40: no"),
        ({"phase": Phase.FAILED, "reason": "no", "step": 0}, Level.ACT, "failed before its first step: no"),
        ({"phase": Phase.SUCCEEDED, "ended_at": 70.0}, Level.OVER, "succeeded 30 s ago at step 40"),
        ({"max_steps": None, "step_seconds_median": None}, Level.FINE, "trains: step 40"),
    ],
)  # fmt: skip
def test_a_job_stands_where_it_does_for_a_reason(changed: dict[str, object], level: Level, sentence: str) -> None:
    found = attention(replace(IDLE, **changed), 100.0)
    assert (found.level, found.sentence) == (level, sentence)


def test_a_worker_of_which_nothing_is_heard_is_named() -> None:
    late = replace(ACTIVE, state=State.SUSPECTED)
    assert attention(replace(IDLE, workers=(late,)), 0.0).sentence.endswith("; nothing is heard of w0")


@given(st.lists(st.tuples(st.sampled_from(list(Phase)), st.booleans(), st.integers(0, 3)), max_size=12))
def test_every_job_has_a_place_and_levels_come_in_order(jobs: list[tuple[Phase, bool, int]]) -> None:
    views = [
        replace(
            IDLE, job=f"j{n}", phase=phase, reason="why" * why, active=active, ended_at=5.0 if phase.is_over else None
        )
        for n, (phase, why, active) in enumerate(jobs)
    ]
    found = by_attention(views, 10.0)
    levels = [list(Level).index(why.level) for _, why in found]
    assert levels == sorted(levels) and {one.job for one, _ in found} == {one.job for one in views}
    assert by_attention(reversed(views), 10.0) == found


# ---- resizes


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_sentence_with_its_cost(reason: Reason) -> None:
    sentence = resize_sentence(replace(RESIZE, reason=reason.value))
    assert sentence.endswith(": training paused for 63 ms, no step lost, nothing moved in the pause")


def test_a_resize_names_whom_it_took_and_what_it_moved() -> None:
    gone, came = changes_of({"w0": (), "w1": (), "w2": ()}, {"w0": (), "w3": ()})
    assert (gone, came) == (["w1", "w2"], ["w3"]) and changes_of(None, {"w0": ()}) == ([], [])
    moved = replace(RESIZE, pause_bytes=5_600_000, lost_steps=1, checkpoint_bytes=7)
    assert resize_sentence(moved, gone) == (
        "w1 and w2 were lost: training paused for 63 ms, 1 step lost, 5.6 MB moved in the pause, 7 B read from a "
        "checkpoint"
    )
    assert "training did not pause, no step lost" in resize_sentence(replace(RESIZE, pause_seconds=0.0001))
    frozen = resize_sentence(replace(RESIZE, phases={"detect": 2.7, "plan": 0.01}), ["w1"])
    assert frozen.startswith("w1 was lost, noticed after 2.7 s: training paused for 63 ms, ")
    at_once = resize_sentence(replace(RESIZE, phases={"detect": 0.05, "plan": 0.01}), ["w1"])
    assert at_once.startswith("w1 was lost: training paused for 63 ms, ")
    assert resize_sentence(replace(RESIZE, phases={})) == "a worker was lost: what it cost is not known yet"


@pytest.mark.parametrize(
    ("start", "sentence"),
    [
        ({}, "the job began with 2 workers: "),
        ({"from_step": 4}, "the job began with 2 workers, from a checkpoint of step 4: "),
        ({"starts_again": True}, "the job began again with 2 workers, before its first step: "),
        (
            {"starts_again": True, "lost_steps": 3},
            "nobody had the job's state any more: 2 workers began again from step 0: ",
        ),
        (
            {"starts_again": True, "from_step": 4},
            "nobody had the job's state any more: 2 workers went on from the checkpoint of step 4: ",
        ),
    ],
)
def test_only_the_first_start_is_called_the_beginning_of_the_job(start: dict[str, object], sentence: str) -> None:
    assert resize_sentence(replace(RESIZE, reason="start", **{"from_step": 0, **start})).startswith(sentence)


def test_steps_that_are_lost_with_all_workers_are_those_of_the_world_that_begins_again() -> None:
    job = Driver(wanted=1, launcher="local", made_of=replace(MADE_OF, max_steps=1000))
    job.start(1)
    job.beat("w0", step=10, boundaries=10)
    job.wait(2.0)
    job.exit("w0")
    job.wait(5.0)
    job.restart()
    del job.statuses["w0"]
    job.wait(60.0)
    fresh = next(reversed(job.job.durable.roster))
    job.hello(fresh)
    job.recover()
    began, again = job.view.resizes
    assert (began.starts_again, began.lost_steps) == (False, 0)
    assert (again.starts_again, again.lost_steps) == (True, 10)


@pytest.mark.parametrize(
    ("reasons", "telling"),
    [([], None), (["start"], 0), (["start", "kill", "balance", "balance"], 1), (["balance", "balance"], 1)],
)
def test_where_there_is_room_for_one_change_a_balance_does_not_hide_the_one_before(
    reasons: list[str], telling: int | None
) -> None:
    assert last_telling([replace(RESIZE, reason=reason) for reason in reasons]) == telling


def test_a_world_ends_where_the_next_begins_and_the_last_one_with_its_job() -> None:
    worlds = [replace(RESIZE, generation=number, began_at=10.0 * number) for number in (1, 2)]
    for ended in (None, 25.0):
        found = worlds_of(replace(IDLE, resizes=tuple(worlds), ended_at=ended), JobSeries(0.0))
        assert [(world.began, world.ended) for world in found] == [(10.0, 20.0), (20.0, ended)]


# ---- activities


def test_a_worker_says_what_it_does_or_for_whom_it_waits() -> None:
    waits = Activity(3, 5, StepPhase.VOTE, 0, ("w1", "w2"), 2.0)
    assert (
        activity_sentence(replace(ACTIVE, activity=waits, activity_age_seconds=1.0))
        == "votes, waits for w1 and w2 (3.0 s)"
    )
    assert activity_sentence(replace(ACTIVE, activity=Activity(3, 5, StepPhase.LANES))) == (
        "runs the script: forward and backward"
    )
    stays = Activity(3, 5, StepPhase.VOTE, 0, (), 16.0)
    assert activity_sentence(replace(ACTIVE, activity=stays)) == (
        "has voted: updates parameters, or runs the script before its forward (16 s)"
    )
    assert activity_sentence(replace(ACTIVE, state=State.LOST, why="it is dead")) == "it is dead"
    assert "not been heard of" in activity_sentence(ACTIVE)
    assert activity_sentence(replace(ACTIVE, state=State.STARTING)) == "starts: it has not said hello yet"
    welcomed = replace(ACTIVE, state=State.STARTING, member_state="warming_up")
    assert activity_sentence(welcomed) == "warms up", "whether its heartbeats say so or not"
    assert activity_sentence(replace(ACTIVE, state=State.STARTING, activity=Activity())) == "warms up"
    assert activity_sentence(replace(ACTIVE, state=State.READY, activity=Activity())) == (
        "waits to be taken into a generation"
    )


def test_a_member_of_a_paused_job_is_not_said_to_run_the_script() -> None:
    job = training()
    for worker in job.connections:
        job.does(worker, 2, StepPhase.LANES)
    job.wait(0.5)
    assert {activity_sentence(one) for one in job.view.workers} == {"runs the script: forward and backward"}
    world = job.job.durable.current
    assert world is not None
    paused = replace(job.job, durable=replace(job.job.durable, paused=True, current=replace(world, steps=False)))
    assert view(paused, job.now).phase is Phase.PAUSED
    assert {activity_sentence(one) for one in view(paused, job.now).workers} == {"waits: its generation makes no steps"}


def test_every_phase_of_a_step_has_words() -> None:
    assert all(activity_sentence(replace(ACTIVE, activity=Activity(1, 1, phase))) for phase in StepPhase)


# ---- jobs


def test_a_job_is_said_to_be_paused_whatever_phase_it_is_in() -> None:
    job = Driver()
    for request, paused in ((Pause(), True), (Resume(), False)):
        job.feed(request)
        shown = JobAnswer.of(job.view)
        assert (shown.phase, shown.paused) == (Phase.WAITING, paused)


# ---- holdings


def test_in_a_world_of_three_every_block_has_the_copies_that_are_wanted() -> None:
    job = training()
    found = holdings(view(job.job, job.now))
    assert [member.worker for member in found.members] == ["w0", "w1", "w2"]
    assert sorted(lane for member in found.members for lane in member.lanes) == list(range(8))
    assert not found.missing and "every block has 2 copies" in found.sentence


def test_after_a_loss_copies_are_missing_until_they_are_filled() -> None:
    job = training()
    job.die("w2")
    job.recover()
    found = holdings(view(job.job, job.now))
    assert found.missing and f"{len(found.missing)} block" in found.sentence


def test_nobody_holds_anything_before_a_world_is_there() -> None:
    assert holdings(view(Driver().job, 0.0)).members == ()


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7))), min_size=1, max_size=5),
    st.integers(1, 4),
)
def test_missing_copies_are_those_that_a_count_finds(kept: list[tuple[set[int], set[int]]], wanted: int) -> None:
    world = training(1).job.durable.current
    assert world is not None
    shares = tuple(replace(world.shares[0], owned=Runs.of(owned), mirrored=Runs.of(held)) for owned, held in kept)
    world = replace(world, members=world.members * len(kept), shares=shares, blocks=8)
    copies = [sum(block in owned | held for owned, held in kept) for block in range(8)]
    assert missing_copies(world, wanted) == Runs.of(block for block in range(8) if copies[block] < wanted)


@pytest.mark.parametrize("mirrors", [0, 1, 2, 3, EVERYONE])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_world_at_rest_has_all_copies_that_are_wanted_whatever_its_size(workers: int, mirrors: int) -> None:
    shown = training(workers, mirrors=mirrors).view
    series = JobSeries(0.0)
    series.see_world(shown.world, shown.copies_wanted)
    series.record(CALM, 1.0)
    assert shown.copies_wanted == min(mirrors + 1, workers)
    assert (attention(shown, 0.0).level, shown.unmirrored_blocks, len(holdings(shown).missing)) == (Level.FINE, 0, 0)
    assert series.points(Span.HOUR, 0.0, 1.0)["unmirrored_blocks"] == [0]


def test_a_joiner_is_no_place_for_a_copy_before_it_is_filled() -> None:
    durable = training(mirrors=EVERYONE).job.durable
    world = durable.current
    assert world is not None and copies_wanted(durable) == 3
    joined = replace(world, members=(*world.members, world.members[0]), shares=(*world.shares, Share()))
    assert copies_wanted(replace(durable, current=joined)) == 3


def test_a_copy_that_is_missing_is_said_everywhere_though_another_one_is_left() -> None:
    job = training(5, mirrors=2)
    job.die("w4")
    job.recover()
    shown = job.view
    found = holdings(shown)
    assert found.missing and shown.unmirrored_blocks == len(found.missing)
    calm = replace(shown, wanted=shown.active, reason="")
    assert attention(calm, 0.0).sentence.endswith(f"{len(found.missing)} blocks with fewer copies than wanted")
    assert "have fewer copies than wanted" in found.sentence


def test_where_everybody_mirrors_everybody_has_every_block() -> None:
    job = training(mirrors=EVERYONE)
    found = holdings(view(job.job, job.now))
    assert not found.missing and "every worker has every block" in found.sentence


# ---- previews


def test_a_drain_says_to_whom_the_lanes_go_as_the_planner_will_give_them() -> None:
    job = training()
    before = view(job.job, job.now)
    sentence = asked(job, DrainWorker("w2"))
    lanes = next(worker.lanes for worker in before.workers if worker.worker == "w2")
    assert sentence.startswith(f"drain w2: its {len(lanes)} lanes go to ") and "nothing is lost" in sentence
    assert before.world is not None
    expected = lanes_among(before, before.world, ["w0", "w1"])
    job.feed(DrainWorker("w2"))
    while_needed = job.job.durable.planned[-1]
    for member in while_needed.members:
        job.train(member.worker, while_needed)
        job.beat(member.worker, holds=every(job.made_of.blocks))
    job.wait(1.0)
    plan = job.job.durable.planned[-1]
    assert {one.worker: share.lanes for one, share in zip(plan.members, plan.shares, strict=True)} == expected


def test_of_the_lanes_of_a_drained_worker_spares_that_wait_get_none() -> None:
    job = training(6, spares_train=False)
    job.feed(Scale(4, spares=2))
    (plan,) = job.job.durable.planned
    for worker in plan.workers:
        job.train(worker, plan)
    assert asked(job, DrainWorker("w0")) == "drain w0: its 2 lanes go to w1, nothing is lost"
    assert asked(job, DrainWorker("w5")) == "drain w5: it has no lanes, nothing is lost"


def test_spares_that_train_count_where_a_preview_says_what_idles() -> None:
    job = training(6, spares_train=True)
    job.feed(Scale(4, spares=2))
    assert asked(job, Scale(2)).endswith("nothing is lost"), "8 lanes divide among 4"
    assert "; 5 workers for 8 lanes: 2 rounds, 20% of the capacity idles" in asked(job, Scale(3))


def silent(job: Driver, worker: str) -> Driver:
    """Its stream has broken, and nothing more is heard of it."""
    job.feed(Disconnected(job.connections.pop(worker), "reset"))
    return job


def test_a_death_that_is_confirmed_says_what_is_lost_with_it() -> None:
    assert asked(silent(training(), "w1"), ConfirmLost("w1")).endswith(
        "its blocks go on with their mirrors, no step is lost"
    )
    job = training()
    job.feed(DrainWorker("w0", 600.0, "maintenance"))
    assert asked(silent(job, "w1"), ConfirmLost("w1")).endswith("no step is lost"), "w0 has its blocks while it drains"
    alone = asked(silent(training(mirrors=0), "w1"), ConfirmLost("w1"))
    assert "have no other copy: the job starts again from step 0 when workers come" in alone


def test_a_drain_of_a_worker_that_is_evicted_says_that_it_is_given_up_and_what_is_lost_with_it() -> None:
    job = training(mirrors=0, suspect_after=1, reconnect_seconds=1.0)
    silent(job, "w2")
    del job.statuses["w2"]
    job.wait(20.0)
    assert next(worker.state for worker in job.view.workers if worker.worker == "w2") is State.LOST
    sentence = asked(job, DrainWorker("w2"))
    assert sentence.startswith("drain w2: it is silent, and is given up as if it were dead: ")
    assert sentence.endswith("the job starts again from step 0 when workers come") and "nothing is lost" not in sentence


def test_a_resume_promises_steps_only_where_enough_workers_are_there() -> None:
    job = training()
    job.feed(Pause())
    job.wait(5.0)
    assert asked(job, Resume()) == "resume: training goes on from step 1 with the same workers"
    empty = Driver()
    empty.feed(Pause())
    assert asked(empty, Resume()) == "resume: no step runs yet: 0 workers are active, min_workers is 1"
    changing = training()
    changing.feed(Pause())
    changing.die("w2")
    assert (
        asked(changing, Resume()) == "resume: training goes on from step 1, about, once the job is no longer resizing"
    )


def test_a_cancel_speaks_of_one_worker_as_of_one() -> None:
    assert asked(training(1), Cancel()).startswith("cancel: 1 worker ends after its step, at about step 1; ")


def test_what_the_machine_refuses_the_preview_refuses_with_its_sentence() -> None:
    job = training(1)
    for request in (DrainWorker("w9"), Scale(9), ConfirmLost("w0")):
        with pytest.raises(UserError):
            asked(job, request)


def test_a_preview_changes_nothing() -> None:
    job = training()
    before = job.job
    for request in (DrainWorker("w1"), Scale(2), Pause(), Cancel()):
        asked(job, request)
    assert job.job is before


def test_scaling_down_names_who_leaves_and_up_who_may_come() -> None:
    job = training()
    assert asked(job, Scale(2)) == (
        "scale from 3 to 2 workers: w2 leaves once their lanes and blocks are with others, nothing is lost"
    )
    assert asked(job, Scale(5)).startswith("scale from 3 to 5 workers: 2 workers may join")


def test_a_sample_is_what_the_view_says() -> None:
    job = training()
    shown, found = view(job.job, job.now), sample(job.job)
    assert (found.step, found.loss, found.samples, found.active, found.wanted, found.step_seconds) == (
        shown.step, shown.loss, shown.samples, shown.active, shown.wanted, shown.step_seconds_median,
    )  # fmt: skip
    assert found.goodput_ratio == shown.goodput_ratio
