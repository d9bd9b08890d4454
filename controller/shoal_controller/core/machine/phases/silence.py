"""How long a worker has been silent, and when silence tells nothing.

● Silence is counted in the controller's own running time, not by the clock: a tick comes after all that lay in the
inbox, and adds at most one heartbeat interval. So a controller that was stopped or is always late evicts nobody for
its own absence, and still evicts who is frozen. The time of a cut, in which most are silent, is not added at all:
then it is the controller that does not hear. Only `stall_seconds` goes by the clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.durable import Durable, Standing, WorkerRecord
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.job import NO_LISTENING, Job, Listening
from shoal_controller.core.machine.turn import Turn

QUIET_AFTER = 1.5
"""Heartbeat intervals after which a worker is silent: it has missed a heartbeat."""
NAMED = 4
"""How many silent workers a sentence names."""


def count_tick(turn: Turn) -> None:
    """A tick: time has passed in which the controller has listened, unless it is cut off."""
    job = turn.job
    since = job.started_at if job.ticked_at is None else job.ticked_at
    passed = min(turn.now - since, turn.spec.heartbeat_seconds)
    running, uncut = job.listening
    turn.change(ticked_at=turn.now, listening=Listening(running + passed, uncut if is_cut_off(job) else uncut + passed))


def silent_seconds(job: Job, worker: WorkerId) -> float:
    """Seconds for which nothing was heard of a worker, as counted here."""
    process = job.processes.get(worker)
    listening = process.last_message_listening if process is not None else NO_LISTENING
    return job.listening.uncut - listening.uncut


def last_heard(job: Job, worker: WorkerId) -> float:
    """The time of the last message; for a worker that has not come back since the controller was started: when that
    was.
    """
    process = job.processes.get(worker)
    return process.last_message_at if process is not None else job.started_at


def silent_workers(job: Job) -> list[WorkerId]:
    """Whose silence counts for the rule of the silent majority."""
    quiet_seconds = QUIET_AFTER * job.durable.spec.heartbeat_seconds
    running = job.listening.running
    quiet = [record for record, listening in _last_heard(job) if running - listening.running > quiet_seconds]
    return [record.worker for record in quiet if _counts(job, record)]


def unheard_workers(job: Job, seconds: float) -> list[WorkerId]:
    """Of all that are known those of whom nothing was heard for longer, as `silent_seconds` counts."""
    uncut = job.listening.uncut
    return [record.worker for record, listening in _last_heard(job) if uncut - listening.uncut > seconds]


def _last_heard(job: Job) -> Iterator[tuple[WorkerRecord, Listening]]:
    """Every worker that is known, and `Job.listening` as it was when that one was last heard."""
    processes = job.processes
    for worker, record in job.durable.roster.items():
        process = processes.get(worker)
        yield record, process.last_message_listening if process is not None else NO_LISTENING


def is_cut_off(job: Job) -> bool:
    """● Whether more than half of the job's workers that are not confirmed dead are silent: it is us, not them."""
    silent = silent_workers(job)  # most ticks end here: who counts takes four times as long to find as who is quiet
    return bool(silent) and 2 * len(silent) > len(_counting(job))


def hears_somebody(job: Job, silent: Collection[WorkerId]) -> bool:
    """Whether one who serves is not among the silent. Where nobody is heard there is nobody to go on with."""
    roster = job.durable.roster
    return any(roster[worker].serves and worker not in silent for worker in job.processes)


def may_be_reconnecting(turn: Turn) -> bool:
    """● Within `reconnect_seconds` of a controller's start nobody is evicted, and no refusal is a proof, until all whom
    an earlier controller knew have come back. A new job has nobody to wait for: its first loss costs what others do.
    """
    return is_reconnecting(turn.job, turn.now)


def is_reconnecting(job: Job, now: float) -> bool:
    return now - job.started_at < job.durable.spec.reconnect_seconds and _awaits_somebody(job)


def _awaits_somebody(job: Job) -> bool:
    """Whether one who has said hello to an earlier controller has not said it to this one."""
    return any(record.worker not in job.processes for record in introduced(job.durable))


