"""The counts behind a job's report and metrics: committed steps with their times, and bytes that fills have moved.

A step counts once every member has passed it, so no survivor reports fewer. Goodput and the sample counter come from
these counts. A worker reports the bytes that its process has received since it began; its record says how much of that
is counted, so another controller continues from there. Bytes enter the generation's history and the job's counter at
the same moment, so report and metric agree, and only where something is written anyway, not with every slice.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from shoal_controller.core.machine.job import Job, Process
from shoal_controller.core.machine.turn import Turn

KEEP_SECONDS = 60.0
"""How often the figures are written where nothing else is, the shown step with them: a store has better to do than to
follow every job's steps. A controller that is started again shows a step that is so old at most, until the members have
said theirs.
"""
FEWEST_AHEAD = 16
"""Steps that may be shown beyond those written, at least."""


def count_steps(turn: Turn, step: int) -> None:
    """Every member has committed `step`."""
    figures = turn.job.figures
    steps = step - figures.step
    if steps <= 0:
        return
    seconds = _step_seconds(turn.job) or (figures.trained_seconds / figures.steps if figures.steps else 0.0)
    if seconds > 0:
        figures = figures.observed("shoal_step_seconds", seconds, {}, times=steps)
    turn.change(
        figures=replace(
            figures,
            step=step,
            steps=figures.steps + steps,
            trained_seconds=figures.trained_seconds + steps * seconds,
            training_began=turn.now - steps * seconds if figures.training_began is None else figures.training_began,
            first_commit=turn.now if figures.first_commit is None else figures.first_commit,
            last_commit=turn.now,
        )
    )
    _write_ahead(turn, steps)


def on_return(turn: Turn, step: int) -> None:
    """The job goes on from an earlier step. Of steps made while no controller watched, and that nobody is left to tell
    of, as many count as may have been shown.
    """
    figures = turn.job.figures
    steps = figures.steps if turn.job.figures_known else max(figures.steps, turn.durable.figures.steps_bound)
    turn.keep_figures(replace(figures, step=step, steps=steps))
    turn.change(figures_known=True)


def _write_ahead(turn: Turn, steps: int) -> None:
    """Now and then the figures are written, with a bound on how many steps are shown until they are written again."""
    figures, written = turn.job.figures, turn.durable.figures
    due = turn.now - turn.job.figures_written_at >= KEEP_SECONDS
    if due or figures.steps > written.steps_bound:
        ahead = max(FEWEST_AHEAD, 2 * (figures.steps - written.steps), steps)
        count_fills(turn)
        turn.keep_figures(replace(turn.job.figures, steps_bound=figures.steps + ahead))
        turn.keep(step=max(turn.durable.step, figures.step))
        turn.change(figures_written_at=turn.now, step_shown_at=turn.now)


def _step_seconds(job: Job) -> float:
    """A step's time between this heartbeat and the one before, over the workers that have reported: the median."""
    each = [seconds for process in job.processes.values() if (seconds := _of(process)) > 0]
    return median(each) if each else 0.0


def _of(process: Process) -> float:
    before, now = process.pace_before, (process.status.step, process.telemetry.training_seconds)
    if before is not None and now[0] > before[0] and now[1] > before[1]:
        return (now[1] - before[1]) / (now[0] - before[0])
    return process.telemetry.step_seconds


def count_fills(turn: Turn) -> None:
    """What workers have told since the last time was moved by the present generation."""
    history = turn.durable.history
    if not history:
        return
    moved = 0
    for worker, process in turn.job.processes.items():
        received, counted = process.telemetry.fill_bytes, turn.record(worker).fill_bytes_counted
        if received > counted:
            moved += received - counted
            turn.mark(worker, fill_bytes_counted=received)
    if moved:
        newest = replace(history[-1], fill_bytes=history[-1].fill_bytes + moved)
        turn.keep(history=(*history[:-1], newest))
        turn.count("shoal_repartition_bytes_total", moved, source="peer")
