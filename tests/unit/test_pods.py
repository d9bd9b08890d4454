"""Workers in pods, as the job machine sees them: they wait to start, cannot start, are told to go, and are spared."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

from machine_driver import MADE_OF, Driver, notes, stored, through_the_store, training
from rule import Edit, holds, rule
from shoal_controller.core.machine.codec import plain, restored
from shoal_controller.core.machine.durable import Leaving, Place, WorkerRecord
from shoal_controller.core.machine.effects import Kill, Spawn
from shoal_controller.core.machine.events import Endangered, Exited, Preempted, Spared, Spawned, Waiting
from shoal_controller.core.machine.pending import Notice, PendingReason
from shoal_controller.core.machine.spec import Phase, State
from shoal_controller.core.machine.stored_form import durable_from, state_of
from shoal_protos.acts import DrainWorker, Scale
from shoal_protos.messages import Drain, Ending, MemberState

NO_ROOM = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
NO_IMAGE = 'Back-off pulling image "registry/train:lost"'
TAINT = "node a has the taint karpenter.sh/disrupted"


def pods(wanted: int = 2, **spec: object) -> Driver:
    return Driver(wanted=wanted, launcher="kubernetes", **spec)


def asked_for(job: Driver, *workers: str) -> None:
    for worker in workers:
        job.feed(Spawned(worker, Place.of_pod(f"job-{worker}", f"uid-{worker}")))


def no_room(worker: str) -> Waiting:
    return Waiting(worker, PendingReason.UNSCHEDULABLE, NO_ROOM)


def no_image(worker: str) -> Waiting:
    return Waiting(worker, PendingReason.IMAGE, NO_IMAGE, hopeless=True)


# ---- waiting to start


@rule(
    "Time in which a pod waits to start counts neither towards `stall_seconds` nor `max_restarts`, over a "
    "controller's restart too",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.starts",
        '    turn.drop("spawned_at", event.worker)  # ●',
        '    turn.drop("probed_at", event.worker)  # ●',
    ),
)
def test_time_in_which_a_pod_waits_to_start_is_nobodys_failure_and_its_time_begins_when_it_has_started() -> None:
    job = pods(wanted=1, stall_seconds=20.0)
    asked_for(job, "w0")
    job.feed(no_room("w0"))
    job.wait(60)
    assert job.job.durable.roster["w0"].serves and job.job.durable.failures.times == 0
    job.feed(Spawned("w0", Place.of_pod("job-w0", "uid-w0", "node-a")))
    job.wait(19)
    assert job.job.durable.roster["w0"].serves
    job.wait(2)
    assert not job.job.durable.roster["w0"].serves


def test_the_clusters_message_is_shown_in_the_worker_and_in_the_jobs_reason_and_counted() -> None:
    job = pods(wanted=3)
    asked_for(job, "w0", "w1", "w2")
    job.feed(no_room("w0"))
    assert notes(job.effects, "pending") == [f"worker w0 cannot start yet: {NO_ROOM}"]
    job.feed(no_room("w1"))
    assert notes(job.effects, "pending") == [], "a thousand pods that wait for one thing are one event"
    job.feed(Waiting("w2", PendingReason.GATED, "held by queue team-a"))
    job.wait(4)
    view = job.view
    assert [worker.why for worker in view.workers] == [NO_ROOM, NO_ROOM, "held by queue team-a"]
    assert view.reason == (
        "0 of 3 workers ready, min_workers is 1, 3 more starting; "
        f"2 workers wait to start for 4 s (and 1 for other reasons): {NO_ROOM}"
    )
    assert view.pending == {PendingReason.UNSCHEDULABLE: 2, PendingReason.GATED: 1}


def test_a_pod_that_has_started_shows_its_node_and_no_longer_waits() -> None:
    job = pods()
    asked_for(job, "w0", "w1")
    job.feed(no_room("w0"))
    job.feed(Spawned("w0", Place.of_pod("job-w0", "uid-w0", "node-a")))
    w0 = job.view.workers[0]
    assert (w0.pod, w0.node, w0.why, w0.state) == ("job-w0", "node-a", "", State.STARTING)
    assert job.view.pending == {}


def test_a_hello_ends_the_wait_whatever_the_cluster_says_afterwards() -> None:
    job = pods()
    asked_for(job, "w0", "w1")
    job.feed(no_room("w0"))
    job.hello("w0")
    job.feed(no_room("w0"))
    assert job.view.pending == {} and job.view.workers[0].why == ""


def test_a_pod_that_waits_is_taken_back_when_the_job_is_scaled_down() -> None:
    job = pods(wanted=2)
    asked_for(job, "w0", "w1")
    job.feed(no_room("w1"))
    job.feed(Scale(1))
    job.tick()
    assert job.killed == ["w1"]
    job.feed(Exited("w1", None, "pod job-w1 was deleted"))
    assert job.view.pending == {} and job.job.durable.failures.times == 0


@holds("Time in which a pod waits")
def test_another_controller_gives_a_pod_its_time_again_until_the_cluster_has_spoken() -> None:
    job = pods(stall_seconds=20.0)
    asked_for(job, "w0", "w1")
    job.feed(no_room("w0"))
    job.restart()
    assert job.view.pending == {}
    for worker in ("w0", "w1"):
        job.feed(no_room(worker))
    job.wait(60)
    assert all(record.serves for record in job.job.durable.roster.values())


# ---- what cannot start


@rule(
    "… what the cluster cannot start however long one waits fails a job that trains nothing after three attempts "
    "in a row, and is tried later and later in one that trains",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.starts", " and turn.world is None and turn.job.attempt is None:", ":"
        ),
        Edit(
            "shoal_controller.core.machine.phases.starts",
            "    if record.join_order >= turn.durable.unstartable_before:  #",
            "    if record.join_order >= 0:  #",
        ),
        Edit(
            "shoal_controller.core.machine.phases.starts",
            "    if turn.durable.unstartable:\n        turn.keep(unstartable=0)\n",
            "",
        ),
    ],
    after="Time in which a pod waits",
)
def test_what_the_cluster_cannot_start_fails_a_job_that_trains_nothing_after_three_attempts() -> None:
    job = pods(wanted=2, max_restarts=0)
    for pair in (("w0", "w1"), ("w2", "w3")):
        asked_for(job, *pair)
        for worker in pair:
            job.feed(no_image(worker))
            assert job.killed == [worker]
        job.wait(9)
    assert not job.job.durable.phase.is_over
    job.feed(no_image("w4"))
    assert job.job.durable.phase is Phase.FAILED
    advice = "check `kubernetes.image` and `kubernetes.imagePullSecrets`"
    assert job.view.reason == f"no worker could be started in 3 attempts; worker w4: {NO_IMAGE}; {advice}"


@holds("… what the cluster cannot start")
def test_one_that_starts_ends_the_count_of_attempts() -> None:
    job = pods(wanted=1)
    for attempt in range(2):
        asked_for(job, f"w{attempt}")
        job.feed(no_image(f"w{attempt}"))
        job.wait(9)
    job.feed(Spawned("w2", Place.of_pod("job-w2", "uid-w2", "node-a")))
    job.exit("w2", None, "its node is gone")
    job.wait(9)
    job.feed(no_image("w3"))
    assert not job.job.durable.phase.is_over


@holds("… what the cluster cannot start")
def test_a_world_that_trains_is_not_failed_by_newcomers_that_cannot_start_and_tries_later_and_later() -> None:
    job = training(2, launcher="kubernetes", max_restarts=0)
    job.feed(Scale(3))
    starts, left = [], job.spawned
    for _ in range(5):
        starts.append(job.now)
        job.feed(no_image(left[0]))
        left = []
        while not left:
            left = [effect.worker for effect in job.wait(0.5) if isinstance(effect, Spawn)]
    assert not job.job.durable.phase.is_over
    pauses = [after - before for before, after in pairwise(starts)]
    assert pauses == [2.0, 4.0, 8.0, 16.0]


# ---- who is told to go


@rule(
    "Several notices that a worker is to go are one drain, with the shortest of their graces; one that comes "
    "after they were taken back counts alone",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.scaling",
            "    if record.spared or at < record.leaves_at:",
            "    if record.spared or at < 0:",
        ),
        Edit(
            "shoal_controller.core.machine.phases.scaling",
            "    if record.spared or at < record.leaves_at:",
            "    if at < record.leaves_at:",
        ),
    ],
)
def test_a_notice_drains_at_once_and_a_second_one_is_the_same_drain_with_the_shorter_grace() -> None:
    job = training(3, launcher="kubernetes")
    job.feed(Preempted("w1", Notice.TAINTED, TAINT, 30.0))
    assert notes(job.effects, "draining") == [f"worker w1 is being drained (grace 30 s): {TAINT}"]
    assert [message for message in job.messages_to("w1") if isinstance(message, Drain)] != []
    assert job.job.durable.roster["w1"].leaves_at == job.now + 30
    job.feed(Preempted("w1", Notice.DELETED, "its pod was deleted", 20.0))
    assert notes(job.effects, "draining") == []
    assert job.job.durable.roster["w1"].leaves_at == job.now + 20
    job.feed(Preempted("w1", Notice.CORDONED, "node a is cordoned", 25.0))
    assert job.job.durable.roster["w1"].leaves_at == job.now + 20
    assert job.counted("shoal_preemptions_total", signal="tainted") == 1
    assert sum(job.counted("shoal_preemptions_total", signal=one) for one in ("deleted", "cordoned")) == 0
    w1 = next(worker for worker in job.view.workers if worker.worker == "w1")
    assert (w1.state, w1.why) == (State.DRAINING, TAINT)


def test_the_last_one_is_not_refused_its_drain() -> None:
    job = training(1, launcher="kubernetes")
    job.feed(Preempted("w0", Notice.DELETED, "its pod was deleted", 30.0))
    assert job.job.durable.roster["w0"].leaving is Leaving.PREEMPTION


@holds("… and a drain whose notice")
def test_a_notice_that_is_taken_back_cancels_the_drain_while_no_world_without_the_worker_is_planned() -> None:
    job = training(3, launcher="kubernetes")
    job.planner_answers = False
    job.feed(Preempted("w1", Notice.TAINTED, TAINT, 30.0))
    assert job.spawned == ["w3"]
    job.feed(Spared("w1", "the taint is gone"))
    assert notes(job.effects, "stays") == ["worker w1 is not drained after all: the taint is gone"]
    assert not job.job.durable.roster["w1"].leaving
    job.tick()
    assert job.killed == ["w3"], "nobody is needed in its place any more"


@holds("… and a drain whose notice")
def test_a_drain_whose_world_is_planned_goes_on_though_its_notice_is_taken_back() -> None:
    job = training(3, mirrors=2, launcher="kubernetes")
    job.feed(Preempted("w1", Notice.TAINTED, TAINT, 30.0))
    assert any("w1" not in plan.workers for plan in job.job.durable.planned)
    job.feed(Spared("w1", "the taint is gone"))
    assert job.job.durable.roster["w1"].leaving is Leaving.PREEMPTION


@holds("Several notices that a worker")
def test_a_notice_that_comes_after_one_was_taken_back_counts_alone() -> None:
    job = training(3, mirrors=2, launcher="kubernetes")
    job.feed(Preempted("w1", Notice.TAINTED, TAINT, 30.0))
    job.feed(Spared("w1", "the taint is gone"))
    job.now += 25
    job.feed(Preempted("w1", Notice.TAINTED, TAINT, 30.0))
    record = job.job.durable.roster["w1"]
    assert (record.leaves_at - job.now, record.leaving_because, record.spared) == (30.0, TAINT, False)


@holds("… and a drain whose notice")
def test_an_operators_drain_is_not_cancelled_by_a_cluster_and_says_why() -> None:
    job = training(3, launcher="kubernetes")
    job.planner_answers = False
    job.feed(DrainWorker("w1", 30.0, "its disk is failing"))
    assert notes(job.effects, "draining") == ["worker w1 is being drained (grace 30 s): its disk is failing"]
    job.feed(Spared("w1", "the taint is gone"))
    assert job.job.durable.roster["w1"].leaving is Leaving.DRAIN


@rule(
    "The last members of a job save within the shortest of their graces",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.running", "        if any(_half_gone(", "        if all(_half_gone("
    ),
)
def test_the_last_ones_save_within_the_shortest_of_their_graces() -> None:
    job = training(2, made_of=replace(MADE_OF, can_checkpoint=True), launcher="kubernetes")
    job.planner_answers = False
    job.feed(Preempted("w0", Notice.TAINTED, TAINT, 60.0))
    job.feed(Preempted("w1", Notice.DELETED, "its pod was deleted", 20.0))
    job.wait(9)
    assert not job.job.durable.final_drain
    job.wait(2)
    assert job.job.durable.final_drain


def test_a_hint_asks_for_a_spare_and_drains_nobody_until_it_is_over() -> None:
    job = training(3, launcher="kubernetes")
    job.feed(Endangered("w1", "its node may be to go"))
    assert job.spawned == ["w3"] and not job.job.durable.roster["w1"].leaving
    job.feed(Endangered("w1", "its node may be to go"))
    assert job.spawned == []
    job.feed(Preempted("w1", Notice.TAINTED, TAINT, 30.0))
    assert job.spawned == [], "the spare takes its place"
    job.feed(Endangered("w2", "its node may be to go"))
    assert job.spawned == ["w4"]
    job.feed(Endangered("w2", ""))
    job.tick()
    assert job.killed == ["w4"], "the youngest is one too many"


def test_no_more_spares_are_asked_for_than_can_train() -> None:
    job = training(3, launcher="kubernetes", max_workers=4)
    for worker in ("w0", "w1", "w2"):
        job.feed(Endangered(worker, "its node may be to go"))
    assert len(job.job.durable.roster) == 4


# ---- who is gone


def test_that_its_node_is_gone_confirms_a_death_while_most_are_silent() -> None:
    job = training(3, mirrors=2, launcher="kubernetes")
    job.connections.clear()
    job.wait(10, beating=False)
    assert job.job.attempt is None, "most are silent: nobody is evicted"
    job.feed(Exited("w0", None, "node a is not there any more"))
    assert job.job.attempt is not None


@rule(
    "An evicted worker's pod is deleted once a world without it has committed a step, and not before: its blocks "
    "may be the only ones",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.scaling",
            "turn.world is None or turn.durable.committed_in < turn.world.generation:",
            "turn.world is None:",
        ),
        Edit("shoal_controller.core.machine.phases.scaling", "    if turn.spec.traits.readmits or ", "    if "),
    ],
)
def test_the_pod_of_an_evicted_worker_is_deleted_once_a_world_without_it_has_committed_a_step() -> None:
    job = training(4, launcher="kubernetes")
    job.connections.pop("w3")
    effects = job.wait(6)
    assert job.job.attempt is not None and not any(isinstance(effect, Kill) for effect in effects)
    for worker, status in list(job.statuses.items()):
        if worker in job.connections:
            job.stop(worker, status)
    plan = job.planned()
    for member in plan.members:
        job.beat(member.worker, state=MemberState.READY, promised=plan.generation)
    assert job.job.durable.current is plan, "it is open, and no step is committed in it"
    assert job.job.durable.roster["w3"].ending is None
    for member in plan.members:
        job.train(member.worker, plan)
    assert job.job.durable.roster["w3"].ending is Ending.REPLACED
    assert [effect for effect in job.wait(61) if isinstance(effect, Kill)] == [Kill("w3")], "and again, if it stays"


@holds("An evicted worker's pod is")
def test_a_frozen_process_of_this_machine_may_thaw() -> None:
    job = training(4, launcher="local")
    job.connections.pop("w3")
    job.wait(6)
    job.recover()
    assert job.job.durable.roster["w3"].ending is None


# ---- what lies in the store


def test_what_an_earlier_version_has_stored_is_read() -> None:
    before = training(2, launcher="local").job.durable
    state = {name: value for name, value in state_of(before).items() if not name.startswith("unstartable")}
    old = {}
    for name, text in stored(before)[1].items():
        value = json.loads(text)
        if name.startswith("workers/"):
            value = {key: part for key, part in value.items() if key not in ("leaving_because", "spared")}
            value["place"] = {"name": "process 7", "pid": 7, "log": "/logs/w0.log"}
        if name == "spec":
            value.pop("kubernetes")
        old[name] = json.dumps(value)
    again = durable_from(state, old)
    assert again.spec == before.spec and again.roster["w0"].place == Place.of_process(7, "/logs/w0.log")
    assert (again.unstartable, again.roster["w0"].leaving_because) == (0, "")


def test_a_pods_place_and_why_it_leaves_come_back_from_the_store() -> None:
    job = training(3, launcher="kubernetes")
    job.feed(Spawned("w1", Place.of_pod("job-w1", "uid-w1", "node-a")))
    job.feed(Preempted("w1", Notice.TAINTED, TAINT, 30.0))
    again = through_the_store(job.job.durable).roster["w1"]
    assert again.place == Place("pod job-w1", pod="job-w1", uid="uid-w1", node="node-a")
    assert (again.leaving, again.leaving_because) == (Leaving.PREEMPTION, TAINT)
    assert restored(WorkerRecord, plain(again)) == again
