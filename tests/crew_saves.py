"""Checkpoints in a crew: training goes on no faster than the disks write, so that each save is seen to its end."""

from __future__ import annotations

from crew import Crew, Worker

MOST_STEPS = 20
"""After the save, until the controller knows of it."""


def saved(crew: Crew, step: int | None = None) -> None:
    """Trains on until the controller knows of the checkpoint of that step, or of any.

    Two steps are enough where the crew has not trained beyond that step: the next vote carries that all have written,
    the one after it that the checkpoint is whole.
    """
    most = crew.allowed + MOST_STEPS
    while True:
        crew.until("the disks", lambda: all(rests(worker) for worker in crew.members()))
        if any(step in (None, one.step) for one in crew.job.durable.checkpoints):
            return
        assert crew.allowed < most and not crew.job.durable.phase.is_over, crew.story()
        crew.train_to(crew.allowed + 1)


def rests(worker: Worker) -> bool:
    """Whether its step is done, and nothing is being written for it, as far as that does not wait for a vote."""
    saver = worker.engine.parts.saving._saver
    assert saver is not None
    is_through = worker.engine.global_step >= worker.crew.allowed and worker.seen[-1] == "forward"
    return is_through and not saver.is_working
