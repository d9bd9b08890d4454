"""The place where simulated workers save: which checkpoints are whole, and which of them cannot be read.

A save is whole once every owner of its world has written its part and the first of them lives to say so. Its bits are
those that the reference has for its step, so a path says all. Whether one is damaged is drawn when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from shoal_protos.checkpoint import Sighting

from .network import Still

if TYPE_CHECKING:
    from .simulation import Simulation
    from .worker import SimWorker
    from .world import World

WRITE_SECONDS = 0.6
DAMAGED = 0.1
"""The part of checkpoints that cannot be read."""


@dataclass(eq=False)
class Save:
    """One save on its way."""

    sighting: Sighting
    missing: set[str]
    """Incarnations of owners whose part is not written."""
    told: list[SimWorker] = field(default_factory=list)


class Checkpoints:
    """See the module's text. `every`: steps between two; 0: the job has no place for them."""

    def __init__(self, simulation: Simulation, every: int) -> None:
        self.simulation, self.every = simulation, every
        self.chance: Random = Still(0) if simulation.still else Random(f"checkpoints of {simulation.seed}")
        self.whole: list[Sighting] = []
        self.damaged: set[str] = set()
        self._saves: dict[str, Save] = {}

    def boundary(self, worker: SimWorker, world: World, asked: bool) -> None:
        """After a vote: all decide alike whether they save."""
        step, generation = worker.training.step, world.plan.generation
        if not self.every or step < 1 or not (asked or step % self.every == 0):
            return
        path = f"step {step} of generation {generation}"
        save = self._saves.get(path)
        if save is None:
            owners = {world.plan.members[rank].incarnation for rank in {0, *world.owners}}
            save = self._saves[path] = Save(Sighting(generation, step, path), owners)
        if worker not in save.told:
            save.told.append(worker)
            worker.after(WRITE_SECONDS * self.chance.random(), self._written, worker, save)

    def _written(self, worker: SimWorker, save: Save) -> None:
        """A part is there; the last one makes the checkpoint, if its leader lives to write the manifest."""
        save.missing.discard(worker.incarnation)
        if not save.missing and save.sighting not in self.whole:
            self.whole.append(save.sighting)
            if self.chance.random() < DAMAGED:
                self.damaged.add(save.sighting.path)
            self.simulation.say("a checkpoint of", save.sighting.path, "is whole")
        if save.sighting in self.whole:
            for other in save.told:
                other.awake(self._tell, other, save.sighting)

    def _tell(self, worker: SimWorker, sighting: Sighting) -> None:
        worker.training.knows = sighting
        worker.session.changed()

    def newest(self, spoilt: set[str]) -> Sighting | None:
        """What a worker finds that looks for the latest."""
        return max((one for one in self.whole if one.path not in spoilt), default=None)
