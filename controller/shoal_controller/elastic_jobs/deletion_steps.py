"""What is done next with a job whose resource is to go: it stops after its step, saves, ends, is forgotten. Pure.

● Judged by what is seen of the job, never by what was done before: another controller goes on where one died. Every
wait ends: a checkpoint that cannot be saved delays the end by `SAVE_SECONDS`, pods that do not end by `END_SECONDS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal_controller.core.machine.figures import series_key
from shoal_controller.core.machine.spec import JobView, Phase

SAVE_SECONDS = 300.0
"""How long a deleted job may take until its state is in a checkpoint."""
END_SECONDS = 20.0
"""How long its pods have to end by themselves; those that are left are deleted."""

FAILED_SAVES = "shoal_checkpoint_failures_total"


class DeletionStep(StrEnum):
    PAUSE = "pause"
    SAVE = "save"
    WAIT = "wait"
    CANCEL = "cancel"
    FORGET = "forget"


@dataclass(slots=True)
class Deletion:
    """One that is under way, as this controller has seen it."""

    run: str
    began: float
    over_since: float | None = None
    asked_to_save: bool = False
    failed_saves: float = 0.0
    """Of the job when it was asked to."""


def next_step(view: JobView, deletion: Deletion, running_pods: int, now: float) -> DeletionStep:
    """`running_pods`: of the job, as the cluster has them."""
    if view.phase.is_over:
        since = deletion.over_since if deletion.over_since is not None else now
        return DeletionStep.WAIT if running_pods and now - since < END_SECONDS else DeletionStep.FORGET
    can_save = view.can_checkpoint and view.active and view.phase is not Phase.STALLED
    if not can_save or now - deletion.began > SAVE_SECONDS:
        return DeletionStep.CANCEL
    if view.phase not in (Phase.PAUSED, Phase.WAITING):
        return DeletionStep.PAUSE if view.phase is Phase.RUNNING else DeletionStep.WAIT
    if view.last_checkpoint_step == view.step:
        return DeletionStep.CANCEL
    if not deletion.asked_to_save:
        return DeletionStep.SAVE
    return DeletionStep.CANCEL if failed_saves(view) > deletion.failed_saves else DeletionStep.WAIT


def failed_saves(view: JobView) -> float:
    return view.figures.counters.get(series_key(FAILED_SAVES, {}), 0.0)
