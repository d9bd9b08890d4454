"""Going on from a checkpoint, as one simulated worker does it: worker/shoal/training/checkpoint_loading.py.

It looks for the latest at its start, and says of one that it cannot read; what is read is what was written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal_protos.checkpoint import CheckpointRef, UnreadableCheckpoint
from shoal_protos.plan import Plan
from shoal_protos.runs import NO_BLOCKS, Runs

if TYPE_CHECKING:
    from .checkpoints import Part
    from .worker import SimWorker


class Loading:
    """What a worker knows of checkpoints."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker, self.place = worker, worker.simulation.checkpoints
        self.knows: CheckpointRef | None = None
        self.damage: UnreadableCheckpoint | None = None
        self.generations: Runs = NO_BLOCKS
        self._unreadable: set[str] = set()
        self.taken = ""
        """The last checkpoint that it began to read: the initial state is gone from then on."""

    @property
    def taken_is_unreadable(self) -> bool:
        return self.taken in self._unreadable

    def look(self) -> None:
        """For the latest, at the start or after one that could not be read."""
        self.knows = self.place.newest(self._unreadable, self.generations)

    def begins(self, plan: Plan) -> None:
        """A plan is being carried out; what was said of another one's checkpoint is over."""
        path = plan.recovery.checkpoint if plan.recovery is not None else ""
        if self.damage is not None and self.damage.path != path:
            self.damage = None

    def take_up(self, path: str) -> Part | None:
        """What is in a checkpoint, or None where it cannot be read: that is said, and another one is looked for."""
        content = self.place.read(path)
        if content is not None:
            self.taken = path
        meets_it = self.worker.training.rank == 0 or self.place.chance.random() < 0.5  # the blocks with the flipped bit
        if content is None or (path in self.place.damaged and meets_it):
            self._unreadable.add(path)
            self.damage = UnreadableCheckpoint(path, f"{path} {'is damaged' if content else 'is not there'}.")
            self.look()
            return None
        return content
