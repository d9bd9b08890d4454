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


def ask_for_save(crew: Crew) -> None:
    """Worker a's script asks for a checkpoint of its next step: once it is in it, for before it means the last one."""
    crew.until("a in its next step", lambda: _waits_in_step(crew.workers["a"]))
    with crew.changed:
        crew.workers["a"].engine.save_checkpoint()


def rests(worker: Worker) -> bool:
    """Whether its step is done, and nothing is being written for it, as far as that does not wait for a vote."""
    saver = worker.engine.parts.saving._saver
    assert saver is not None
    return _waits_in_step(worker) and not saver.is_working


def _waits_in_step(worker: Worker) -> bool:
    """Whether all that it may train is trained, and it has the batch of the step that comes then."""
    seen = next(point for point in reversed(worker.seen) if point != "group")  # one is built beside the script
    return worker.engine.global_step >= worker.crew.allowed and seen == "forward"
