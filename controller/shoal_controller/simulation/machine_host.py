"""The controller's job machine and planner on a virtual clock: the very ones that run in the controller.

All events of one instant are one batch, and effects are carried out in their order. There is no store and no launcher,
because nothing here is lost and machines come by themselves; the planner answers in the instant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shoal_protos.messages import ToWorker

from shoal_controller.core.machine.effects import AskPlanner, Close, Effect, Note, Probe, Send
from shoal_controller.core.machine.events import Event, PlannerAnswered, Started
from shoal_controller.core.machine.machine import new_job, step
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.core.planning.question import answer
from shoal_controller.simulation.clock import Clock

Noted = Callable[[float, Note], None]


class Peers(Protocol):
    """The workers, as the controller reaches them."""

    def on_message(self, connection: int, message: ToWorker) -> None:
        """A message arrives."""

    def on_close(self, connection: int) -> None:
        """The controller has ended a stream."""

    def on_probe(self, probe: Probe) -> None:
        """It looks at a worker's port."""


class MachineHost:
    """See the module's text. `notes` are the job's history."""

    def __init__(self, clock: Clock, spec: JobSpec, peers: Peers, latency: float) -> None:
        self.job = new_job(spec, clock.now)
        self.notes: list[tuple[float, Note]] = []
        self._clock, self._peers, self._latency = clock, peers, latency
        self._inbox: list[Event] = []
        self.feed(Started())

    def feed(self, event: Event) -> None:
        """Hand the machine an event, with all others of this instant."""
        if not self._inbox:
            self._clock.after(0.0, self._handle)
        self._inbox.append(event)

    def _handle(self) -> None:
        batch, self._inbox = self._inbox, []
        self.job, effects = step(self.job, batch, self._clock.now)
        outgoing: list[Effect] = []
        for effect in effects:
            if isinstance(effect, AskPlanner):
                self.feed(PlannerAnswered(effect, answer(effect.question)))
            elif isinstance(effect, Note):
                self.notes.append((self._clock.now, effect))
            elif isinstance(effect, Send | Close | Probe):
                outgoing.append(effect)
        if outgoing:
            self._clock.after(self._latency, self._deliver, outgoing)

    def _deliver(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._peers.on_message(effect.connection, effect.message)
            elif isinstance(effect, Close):
                self._peers.on_close(effect.connection)
            elif isinstance(effect, Probe):
                self._peers.on_probe(effect)
