"""How long a save is waited for once all steps are done: a write that does not come back must not hold a job for ever.

Called by the loop and by checkpoint_saving.py, on each member for what it writes; the others wait for it so long.
"""

from __future__ import annotations

import time

from shoal.checkpoint.failure import SaveFailed
from shoal.checkpoint.saver import Saver
from shoal.training.context import TrainingContext

LEAST_SECONDS = 60.0
"""However impatient the job is."""


class SavePatience:
    """Of one worker. `saver`: None where nothing is saved."""

    def __init__(self, context: TrainingContext, saver: Saver | None) -> None:
        self._context, self._saver = context, saver
        self._since: float | None = None
        """When all steps were done; None: they are not."""
        self._is_over = False

    def begin(self) -> None:
        """All steps are done."""
        self._since = self._since or time.monotonic()

    def forget(self) -> None:
        """All have gone back, and make steps again."""
        self._since = None

    @property
    def seconds(self) -> float:
        """For how long a write may be waited for; 0 once one was waited for in vain."""
        return 0.0 if self._is_over else max(LEAST_SECONDS, self._context.link.job.stall_seconds)

    def check(self) -> None:
        """Raises `SaveFailed` where what this worker writes takes longer."""
        if self._saver is None or self._since is None or self._saver.outcome is None:
            return
        waited = min(self._saver.seconds_at_work, time.monotonic() - self._since)
        if waited >= self.seconds:
            self._is_over = True
            raise SaveFailed(
                f"all steps are done, but a checkpoint is not whole: a write to {self._saver.outcome.path} has not "
                f"come back for {waited:.0f} s (stall_seconds). See what holds its place up; where it is only slow, "
                "give the job a greater stall_seconds."
            )
