"""Whom a broken connection or a silence costs its place: the finer points, straight from the machine's functions.

What a whole job makes of it is told by the simulation's scenarios (`link_fault`, `controller_cut_off`).
"""

from dataclasses import replace

import pytest
from rule import Edit, holds, rule
from shoal_controller.core.machine.durable import Durable, Standing, WorkerRecord
from shoal_controller.core.machine.events import Connected, Exited, Tick
from shoal_controller.core.machine.job import Attempt, Job
from shoal_controller.core.machine.machine import new_job, step
from shoal_controller.core.machine.phases import progress_watch
from shoal_controller.core.machine.spec import JobSpec, Phase
from shoal_controller.core.machine.turn import Turn
from shoal_protos.description import Description
from shoal_protos.messages import PROTOCOL_VERSION, Hello, MemberState, Status
from shoal_protos.plan import Reason
from worlds import BLOCKS, recovery, share_of

MADE_OF = Description(3, BLOCKS, 4096, 8, 1, 0, 100, (), "SGD", {}, {}, False, False)
IN_A_WORLD = Status(sequence=1, generation=1, state=MemberState.TRAINING, promised=1, step=3, committed_in=1)


def job_of_three() -> Job:
    """a, b, c: the oldest first; they train in generation 1."""
    roster = {
        worker: WorkerRecord(worker, order, launched=True, incarnation=f"{worker}.1", address=f"{worker}:1")
        for order, worker in enumerate("abc")
    }
    spec = JobSpec("job", 3, launcher="local")
    durable = Durable(spec, 3, MADE_OF, Phase.RUNNING, last_generation=1, current=recovery(1, "abc"), roster=roster)
    return Job(durable, started_at=0.0)


def broken(job: Job, *reports: tuple[str, str], now: float = 0.0) -> Job:
    """A generation that broke because of these reports, with nobody lost."""
    turn = Turn(job, now)
    progress_watch.judge_reports(turn, Attempt(2, Reason.KILL, "", now, now, reports=reports))
    return turn.job


def evicted(job: Job) -> list[str]:
    return [record.worker for record in job.durable.roster.values() if record.quarantined]


@rule(
    "When the same pair has broken two generations, the one named most often is evicted, in a tie the younger; "
    "its back-off doubles each time",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "        if fault.times >= PATIENCE:\n",
            "        if fault.times > PATIENCE:\n",
        ),
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "(fault.blame_counts.get(worker, 0), roster[worker].join_order)",
            "(fault.blame_counts.get(worker, 0), -roster[worker].join_order)",
        ),
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "    if not durable.backoff_counts:\n        return\n",
            "    return\n",
            by="test_a_back_off_of_an_address_where_nobody_is_any_more_is_forgotten_when_it_is_over_as_long_as_it_lasted",
        ),
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "min(at, turn.now + _backoff_seconds(times[address]))",
            "at",
            by="test_a_clock_that_was_set_back_makes_no_back_off_longer",
        ),
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "if behind or is_member(plan, peer)",
            "if is_member(plan, peer)",
            by="test_who_is_stuck_in_the_world_before_may_blame_one_that_is_not_in_the_new_one",
        ),
        Edit(
            "shoal_controller.core.machine.phases.progress_watch",
            "min(FIRST_BACKOFF * 2.0 ** (times - 1), LONGEST_BACKOFF)",
            "FIRST_BACKOFF * 2.0 ** (times - 1)",
            by="test_the_back_off_of_a_worker_that_is_evicted_again_doubles_up_to_an_hour",
        ),
    ],
)
@pytest.mark.parametrize(
    ("reports", "blamed"),
    [
        ([("a", "b"), ("b", "a")], "b"),  # a tie: the younger
        ([("b", "a")], "a"),  # named more often
        ([("a", "b")], "b"),
    ],
)
def test_of_a_pair_that_broke_two_generations_the_one_named_most_goes_and_at_a_tie_the_younger(reports, blamed):
    once = broken(job_of_three(), *reports)
    assert evicted(once) == []
    assert evicted(broken(once, *reports)) == [blamed]


def test_two_generations_broken_by_different_pairs_count_nobody_out():
    assert evicted(broken(broken(job_of_three(), ("a", "b")), ("a", "c"))) == []


@rule(
    "… and a generation in which somebody was lost blames nobody",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.progress_watch",
        "        return  # someone was lost: an abort breaks its peers' connections too\n",
        "        assert True\n",
    ),
    after="When the same pair has",
)
def test_a_generation_in_which_someone_was_lost_blames_nobody():
    job = job_of_three()
    roster = {**job.durable.roster, "c": replace(job.durable.roster["c"], standing=Standing.DEAD)}
    job = replace(job, durable=replace(job.durable, roster=roster))
    assert evicted(broken(broken(job, ("a", "b")), ("a", "b"))) == []


@holds("When the same pair has")
def test_the_back_off_of_a_worker_that_is_evicted_again_doubles_up_to_an_hour():
    job, waits, now = job_of_three(), [], 0.0
    for _ in range(11):
        job = broken(broken(job, ("a", "b"), now=now), ("a", "b"), now=now)
        waits.append(job.durable.backoff_until["b:1"] - now)
        now += waits[-1] + 1.0
        assert not progress_watch.is_backing_off(Turn(job, now), "b")
    assert waits == [10.0 * 2**times for times in range(9)] + [3600.0] * 2


@rule(
    "… unless the launcher confirms the death",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.failure_detector",
        "    if _has_died(record, event.code):\n",
        "    if _has_died(record, event.code) and silence.is_cut_off(turn.job):\n"
        "        return None\n"
        "    if _has_died(record, event.code):\n",
    ),
    after="Within `reconnect_seconds` of a controller's",
)
def test_a_death_that_the_launcher_confirms_counts_though_everybody_is_silent():
    job, now = new_job(JobSpec("job", 3, launcher="local"), 0.0), 0.0
    job = replace(job, durable=job_of_three().durable)
    for number, worker in enumerate("abc"):
        status = replace(IN_A_WORLD, holds=share_of(recovery(1, "abc"), worker))
        address = f"{worker}:1"
        hello = Hello(PROTOCOL_VERSION, "job", worker, f"{worker}.1", address, "host", 1, "", MADE_OF, status)
        job, _ = step(job, [Connected(number, hello)], now)
    for now in range(1, 60):  # the controller is cut off: it hears of nobody
        job, _ = step(job, [Tick()], float(now))
    standings = [record.standing for record in job.durable.roster.values()]
    assert standings == [Standing.HERE] * 3 and job.attempt is None
    job, _ = step(job, [Exited("b", -9, "killed by signal 9")], 60.0)
    assert job.durable.roster["b"].standing is Standing.DEAD
    assert job.attempt is not None and "worker b is lost" in job.attempt.why
