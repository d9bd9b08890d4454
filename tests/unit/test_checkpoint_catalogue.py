"""Which checkpoints the job machine believes in, over losses of everybody."""

from __future__ import annotations

from dataclasses import replace

from machine_driver import MADE_OF, NEW, Driver
from shoal_protos.checkpoint import CheckpointRef


def lose_everybody(job: Driver, *, then_found: CheckpointRef) -> None:
    """All are killed; the two that take their places have found a checkpoint, and a world of them trains."""
    for worker in tuple(job.connections):
        job.exit(worker)
    job.wait(2.0)
    for worker in (name for name, record in job.job.durable.roster.items() if record.serves):
        job.hello(worker, status=replace(NEW, checkpoint=then_found))
    job.recover()


def test_what_was_saved_since_all_went_back_counts_though_nobody_told_of_it_before_everybody_was_lost_again() -> None:
    job = Driver(wanted=2, made_of=replace(MADE_OF, can_checkpoint=True), launcher="local")
    job.start(2)
    first = CheckpointRef(1, 4, "/saves/step-4")
    job.beat("w0", checkpoint=first, step=7)
    lose_everybody(job, then_found=first)
    world = job.job.durable.current
    assert world is not None and world.recovery is not None and world.recovery.step == 4
    untold = CheckpointRef(world.generation, 9, "/saves/step-9")
    given_up = CheckpointRef(1, 6, "/saves/step-6")
    job.beat("w2", checkpoint=given_up)
    assert job.job.durable.checkpoints == (first,)
    lose_everybody(job, then_found=untold)
    world = job.job.durable.current
    assert world is not None and world.recovery is not None
    assert (world.recovery.step, world.recovery.checkpoint) == (9, untold.path)
