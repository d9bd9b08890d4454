"""Everybody is heard and no vote passes: who goes, who is only named, and what ends (docs/rules.md)."""

from __future__ import annotations

from dataclasses import replace

from machine_driver import Driver, cut, notes, training
from rule import Edit, holds, rule
from shoal_protos.activity import StepPhase
from shoal_protos.acts import Pause
from shoal_protos.messages import Ending, Prepare, Shutdown, Telemetry

VOTE, LANES, REDUCTION = StepPhase.VOTE, StepPhase.LANES, StepPhase.REDUCTION


@rule(
    "When no vote passes although all members are heard, the world is examined after the limit; two members that "
    "cannot reach each other break it at once, and the one with the most broken links is evicted (in a tie, the "
    "younger)",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "turn.record(worker).join_order), reverse=True)",
            "turn.record(worker).join_order))",
        ),
        Edit(
            "shoal_controller.core.machine.phases.running",
            "    links = progress_watch.judge_training(turn, world) or planned_changes.judge_building(turn, world)\n",
            "    links = planned_changes.judge_building(turn, world)\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "max(limit / 2, limit - 2 * turn.spec.heartbeat_seconds)",
            "limit",
            by="test_links_that_are_nearly_as_old_count_too_so_that_who_is_on_most_of_them_goes",
        ),
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "p is not None and p.connection is not None and now",
            "p is not None and now",
            by="test_nobody_is_judged_while_a_members_stream_is_away",
        ),
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "[link for link in attempt.links if are_recent and all(turn.record(end).serves for end in link.ends)]",
            "list(attempt.links)",
            by="test_of_a_broken_link_whose_one_end_has_died_meanwhile_the_other_stays",
        ),
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "min(SLOW * (step_seconds_median(job) or 0.0), job.spec.stall_seconds)",
            "SLOW * (step_seconds_median(job) or 0.0)",
            by="test_steps_that_are_said_to_take_for_ever_do_not_switch_the_watch_off_either",
        ),
    ],
)
def test_a_pair_that_cannot_reach_each_other_breaks_the_generation_within_five_seconds_of_the_limit() -> None:
    job = training()
    cut(job, "w0", "w1")
    assert notes(job.wait(9.5), "prepare") == []
    [why] = notes(job.wait(5.5), "prepare")
    assert "workers w0 and w1 cannot reach each other" in why or "workers w1 and w0 cannot reach each other" in why
    assert "has waited for" in why and "vote" in why


@holds("When no vote passes although")
def test_of_the_pair_the_younger_goes_and_training_goes_on_without_it() -> None:
    job = training()
    cut(job, "w0", "w1")
    job.wait(12)
    job.recover()
    assert [member.worker for member in job.job.durable.current.members] == ["w0", "w2"]
    assert job.job.durable.roster["w1"].quarantined
    assert job.view.phase.value == "running"


@rule(
    "… and links seen longer ago than `progress_seconds`, because another worker was slow to stop, evict nobody: "
    "they are tried once more",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.progress_watch",
        "    are_recent = turn.now - attempt.links_seen_at <= turn.spec.progress_seconds\n",
        "    are_recent = True\n",
    ),
    after="… only waits older than",
)
def test_a_pair_whose_links_were_seen_long_before_all_had_stopped_is_tried_once_more() -> None:
    job = training()
    cut(job, "w0", "w1")
    job.wait(12)
    job.wait(11)  # for all three to stop
    job.recover()
    assert [member.worker for member in job.job.durable.current.members] == ["w0", "w1", "w2"]
    assert not any(record.quarantined for record in job.job.durable.roster.values())