def introduced(durable: Durable) -> Iterator[WorkerRecord]:
    """Those who have said hello, and are not known to be gone or told to go."""
    return (
        record
        for record in durable.roster.values()
        if record.incarnation and record.ending is None and record.standing is not Standing.DEAD
    )


def is_deserted(durable: Durable) -> bool:
    """Whether there is nobody whose silence could tell anything."""
    return next(introduced(durable), None) is None


def note_first(turn: Turn) -> None:
    """A worker comes where none was: the time since the last tick, which may be long (`rests_until`), is no silence."""
    if not turn.job.connections and is_deserted(turn.durable):
        turn.change(ticked_at=turn.now)


def note_return(turn: Turn) -> None:
    """A worker is back, and is heard from now on."""
    if is_cut_off(turn.job):
        turn.change(back_at=turn.now)


def may_be_on_its_way(turn: Turn) -> bool:
    """● Whether a worker without a stream may lack it because the controller was cut off: as after the controller's
    start it has `reconnect_seconds`, from when others came back. Each looks for a controller at its own pace.
    """
    back_at = turn.job.back_at
    return back_at is not None and turn.now - back_at < turn.spec.reconnect_seconds


def _counting(job: Job) -> list[WorkerId]:
    return [record.worker for record in job.durable.roster.values() if _counts(job, record)]


def _counts(job: Job, record: WorkerRecord) -> bool:
    """Whether a worker is one of the job's: one that is stale is not any more."""
    if record.ending is not None or record.standing is Standing.DEAD or not record.incarnation:
        return False
    process = job.processes.get(record.worker)
    stale = process is not None and 0 < process.status.generation < job.durable.committed_in
    return record.standing is Standing.HERE or not stale


# ---- for people


def doubt(job: Job, now: float) -> str:
    """While most are silent, for longer than one of them would be suspected after: who since when, why nobody is
    evicted, and until when. Empty otherwise.
    """
    if job.durable.phase.is_over or is_reconnecting(job, now) or not (silent := silent_workers(job)):
        return ""
    spec, everyone = job.durable.spec, len(_counting(job))
    ages = {worker: now - last_heard(job, worker) for worker in silent}
    quiet = {worker: age for worker, age in ages.items() if age > spec.heartbeat_seconds * spec.suspect_after}
    if 2 * len(quiet) <= everyone:
        return ""
    who = ", ".join(f"{worker} for {age:.0f} s" for worker, age in list(quiet.items())[:NAMED])
    more = f" and {len(quiet) - NAMED} more" if len(quiet) > NAMED else ""
    refusal = f". The last worker to come was refused: {job.durable.last_refusal}" if job.durable.last_refusal else ""
    return (
        f"{len(quiet)} of {everyone} {'worker is' if everyone == 1 else 'workers are'} silent ({who}{more})"
        f'{_consequence(job, silent, quiet)}. If they are dead, say so: "shoal lost {spec.job} WORKER"{refusal}'
    )


def _consequence(job: Job, silent: Collection[WorkerId], quiet: Mapping[WorkerId, float]) -> str:
    """What follows from most being silent. `quiet`: of the `silent` those who are named, and for how long they were."""
    stall_seconds, roster = job.durable.spec.stall_seconds, job.durable.roster
    waited_for = [seconds for worker, seconds in quiet.items() if roster[worker].serves]
    if not waited_for:
        return (
            f" and were evicted; nobody else is evicted before {stall_seconds:g} s of silence (stall_seconds), because "
            "the controller may be the one that is cut off"
        )
    left = max(0.0, stall_seconds - min(waited_for))
    until = f"for up to {left:.0f} s more" if hears_somebody(job, silent) else "until one of them is heard"
    else_ = " else" if len(waited_for) < len(quiet) else ""
    return f"; nobody{else_} is evicted, because the controller may be the one that is cut off. Waiting {until}"


def announce(turn: Turn) -> None:
    """The history says when the doubt begins and when it is over."""
    sentence = doubt(turn.job, turn.now)
    if sentence and not turn.job.doubt_shown:
        turn.note(EventKind.SILENT, sentence)
    elif turn.job.doubt_shown and not sentence:
        turn.note(EventKind.HEARD, "at least half of the workers are heard again, or known to be dead")
    if bool(sentence) != turn.job.doubt_shown:
        turn.change(doubt_shown=bool(sentence))
