"""Workers that were asked for and have not started: what they wait for, and when waiting is given up.

A cluster may have no room for hours, so that is no failure: it counts neither towards `stall_seconds` nor towards
`max_restarts`, and the others train on. What cannot start however long one waits (there is no such image) fails the
job after a few tries, with the cluster's own message; not while a world trains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shoal_protos.messages import Ending
from shoal_protos.plan import WorkerId
from shoal_protos.text import plural

from shoal_controller.core.machine.durable import Standing, WorkerRecord
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.events import Waiting
from shoal_controller.core.machine.job import Job
from shoal_controller.core.machine.pending import Pending, PendingReason, with_advice
from shoal_controller.core.machine.phases import ending, places
from shoal_controller.core.machine.phases.failures import LONGEST_BACKOFF
from shoal_controller.core.machine.turn import Turn

MOST_UNSTARTABLE = 3
"""Attempts in a row that may ask for what the cluster cannot start."""
ADVISED_SECONDS = 10.0
"""From this wait on it is said what people can do: what only takes its time needs nobody."""
LONGEST_MESSAGE = 600
"""Characters of a cluster's message that are kept."""


def on_waiting(turn: Turn, event: Waiting) -> bool:
    """The launcher says what a worker waits for, or that it waits in vain."""
    record = turn.durable.roster.get(event.worker)
    if record is None or not record.serves or record.incarnation:
        return False
    why = event.why.strip()[:LONGEST_MESSAGE]
    if event.hopeless:
        turn.drop("pending", event.worker)
        _give_up(turn, record, with_advice(event.reason, why))
        return True
    before = turn.job.pending.get(event.worker)
    if event.reason not in {other.reason for other in pending_workers(turn.job).values()}:
        turn.note(EventKind.PENDING, f"worker {event.worker} cannot start yet: {why}", event.worker)
    same = before is not None and before.reason is event.reason
    since = before.since if before is not None and same else turn.now
    turn.put("pending", event.worker, Pending(event.reason, why, since))
    turn.drop("spawned_at", event.worker)  # ● it cannot connect before it has started: that time is nobody's fault
    return False


def _give_up(turn: Turn, record: WorkerRecord, why: str) -> None:
    """● What cannot start is tried again, later and later; after a few tries a job that trains nothing has failed."""
    worker = record.worker
    turn.mark(worker, standing=Standing.DEAD, ending=Ending.FAILED, why=why)
    turn.note(EventKind.FAILED, f"worker {worker} cannot start: {why}", worker)
    turn.expect_end(worker)
    turn.drop("spawned_at", worker)
    places.kill(turn, worker)
    if record.join_order >= turn.durable.unstartable_before:  # what was asked for at a time is one attempt
        times = turn.durable.unstartable + 1
        pause = min(2.0**times, LONGEST_BACKOFF)
        turn.keep(
            unstartable=times, unstartable_before=turn.durable.next_join_order,
            spawn_after=max(turn.durable.spawn_after, turn.now + pause),
        )  # fmt: skip
    if turn.durable.unstartable >= MOST_UNSTARTABLE and turn.world is None and turn.job.attempt is None:
        ending.fail(turn, f"no worker could be started in {MOST_UNSTARTABLE} attempts; worker {worker}: {why}")


def on_started(turn: Turn, worker: WorkerId) -> None:
    """What a worker runs in has started: from now on it has its time to say hello."""
    if turn.durable.unstartable:
        turn.keep(unstartable=0)
    if worker in turn.job.pending:
        turn.drop("pending", worker)
        if not turn.record(worker).incarnation:
            turn.put("spawned_at", worker, turn.now)


def pending_workers(job: Job) -> Mapping[WorkerId, Pending]:
    """Who waits to start, and is still wanted."""
    roster = job.durable.roster
    return {
        worker: pending
        for worker, pending in job.pending.items()
        if worker in roster and roster[worker].serves and not roster[worker].incarnation
    }


def counted(job: Job) -> Mapping[PendingReason, int]:
    """How many of them, by reason."""
    return Counter(pending.reason for pending in pending_workers(job).values())


def sentence(job: Job, now: float) -> str:
    """What those that have not started wait for, the most frequent message first; empty where all have."""
    pending = pending_workers(job)
    if not pending:
        return ""
    messages = Counter(one.why for one in pending.values())
    message, count = messages.most_common(1)[0]
    longest = max(now - one.since for one in pending.values() if one.why == message)
    others = f" (and {len(pending) - count} for other reasons)" if len(pending) > count else ""
    verb = "waits" if count == 1 else "wait"
    if longest >= ADVISED_SECONDS:
        message = with_advice(next(one.reason for one in pending.values() if one.why == message), message)
    return f"{plural(count, 'worker')} {verb} to start for {longest:.0f} s{others}: {message}"