@holds("When no vote passes although")
def test_the_worker_on_most_broken_links_goes_though_it_is_the_eldest() -> None:
    job = training(workers=4)
    job.does("w0", 2, VOTE, "w1")
    for worker in ("w1", "w2", "w3"):
        job.does(worker, 2, VOTE, "w0")
    job.does("w2", 3, LANES)  # it has all that it needs, and w0 lacks what it sent
    job.does("w0", 2, VOTE, "w1", "w2")
    job.wait(12)
    job.recover()
    assert [member.worker for member in job.job.durable.current.members] == ["w1", "w2", "w3"]


@holds("… only waits older than")
def test_a_step_that_is_slow_as_ever_is_not_looked_into() -> None:
    job = training()
    for worker in job.connections:
        job.beat(worker, telemetry=Telemetry(step_seconds_median=4.0))
    cut(job, "w0", "w1")
    for _ in range(39):
        for worker in job.connections:
            job.beat(worker, telemetry=Telemetry(step_seconds_median=4.0))
        job.now += 1.0
    assert job.job.attempt is None


@holds("… and a chain that ends in user")
def test_a_straggler_is_named_and_never_evicted_by_it() -> None:
    job = training(stall_seconds=600)
    job.does("w0", 2, REDUCTION, "w1")
    job.does("w1", 2, LANES)
    job.does("w2", 2, VOTE, "w0")
    effects = job.wait(300)
    assert notes(effects, "prepare") == [] and notes(effects, "lost") == []
    [message] = notes(effects, "straggler")
    assert "waiting for worker w1 (in user code for " in message
    assert job.view.reason == "no vote has passed for 300 s: waiting for worker w1 (in user code for 300 s)"
    waited = {worker.worker: worker.waited_for_seconds for worker in job.view.workers}
    assert waited["w1"] > 299 and waited["w0"] == waited["w2"] == 0


def test_the_reason_is_empty_again_when_a_vote_has_passed() -> None:
    job = training()
    job.does("w0", 2, REDUCTION, "w1")
    job.does("w2", 2, REDUCTION, "w1")
    job.wait(30)
    assert job.view.reason
    for worker in job.connections:
        job.does(worker, 3, LANES)
        job.beat(worker, step=2, boundaries=2)
    job.wait(1)
    assert job.view.reason == ""


@holds("… and a chain that ends in user")
def test_user_code_that_comes_no_further_ends_after_stall_seconds_and_is_named_before() -> None:
    job = training(stall_seconds=60)
    job.does("w0", 2, REDUCTION, "w1")
    job.does("w2", 2, REDUCTION, "w1")
    job.does("w1", 2, LANES)
    effects = job.wait(59)
    assert notes(effects, "dismissed") == [] and "w1 (in user code" in job.view.reason
    effects = job.wait(3)
    [why] = notes(effects, "dismissed")
    assert "worker w1 is evicted: its script has made no progress for 60 s (stall_seconds)" in why
    assert notes(effects, "prepare")


def test_a_launched_worker_whose_code_is_stuck_is_killed_because_it_would_not_hear_that_it_is_to_end() -> None:
    job = Driver(wanted=3, launcher="local", stall_seconds=60)
    job.start(3)
    for worker in ("w0", "w2"):
        job.does(worker, 2, REDUCTION, "w1")
    job.wait(63)
    assert job.killed == ["w1"] and job.spawned == ["w3"]


@holds("… and a chain that ends in user")
def test_user_code_that_goes_on_micro_batch_by_micro_batch_is_not_stuck() -> None:
    job = training(stall_seconds=60)
    job.does("w0", 2, REDUCTION, "w1")
    job.does("w2", 2, REDUCTION, "w1")
    for part in range(5):
        job.does("w1", 2, LANES)
        activity, since = job.activities["w1"]
        job.activities["w1"] = activity.__class__(activity.generation, 2, LANES, part), since
        effects = job.wait(30)
        assert notes(effects, "dismissed") == []


