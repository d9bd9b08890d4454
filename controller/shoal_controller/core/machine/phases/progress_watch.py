"""The progress watch: everybody is heard, and yet no vote passes, or a plan is not built. Who holds the others up?

A connection on which packets are dropped is seen by nobody, so the waits that workers report are examined
(`wait_graph.py`). A broken link breaks the generation at once (`broken_links.py` says who goes); a straggler is named,
and ends only when its code has come no further for `stall_seconds`. Votes without a step count as votes, so a paused
job is judged like any other.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_protos.activity import Activity, StepPhase
from shoal_protos.messages import Ending
from shoal_protos.plan import Plan, WorkerId

from shoal_controller.core.machine.effects import Kill
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.job import Job, Process
from shoal_controller.core.machine.phases import scaling
from shoal_controller.core.machine.phases.next_message import send_if_due
from shoal_controller.core.machine.phases.progress import step_seconds_median
from shoal_controller.core.machine.turn import Turn
from shoal_controller.core.machine.wait_graph import Activities, BrokenLink, broken_links, stragglers

SLOW = 10.0
"""A world may take so many times its median step, and its slowest piece of a message, before it is looked into."""


# ---- in every tick


def update(turn: Turn) -> None:
    """Notice that a vote has passed. While no world may train, none is expected."""
    job, world = turn.job, turn.world
    if world is None or job.attempt is not None:
        return turn.change(last_vote_at=turn.now)
    processes = (job.processes.get(member.worker) for member in world.members)
    voted = max(((p.status.generation, p.status.boundaries) for p in processes if p is not None), default=(0, 0))
    if voted != job.last_vote:
        turn.change(last_vote=voted, last_vote_at=turn.now, named_stragglers=frozenset())
    return None


# ---- the world that may train


def is_standing_still(job: Job, now: float) -> bool:
    """Whether no vote has passed for longer than the limit."""
    quiet = now - _last_vote_at(job)
    return quiet > job.spec.progress_seconds and quiet > limit_seconds(job)


def limit_seconds(job: Job) -> float:
    """Whatever pace workers report, `stall_seconds` are enough."""
    slow_steps = min(SLOW * (step_seconds_median(job) or 0.0), job.spec.stall_seconds)
    return max(slow_steps, building_limit_seconds(job))


def building_limit_seconds(job: Job) -> float:
    """Where no step is under way."""
    slowest = max((process.activity.slowest_piece_seconds for process in job.processes.values()), default=0.0)
    return max(job.spec.progress_seconds, min(SLOW * slowest, job.spec.stall_seconds))


def _last_vote_at(job: Job) -> float:
    return max(job.last_vote_at, job.started_at)


def judge_training(turn: Turn, world: Plan) -> tuple[BrokenLink, ...]:
    """Name stragglers, and end those that are stuck. Returns the broken links that hold the world up."""
    if not is_standing_still(turn.job, turn.now):
        return ()
    update(turn)  # a world may have begun since the last tick
    if not is_standing_still(turn.job, turn.now) or not _all_are_heard(turn.job, world, turn.now):
        return ()
    activities = _activities(turn.job, world)
    links = _links(turn, activities, limit_seconds(turn.job))
    if not links:
        late = stragglers(activities)
        _name_stragglers(turn, late)
        for worker in late:
            _end_if_stuck(turn, worker)
    return links


def _all_are_heard(job: Job, world: Plan, now: float) -> bool:
    """Silence is the failure detector's affair."""
    patience = job.spec.heartbeat_seconds * job.spec.suspect_after
    processes = [job.processes.get(member.worker) for member in world.members]
    return all(p is not None and p.connection is not None and now - p.last_message_at <= patience for p in processes)


def _activities(job: Job, world: Plan) -> Activities:
    """What each member does in the world, or in the one before that it cannot leave. A joiner waits in a group. One
    whose script has ended waits for the other scripts.
    """
    processes = (job.processes.get(member.worker) for member in world.members)
    found = {}
    for process in processes:
        if process is not None and not (process.status.ended and job.durable.last_step is None):
            joiner = not process.status.generation
            does = _build(process, world.generation) if joiner else None
            found[process.worker] = _steady(process, does or process.activity)
    return found


def _building(job: Job, plan: Plan) -> Activities:
    """What those who have come do in the group of a plan. What they do in another one meanwhile says nothing of it."""
    processes = (job.processes.get(member.worker) for member in plan.members)
    does = {p.worker: (p, _build(p, plan.generation)) for p in processes if p is not None}
    return {worker: _steady(process, build) for worker, (process, build) in does.items() if build is not None}


