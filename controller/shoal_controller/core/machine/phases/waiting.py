"""No world yet: waiting for enough workers to begin with, and how rarely a job that waits needs a tick. Pure.

A thousand jobs may wait for days, for room in a cluster or for workers that come by themselves. All that happens to one
is an event and is handled at once; `rests_until` says when time alone brings something. Which jobs may be ticked less
often while a world trains: `Job.is_calm`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from shoal_protos.messages import Ending, MemberState
from shoal_protos.plan import WorkerId
from shoal_protos.text import plural

from shoal_controller.core.machine.durable import Durable, Standing, WorkerRecord
from shoal_controller.core.machine.job import Job, Process
from shoal_controller.core.machine.phases import lost_blocks, planned_changes, progress_watch, recovery, scaling
from shoal_controller.core.machine.phases.next_message import send_if_due
from shoal_controller.core.machine.phases.scaling import LINGER_SECONDS
from shoal_controller.core.machine.phases.silence import introduced, is_deserted
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.turn import Turn
from shoal_controller.core.planning.seats import with_room

PATIENCE_SECONDS = 10.0
"""How long a job waits for all wanted workers once the first is ready; then `min` are enough."""
SHORT_PATIENCE_SECONDS = 2.0
"""The same, where it has had a world and nobody is known to be on the way: who comes later joins without a pause."""
REST_SECONDS = 2.0
"""Between the ticks of a job without workers, where nothing is due earlier."""
CALM_TICKS = 0.25
"""Heartbeat intervals between the ticks of a job whose workers are all heard: a tick goes through all of them."""


def settle(turn: Turn) -> None:
    """A world begins when `wanted` workers are ready, or `min` are and the patience with the others is over."""
    scaling.release_leaving(turn)
    _dismiss_the_left_behind(turn)
    ready = ready_to_start(turn)
    if turn.durable.anew is not None:
        lost_blocks.give_up_waiting(turn, turn.durable.anew, len(ready))
    if turn.durable.phase.is_over:
        return None
    if not ready:
        return turn.change(ready_since=None) if turn.job.ready_since is not None else None
    since = turn.job.ready_since
    if since is None:
        since = turn.now
        turn.change(ready_since=since)
    waited = turn.now - since
    each = planned_changes.most_of_each(turn)
    chosen = with_room(turn.durable.cell, planned_changes.seated(turn, ready), (), each)
    all_here = len(ready) >= turn.durable.wanted
    if (all_here or waited >= _patience(turn, ready)) and turn.durable.are_enough(chosen):
        recovery.start(turn, chosen, f"{plural(len(chosen), 'worker')} ready")
    return None


def _patience(turn: Turn, ready: Collection[WorkerId]) -> float:
    """Seconds since the first was ready."""
    is_coming = any(record.serves and worker not in ready for worker, record in turn.durable.roster.items())
    return PATIENCE_SECONDS if is_coming or not turn.durable.last_generation else SHORT_PATIENCE_SECONDS


def _dismiss_the_left_behind(turn: Turn) -> None:
    """A worker that comes back to a job that waits, from a world that lost all its other members before the first step,
    begins again: no world starts with a worker that is in another one, and it would be waited for for ever.
    """
    for process in turn.serving():
        generation = process.status.generation
        if turn.world is None and generation in turn.durable.opened_generations:
            how = Ending.REPLACED if turn.record(process.worker).launched else Ending.START_OVER
            why = f"worker {process.worker} is in generation {generation}, of which nobody else was left"
            scaling.dismiss(turn, process.worker, how, why)
            send_if_due(turn, process.worker)


def ready_to_start(turn: Turn) -> list[WorkerId]:
    """Workers that are warmed up and are in no world, oldest first."""
    roster = turn.durable.roster
    ready = [
        process.worker
        for process in turn.serving()
        if is_ready(turn.job, process)
        and not roster[process.worker].leaving
        and not progress_watch.is_backing_off(turn, process.worker)
    ]
    return sorted(ready, key=lambda worker: roster[worker].join_order)


def is_ready(job: Job, process: Process) -> bool:
    """Warmed up, connected, and nothing of a world that still counts."""
    fresh = process.status.generation == 0 and process.status.state is not MemberState.WARMING_UP
    return fresh and process.connection is not None and process.worker in job.durable.roster


def sentence(job: Job, now: float) -> str:
    """What a job without a world waits for."""
    durable = job.durable
    serving = [process for process in job.processes.values() if durable.roster[process.worker].serves]
    ready = sum(is_ready(job, process) for process in serving)
    coming = sum(record.serves for record in durable.roster.values()) - ready
    since = f"; waiting for {now - job.ready_since:.0f} s" if job.ready_since is not None else ""
    short = f", min_workers is {durable.bounds.least}" if ready < durable.bounds.least else ""
    absent = durable.absent(process.worker for process in serving if is_ready(job, process)) if ready else ""
    short = f"{short}, {absent} has no member" if absent else short
    paused = "paused by an operator; " if durable.paused else ""
    found = f"{paused}{ready} of {durable.wanted} workers ready{short}, {coming} more starting{since}{trouble(durable)}"
    found = f"{found}{_lost(durable)}{how_to_start(durable)}" if short and not coming else found
    found = f"{found}{_anew(job, now)}"
    skipped = [process.telemetry.skipped_folders for process in serving if not is_ready(job, process)]
    why = next((one for one in skipped if one), "")
    return f"{found}; {why.rstrip('.')}" if why else found


def trouble(durable: Durable) -> str:
    """Why workers that came are not there: the last refusal and the last failure, as the end of a sentence."""
    failed = [record for record in durable.roster.values() if record.ending is Ending.FAILED]
    newest = max(failed, key=lambda record: record.join_order, default=None)
    sentences = [f"; the last worker to join was refused: {durable.last_refusal}"] if durable.last_refusal else []
    sentences += [f"; worker {newest.worker} failed: {newest.why.strip()}"] if newest is not None else []
    return "".join(sentences)


def _anew(job: Job, now: float) -> str:
    """Why a job begins anew, and how long it waits, as the end of a sentence."""
    anew = job.durable.anew
    if anew is None:
        return ""
    left = max(0.0, job.spec.stall_seconds - (now - max(anew.since, job.started_at)))
    return f"; the job begins anew, for up to {left:.0f} s more: {anew.why}"


def _lost(durable: Durable) -> str:
    """Of which worker it is known last that it is dead."""
    dead = [
        record
        for record in durable.roster.values()
        if record.standing is Standing.DEAD and record.ending is not Ending.FAILED and record.why
    ]
    newest = max(dead, key=lambda record: record.join_order, default=None)
    return f"; worker {newest.worker} is lost: {newest.why.strip()}" if newest is not None else ""


def how_to_start(durable: Durable) -> str:
    """The command that starts more workers where only people start any, as the end of a sentence."""
    if durable.spec.traits.starts:
        return ""
    command = f"shoal worker --controller HOST:PORT --job {durable.spec.job} -- COMMAND"
    return f'; launcher is none: start workers with "{command}"'


# ---- until when time brings nothing


def rests_until(job: Job) -> float:
    """The time of the next tick that a job without a world needs; 0: the next one that there is."""
    last, durable = job.ticked_at, job.durable
    if last is None or durable.phase is not Phase.WAITING or durable.stopping or durable.planned:
        return 0.0
    if job.attempt is not None or job.greeting or job.planner.asked_at is not None or job.planner.failures:
        return 0.0
    if is_deserted(durable):
        pause = REST_SECONDS
    elif all(_is_heard(job, record) for record in introduced(durable)):
        pause = CALM_TICKS * durable.spec.heartbeat_seconds
    else:
        return 0.0
    return min((last + pause, *(at for at in _deadlines(job) if at >= last)))


def _is_heard(job: Job, record: WorkerRecord) -> bool:
    process = job.processes.get(record.worker)
    return process is not None and process.connection is not None and process.ping is None


def _deadlines(job: Job) -> Iterator[float]:
    """The times at which time alone brings something. What was due at the last tick was done then, if it could be."""
    durable = job.durable
    yield durable.spawn_after
    yield from durable.backoff_until.values()
    yield from (at + durable.spec.stall_seconds for at in job.spawned_at.values())
    yield from (max(since, job.started_at) + LINGER_SECONDS for since in durable.ending_since.values())
    if job.ready_since is not None:
        yield job.ready_since + SHORT_PATIENCE_SECONDS
        yield job.ready_since + PATIENCE_SECONDS
