"""What lies in a job's inbox is one batch: recorded event by event, then concluded and written once."""

from __future__ import annotations

from dataclasses import replace

from machine_driver import NEW, Driver
from shoal_controller.core.machine.effects import Persist
from shoal_controller.core.machine.events import MessageReceived, Tick
from shoal_controller.core.machine.machine import step
from shoal_controller.core.machine.spec import Phase
from shoal_protos.messages import Heartbeat, MemberState, Open, Telemetry


def test_what_many_workers_say_at_once_is_concluded_and_written_once() -> None:
    job = Driver(wanted=3)
    for worker in ("w0", "w1", "w2"):
        job.hello(worker)
    for worker in ("w0", "w1", "w2"):
        job.stop(worker, NEW)
    generation = job.planned().generation
    ready = replace(NEW, sequence=1_000, state=MemberState.READY, promised=generation)
    batch = [MessageReceived(connection, Heartbeat(ready, Telemetry(), 0)) for connection in job.connections.values()]
    job.job, job.effects = step(job.job, [*batch, Tick()], job.now)
    assert [message for worker in ("w0", "w1", "w2") for message in job.messages_to(worker)] == [Open(generation)] * 3
    assert len(job.of(Persist)) == 1 and job.view.phase is Phase.RUNNING
