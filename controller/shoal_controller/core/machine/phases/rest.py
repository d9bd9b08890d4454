"""When a job that waits needs its next tick: until then time brings nothing. Pure.

A thousand jobs may wait for days, for room in a cluster or for workers that come by themselves. Whatever happens to one
is an event and is handled at once; here is only what time alone brings. Who may be ticked less often while a world
trains: `Job.is_calm`.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal_controller.core.machine.durable import WorkerRecord
from shoal_controller.core.machine.job import Job
from shoal_controller.core.machine.phases.scaling import LINGER_SECONDS
from shoal_controller.core.machine.phases.silence import introduced, is_deserted
from shoal_controller.core.machine.phases.waiting import PATIENCE_SECONDS
from shoal_controller.core.machine.spec import Phase

REST_SECONDS = 2.0
"""Between the ticks of a job in which nobody is, where nothing is due earlier."""
CALM_TICKS = 0.25
"""Heartbeat intervals between the ticks of a job whose workers are all heard: a tick goes through all of them."""


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
    """Whatever the time may bring. What was due at the last tick was done then, if it could be."""
    durable = job.durable
    yield durable.spawn_after
    yield from durable.backoff_until.values()
    yield from (at + durable.spec.stall_seconds for at in job.spawned_at.values())
    yield from (max(since, job.started_at) + LINGER_SECONDS for since in durable.ending_since.values())
    if job.ready_since is not None:
        yield job.ready_since + PATIENCE_SECONDS
