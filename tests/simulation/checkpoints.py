"""The place where simulated workers save: parts, whole checkpoints with the bits that were written, and damage.

What a worker does about a save is in saving.py, what it knows of checkpoints in loading.py. A checkpoint that is whole
is looked at once: it has the bits of the undisturbed run. Whether it can be read is drawn then; like a flipped bit,
nobody knows before it is read.
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random
from typing import TYPE_CHECKING

from shoal_protos.checkpoint import CheckpointRef, superfluous
from shoal_protos.runs import Runs

from .network import Still

if TYPE_CHECKING:
    from .simulation import Simulation

Part = dict[int, int]
"""By block: its state and parameters, as one symbol."""

KEEP = 3


class Checkpoints:
    """See the module's text. `every`: steps between two; 0: the job has no place for them."""

    def __init__(self, simulation: Simulation, every: int) -> None:
        self.simulation, self.every = simulation, every
        chance = Random(f"checkpoints of {simulation.seed}")
        self.damaging = chance.choice((0.0, 0.1, 0.5))
        """The part of checkpoints that cannot be read."""
        self.failing = chance.choice((0.0, 0.0, 0.1))
        """The part of files that cannot be written."""
        self.chance: Random = Still(0) if simulation.still else chance
        self.parts: dict[str, dict[str, Part]] = {}
        """By path and incarnation of the writer."""
        self.there: dict[CheckpointRef, Part] = {}
        """The whole ones that were not deleted."""
        self.damaged: set[str] = set()
        self.made = self.failed = self.final_drains = 0
        """Saves that were completed or given up, and last workers that left their state in one."""

    def publish(self, reference: CheckpointRef, writers: Collection[str], in_use: str) -> bool:
        """Makes it exist, if the writers' parts are all there; older ones may go."""
        parts = self.parts.get(reference.path, {})
        whole = {block: value for writer in writers for block, value in parts.get(writer, {}).items()}
        if not parts.keys() >= set(writers) or len(whole) < self.simulation.blocks:
            return False
        self.simulation.watch.saved(reference, whole)
        self.there[reference] = whole
        self.made += 1
        if self.chance.random() < self.damaging:
            self.damaged.add(reference.path)
        self.simulation.say("checkpoint", reference.path, "is whole")
        self._prune(in_use)
        return True

    def is_whole(self, path: str) -> bool:
        return any(one.path == path for one in self.there)

    def withdraw(self, path: str, writer: str | None) -> None:
        """Deletes what one writer has written of a save that failed; None: all that is there. What is whole stays."""
        parts = self.parts.get(path, {})
        if not self.is_whole(path):
            for one in [writer] if writer is not None else [*parts]:
                parts.pop(one, None)

    def _prune(self, in_use: str) -> None:
        newest = sorted(self.there, reverse=True)
        for place in superfluous([one.step for one in newest], KEEP, None):
            if newest[place].path != in_use:
                del self.there[newest[place]]

    def newest(self, unreadable: Collection[str], known: Runs) -> CheckpointRef | None:
        """What a worker finds that looks for the latest, of the generations that its job knows."""
        found = (one for one in self.there if one.path not in unreadable and (not known or one.generation in known))
        return max(found, default=None)

    def read(self, path: str) -> Part | None:
        """All that is in a checkpoint, damaged or not; None where there is none."""
        return next((content for reference, content in self.there.items() if reference.path == path), None)