@holds("… and a chain that ends in user")
def test_after_its_digests_a_worker_is_only_named_however_long_its_script_takes_to_end() -> None:
    job = training(stall_seconds=60)
    job.beat("w1", done=True)
    job.does("w0", 2, VOTE, "w1")
    job.does("w2", 2, VOTE, "w1")
    effects = job.wait(200)
    assert notes(effects, "dismissed") == [] and "w1 (to end its script)" in job.view.reason


def test_a_paused_job_votes_and_is_not_judged_by_its_steps() -> None:
    job = training()
    job.feed(Pause())
    plan = job.job.durable.planned[-1]
    for worker in job.connections:
        job.beat(worker, generation=plan.generation, promised=plan.generation, boundaries=0)
    for vote in range(60):
        for worker in job.connections:
            job.beat(worker, boundaries=vote)
        job.wait(1)
    assert job.view.phase.value == "paused" and job.view.reason == "paused by an operator"


def test_a_silent_member_is_the_failure_detectors_affair() -> None:
    job = training()
    cut(job, "w0", "w1")
    job.wait(6)
    job.connections.pop("w2")
    whys = notes(job.wait(8), "prepare")
    assert whys and all("worker w2 is lost" in why for why in whys)


# ---- while a world is being made


def recovering(job: Driver) -> int:
    """w0, w1, w2 have PLAN and build; returns its generation."""
    job.die("w3")
    for worker, status in list(job.statuses.items()):
        if worker in job.connections:
            job.stop(worker, status)
    return job.planned().generation


@rule(
    "… the same applies while a world is being built, and a planned change is void if its joiner cannot be reached",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.recovery",
            "    links = progress_watch.broken_links_in_building(turn, plan, attempt.planned_at)\n",
            "    links: tuple[BrokenLink, ...] = ()\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "        seconds = back_off(turn, joiners[0])\n",
            "        seconds = 0.0\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "= not process.status.generation",
            "= False",
            by="test_a_joiner_that_waits_for_its_first_message_in_a_world_that_has_begun_is_one_end_of_a_broken_link",
        ),
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "    limit = building_limit_seconds(turn.job)\n",
            "    limit = turn.spec.progress_seconds\n",
            by="test_where_pieces_are_slow_the_building_of_a_group_has_more_time",
        ),
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "    if joiners and not is_backing_off(turn, joiners[0]):\n",
            "    if joiners:\n",
            by="test_a_joiner_is_kept_out_once_while_its_back_off_lasts_though_no_other_plan_can_be_made",
        ),
    ],
    after="… and a chain that ends in user",
)
def test_a_pair_that_cannot_reach_each_other_while_a_world_is_made_anew_is_parted_at_once() -> None:
    job = training(workers=4, mirrors=2)
    generation = recovering(job)
    job.builds_a_group("w0", generation, "w2")
    job.builds_a_group("w1", generation, "w2")
    job.builds_a_group("w2", generation, "w0")
    effects = job.wait(15)
    assert any("w0 and w2 cannot reach each other" in why or "w2 and w0" in why for why in notes(effects, "prepare"))
    for worker, status in list(job.statuses.items()):
        if worker in job.connections:
            job.stop(worker, status)
    assert [member.worker for member in job.planned().members] == ["w0", "w1"]


@rule(
    "… and if neither can be spared the job is stalled, names the pair and tries again",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.progress_watch",
        "for worker in blamed if can_be_spared(worker)), None)",
        "for worker in blamed), None)",
    ),
    after="… the same applies while",
)
def test_where_neither_can_be_spared_the_job_is_stalled_names_the_pair_and_tries_again() -> None:
    job = training(workers=2, stall_seconds=100)
    for worker in job.connections:
        job.beat(worker, holds=job.job.durable.current.shares[int(worker[1])].owned)
    cut(job, "w0", "w1")
    job.wait(12)
    for worker, status in list(job.statuses.items()):
        job.stop(worker, status)
    first = job.planned().generation
    assert job.view.phase.value == "stalled"
    assert job.view.reason.startswith("w0 and w1 cannot reach each other, and both hold blocks that nobody else has")
    job.builds_a_group("w0", first, "w1")
    job.builds_a_group("w1", first, "w0")
    effects = job.wait(12)
    assert notes(effects, "prepare")
    for worker, status in list(job.statuses.items()):
        job.stop(worker, status)
    assert job.planned().generation > first and job.view.phase.value == "stalled"