def yet_to_build(job: Job, plan: Plan) -> list[WorkerId]:
    """Members of a planned change that have not said that they have built its group."""
    built = {worker for worker, build in _building(job, plan).items() if build.phase > StepPhase.BUILDING}
    return [member.worker for member in plan.members if member.worker not in built]


def _build(process: Process, generation: int) -> Activity | None:
    if process.activity.generation >= generation:
        return process.activity
    return next((build for build in process.builds if build.generation == generation), None)


def _steady(process: Process, activity: Activity) -> Activity:
    """● What it did while it was not heard does not count: who was frozen has waited for nobody meanwhile."""
    return replace(activity, seconds=min(activity.seconds, max(0.0, process.last_message_at - process.steady_since)))


def _name_stragglers(turn: Turn, late: dict[WorkerId, float]) -> None:
    """Each once for each time that the world stands still."""
    if not turn.job.named_stragglers.issuperset(late):
        turn.change(named_stragglers=turn.job.named_stragglers.union(late))
        turn.note(EventKind.STRAGGLER, _sentence(turn.job, late, turn.now), next(iter(late)))


def reason(job: Job, now: float) -> str:
    """Who holds the world up; empty while votes pass."""
    world = job.durable.current
    looked_into = world is not None and job.attempt is None and is_standing_still(job, now)
    if world is None or not looked_into or not _all_are_heard(job, world, now):
        return ""
    activities = _activities(job, world)
    links = broken_links(activities, job.spec.progress_seconds)
    return "; ".join(link.seen for link in links) or _sentence(job, stragglers(activities), now)


def _sentence(job: Job, late: dict[WorkerId, float], now: float) -> str:
    quiet = now - _last_vote_at(job)
    if not late:
        return f"no vote has passed for {quiet:.0f} s"
    each = ", ".join(f"worker {worker} {_activity_of(job, worker, now)}" for worker in sorted(late))
    return f"no vote has passed for {quiet:.0f} s: waiting for {each}"


def _activity_of(job: Job, worker: WorkerId, now: float) -> str:
    process = job.processes.get(worker)
    if process is None:
        return "(not heard from)"
    if process.status.ended or process.status.done:
        return "(to end its script)"
    return f"(in user code for {now - _last_progress_at(job, process):.0f} s)"


def waited_for_seconds(job: Job, now: float) -> dict[WorkerId, float]:
    """Seconds that others have waited for each worker at the end of their chain; empty while votes pass."""
    world = job.durable.current
    looked_into = world is not None and job.attempt is None and is_standing_still(job, now)
    return stragglers(_activities(job, world)) if world is not None and looked_into else {}


# ---- user code that is stuck


def _last_progress_at(job: Job, process: Process) -> float:
    """When its training thread last moved, as far as this controller has seen."""
    return max(process.moved_at, _last_vote_at(job))


def _end_if_stuck(turn: Turn, worker: WorkerId) -> None:
    """● Code that has come no further for `stall_seconds` ends, until its worker has given its digests."""
    process, record = turn.process(worker), turn.record(worker)
    if process is None or process.status.done or not record.serves:
        return
    still = turn.now - _last_progress_at(turn.job, process)
    if still <= turn.spec.stall_seconds:
        return
    how = Ending.REPLACED if record.launched else Ending.START_OVER
    why = f"worker {worker} is evicted: its script has made no progress for {still:.0f} s (stall_seconds)"
    scaling.dismiss(turn, worker, how, why)
    send_if_due(turn, worker)
    if record.launched:
        turn.do(Kill(worker))  # a thread that is stuck does not end when it is told to


# ---- worlds that are being made


def broken_links_in_building(turn: Turn, plan: Plan, since: float) -> tuple[BrokenLink, ...]:
    """The broken links that keep a plan from being built."""
    if turn.now - since <= turn.spec.progress_seconds:
        return ()
    limit = building_limit_seconds(turn.job)
    if turn.now - since <= limit or not _all_are_heard(turn.job, plan, turn.now):
        return ()
    return _links(turn, _building(turn.job, plan), limit)


def _links(turn: Turn, activities: Activities, limit: float) -> tuple[BrokenLink, ...]:
    """As soon as one is found, all that are nearly as old: who is on most of them does not hang on whose heartbeat came
    first.
    """
    if not broken_links(activities, limit):
        return ()
    return broken_links(activities, max(limit / 2, limit - 2 * turn.spec.heartbeat_seconds))
