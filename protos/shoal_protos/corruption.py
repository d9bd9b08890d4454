"""What both sides know of silent corruption: a block whose copies differ. Pure: standard library only.

Workers compare the copies of a block and say where they differ; what is done about it the controller decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class OnCorruption(StrEnum):
    """`shoal.on_corruption`."""

    RESTORE = "restore"
    """All go back to the newest checkpoint whose copies were compared; without one the job pauses."""
    PAUSE = "pause"
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True)
class CorruptBlock:
    """A block whose copies differ."""

    block: int
    first_step: int
    """The copies were equal at this step, or the block was not compared since the job began."""
    step: int
    """The step as of which they differ."""
    workers: tuple[str, ...]
    """Whose copies: of most copies that agree the others, where none are most all holders."""

    @property
    def sentence(self) -> str:
        """The difference as one sentence."""
        steps = f"between steps {self.first_step} and {self.step}"
        if len(self.workers) == 1:
            return f"block {self.block} of worker {self.workers[0]} differs from its other copies; changed {steps}"
        names = ", ".join(self.workers[:-1]) + f" and {self.workers[-1]}"
        return f"the copies of block {self.block} of workers {names} differ; one was changed {steps}"