@holds("… the same applies while")
def test_a_start_goes_on_without_one_of_a_pair_that_cannot_reach_each_other() -> None:
    job = Driver(wanted=3)
    for worker in ("w0", "w1", "w2"):
        job.hello(worker)
    for worker, status in list(job.statuses.items()):
        job.stop(worker, status)
    first = job.planned().generation
    job.builds_a_group("w0", first, "w2")
    job.builds_a_group("w1", first, "w2")
    job.builds_a_group("w2", first, "w0")
    job.wait(12)
    for worker in ("w0", "w1"):
        job.stop(worker, job.statuses[worker])
    assert [member.worker for member in job.planned().members] == ["w0", "w1"]


# ---- planned changes


@holds("… the same applies while")
def test_a_planned_change_whose_joiner_cannot_be_reached_is_void_and_the_joiner_backs_off() -> None:
    job = training(workers=2)
    job.hello("w2")
    plan = job.job.durable.planned[-1]
    assert [member.worker for member in plan.members] == ["w0", "w1", "w2"]
    job.builds_a_group("w0", plan.generation, "w2")
    job.builds_a_group("w1", plan.generation, "w2")
    job.builds_a_group("w2", plan.generation, "w0")
    messages = []
    for step in range(2, 32):
        for worker in ("w0", "w1"):
            job.beat(worker, step=step, boundaries=step)
        messages += notes(job.wait(0.5), "kept_out")
    assert len(messages) == 1 and "w2 may join again in 10 s" in messages[0]
    assert [member.worker for member in job.job.durable.planned[-1].members] == ["w0", "w1"]
    assert job.job.attempt is None, "nobody else is disturbed"


@holds("… the same applies while")
def test_a_joiner_is_kept_out_once_while_its_back_off_lasts_though_no_other_plan_can_be_made() -> None:
    """Two changes wait for a vote that takes long: as many as there may be."""
    job = training(workers=2)
    job.feed(Pause())
    job.hello("w2")
    first, second = job.job.durable.planned
    assert (len(first.members), len(second.members)) == (2, 3)
    for worker, peer in (("w0", "w2"), ("w1", "w2"), ("w2", "w0")):
        job.builds_a_group(worker, second.generation, peer)
    messages = notes(job.wait(19), "kept_out")
    assert len(messages) == 1 and "w2 may join again in 10 s" in messages[0]


def test_a_joiner_that_again_cannot_be_reached_backs_off_for_twice_as_long() -> None:
    job = training(workers=2)
    job.hello("w2")
    messages: list[str] = []
    for vote in range(200):
        plan = job.job.durable.planned[-1] if job.job.durable.planned else None
        if plan is not None and len(plan.members) == 2:
            for worker in ("w0", "w1"):
                job.beat(worker, generation=plan.generation, promised=plan.generation, boundaries=0)
        elif plan is not None and plan.generation not in {build.generation for build, _ in job.builds.get("w2", ())}:
            for worker, peer in (("w0", "w2"), ("w1", "w2"), ("w2", "w0")):
                job.builds_a_group(worker, plan.generation, peer)
        for worker in ("w0", "w1"):
            job.beat(worker, boundaries=vote)
        messages += notes(job.wait(0.5), "kept_out")
    assert [message.rpartition("; ")[2] for message in messages] == [
        f"w2 may join again in {seconds} s" for seconds in (10, 20, 40)
    ]


