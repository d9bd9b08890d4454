"""Going on from a checkpoint, as one simulated worker does it: a driver of the real `Loading`, as
training/checkpoint_loading.py is one.

Here are the looking and the reading. What is read is what was written, and a damaged checkpoint shows only then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.loading import Loading
from shoal_protos.runs import NO_BLOCKS, Runs

if TYPE_CHECKING:
    from .checkpoints import Part
    from .worker import SimWorker


class Reading:
    """See the module's text. `known` is in the worker's status."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker, self.place = worker, worker.simulation.checkpoints
        self.known = Loading()
        self.generations: Runs = NO_BLOCKS
        """Those that its job has begun, as its welcome said."""

    def look(self) -> None:
        """For the latest, at the start or after one that could not be read."""
        self.known.on_found(self.place.newest(self.known.unreadable, self.generations))

    def take_up(self, path: str) -> Part | None:
        """What is in a checkpoint, or None where it cannot be read: that is said, and another one is looked for."""
        content = self.place.read(path)
        if content is not None:
            self.known.on_take_up(path)
        meets_it = self.worker.training.rank == 0 or self.place.chance.random() < 0.5  # the blocks with the flipped bit
        if content is None or (path in self.place.damaged and meets_it):
            self.known.on_unreadable(path, f"{path} {'is damaged' if content else 'is not there'}.")
            self.look()
            return None
        return content
