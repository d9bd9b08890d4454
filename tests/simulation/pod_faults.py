"""What a cluster does to its pods while other faults rage: no room, no image, nodes that are to go, or are gone.

Drawn apart from the other faults, so that a seed means the same with local processes.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from .pods import PLENTY, PodLauncher

if TYPE_CHECKING:
    from .simulation import Simulation

MOST = 8
"""Things that befall the pods of a seed."""
GRACES = (0.3, 2.0, 5.0, 60.0)
LONGEST = 8.0
"""Seconds for which there is no room, or no image."""


class PodFaults:
    """See the module's text."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.clock = simulation, simulation.clock
        self.chance = Random(f"pods of {simulation.seed}")
        self.count = 0

    def rage(self, seconds: float) -> None:
        if isinstance(self.simulation.launcher, PodLauncher):
            acts = (self.fill_up, self.lose_image, self.preempt, self.preempt, self.vanish, self.evict, self.endanger)
            for _ in range(self.chance.randint(1, MOST)):
                self.clock.after(self.chance.uniform(0, seconds), self._strike, self.chance.choice(acts))

    def _strike(self, act: Callable[[], None]) -> None:
        if not self.simulation.host.job.durable.phase.is_over:
            self.count += 1
            act()

    def calm(self) -> None:
        """There is room, and the image; what ran on without its node has ended."""
        if isinstance(self.simulation.launcher, PodLauncher):
            for worker in tuple(self._pods.gone):
                self._end(worker)
            self._make_room()

    def _make_room(self) -> None:
        self._pods.room, self._pods.image_is_there = PLENTY, True
        self._pods.look_again()

    @property
    def _pods(self) -> PodLauncher:
        launcher = self.simulation.launcher
        assert isinstance(launcher, PodLauncher)
        return launcher

    def _any(self) -> str:
        """A pod that runs; empty: there is none."""
        running = self._pods.running()
        return self.chance.choice(running) if running else ""

    def _later(self, call: Callable[..., object], *given: object) -> None:
        self.clock.after(self.chance.uniform(0.2, LONGEST), call, *given)

    # ---- what

    def fill_up(self) -> None:
        """Other jobs take the room."""
        self._pods.room = self.chance.randint(1, self.simulation.spec.wanted)
        self.simulation.say("room for", self._pods.room, "pods")
        self._later(self._make_room)

    def lose_image(self) -> None:
        self._pods.image_is_there = False
        self.simulation.say("the image is gone")
        self._later(self._make_room)

    def preempt(self) -> None:
        """A node is to go: then it goes, its pod gets SIGTERM and is killed, or it stays after all."""
        worker = self._any()
        if not worker:
            return
        grace = self.chance.choice(GRACES)
        self.simulation.say("the node of", worker, "is to go within", grace)
        self._pods.preempt(worker, grace)
        self.clock.after(grace, self.chance.choice((self._end, self._vanish, self._spare, self._terminate)), worker)

    def vanish(self) -> None:
        """Nobody has announced it."""
        if worker := self._any():
            self._vanish(worker)

    def evict(self) -> None:
        if worker := self._any():
            self._terminate(worker)

    def endanger(self) -> None:
        """A hint that a node may go; often it is taken back."""
        if worker := self._any():
            self._pods.endanger(worker, "its node may be taken away")
            if self.chance.random() < 0.7:
                self._later(self._pods.endanger, worker, "")

    # ---- to whom

    def _end(self, worker: str) -> None:
        process = self._pods.started.get(worker)  # one that has ended is forgotten with its store
        if process is not None and process.alive:
            process.end(-9, "the pod was evicted")

    def _terminate(self, worker: str) -> None:
        if worker in self._pods.running():
            process = self._pods.started[worker]
            self.simulation.say("SIGTERM to the pod of", worker)
            process.awake(process.session.request_drain)
            self._later(self._end, worker)

    def _spare(self, worker: str) -> None:
        if worker in self._pods.running():
            self._pods.spare(worker)

    def _vanish(self, worker: str) -> None:
        if worker in self._pods.running():
            self.simulation.say("the node of", worker, "is gone")
            self._pods.vanish(worker)
            self._later(self._end, worker)