def test_ended_workers_are_told_so() -> None:
    job = training(stall_seconds=20)
    for worker in ("w0", "w2"):
        job.does(worker, 2, REDUCTION, "w1")
    effects = job.wait(30)
    sent = [effect.message for effect in effects if hasattr(effect, "message") and isinstance(effect.message, Shutdown)]
    assert [message.ending for message in sent][:1] == [Ending.START_OVER]
    assert any(isinstance(getattr(effect, "message", None), Prepare) for effect in effects)


@rule(
    "… and what a worker did while it was not heard does not count, because it may have been frozen",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.worker_messages",
        "    steady_since = turn.now if gap else known.steady_since\n",
        "    steady_since = known.steady_since\n",
    ),
    after="… and links seen longer ago",
)
def test_what_a_worker_did_while_it_was_not_heard_does_not_count_because_it_may_have_been_frozen() -> None:
    job = training()
    cut(job, "w0", "w1")
    job.wait(2)
    beating, job.connections = job.connections, {}
    assert notes(job.wait(10, beating=False), "prepare") == []
    job.connections = beating
    assert notes(job.wait(9.5), "prepare") == [], "what they tell is old, but nobody knows whether they ran"
    assert notes(job.wait(4), "prepare")


@holds("… the same applies while")
def test_who_builds_a_planned_group_beside_a_slow_step_is_not_blamed_for_those_who_wait_for_the_step() -> None:
    """w0 has voted and hears of no other plan until the vote is over; w1, which it waits for, builds one meanwhile."""
    job = training(workers=2)
    job.hello("w2")
    plan = job.job.durable.planned[-1]
    job.does("w0", 2, VOTE, "w1")
    job.does("w1", 2, LANES)
    job.builds_a_group("w1", plan.generation, "w0")
    job.builds_a_group("w2", plan.generation, "w0")
    effects = job.wait(60)
    assert notes(effects, "prepare") == [] and notes(effects, "kept_out") == []
    assert "waiting for worker w1 (in user code" in job.view.reason


def test_a_world_that_has_just_begun_has_its_time_anew() -> None:
    """It began between two ticks."""
    job = training()
    cut(job, "w0", "w1")
    while job.job.attempt is None:
        job.wait(0.5)
    job.recover()
    assert not job.job.named_stragglers and not job.view.reason


def test_no_worker_switches_the_watch_off_by_what_it_tells_of_its_pace() -> None:
    job = training(stall_seconds=40)
    cut(job, "w0", "w1")
    activity, since = job.activities["w2"]
    job.activities["w2"] = replace(activity, slowest_piece_seconds=1e300), since
    assert notes(job.wait(39), "prepare") == []
    [why] = notes(job.wait(5), "prepare")
    assert "cannot reach each other" in why


@holds("When no vote passes although")
def test_steps_that_are_said_to_take_for_ever_do_not_switch_the_watch_off_either() -> None:
    job, messages = training(stall_seconds=40), []
    cut(job, "w0", "w1")
    for _ in range(44):
        job.now += 1.0
        for worker in job.connections:
            messages += notes(job.beat(worker, telemetry=Telemetry(step_seconds_median=1e300)), "prepare")
        messages += notes(job.tick(), "prepare")
    [why] = messages
    assert "cannot reach each other" in why


def test_a_pair_that_cannot_be_parted_ends_after_stall_seconds() -> None:
    job = training(workers=2, stall_seconds=30)
    for worker in job.connections:
        job.beat(worker, holds=job.job.durable.current.shares[int(worker[1])].owned)
    cut(job, "w0", "w1")
    for _ in range(6):
        job.wait(12)
        if job.job.durable.anew:
            break
        for worker, status in list(job.statuses.items()):
            job.stop(worker, status)
        if job.job.attempt is not None and job.job.attempt.plan is not None:
            for worker, peer in (("w0", "w1"), ("w1", "w0")):
                job.builds_a_group(worker, job.planned().generation, peer)
    assert job.job.durable.anew is not None and "no living copy of" in job.job.durable.anew.why
