"""What a script without a controller leaves untrained: said when it has ended, or has let its engine go.

With a controller the job fails of it. Alone the script's status says how it ended, and that is 0 for one that has
broken out of its loop. Kept beside the engine and not in it: it is asked when there is no engine any more.
"""

from __future__ import annotations

import sys

from shoal.logs import get_logger
from shoal.training.state import NO_STEP

log = get_logger("shoal")


class Untrained:
    """The steps that the script's loop had made when it was left."""

    def __init__(self) -> None:
        self._step = self._last_step = NO_STEP

    def on_left(self, step: int, last_step: int) -> None:
        """The loop was left, as far as it was gone through."""
        self._step, self._last_step = step, last_step

    def tell(self) -> None:
        """Says it once. An error that has ended the script says enough."""
        step, self._step = self._step, NO_STEP
        if NO_STEP < step < self._last_step and getattr(sys, "last_value", None) is None:
            means = "the script left its loop before the end; go through it, or call engine.stop()"
            log.warning("ended_early", step=step, last_step=self._last_step, means=means)
