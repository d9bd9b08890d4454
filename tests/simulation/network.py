"""What carries messages: streams between workers and the controller, and the process groups of the generations.

A stream keeps its order unless the seed says otherwise; it loses what is on its way when it breaks. A group's messages
come in order from one peer; they are lost with the process that sent them or the group that was aborted.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from shoal_protos.messages import Result

if TYPE_CHECKING:
    from .controller import ControllerHost
    from .simulation import Simulation
    from .worker import SimWorker


AGAIN_SECONDS = 0.2
"""Until what was lost in a cut is sent again."""


class Still(Random):
    """No chance at all: every draw is the middle. Scenarios read the same whatever is drawn elsewhere."""

    def random(self) -> float:
        return 0.5


class Weather:
    """How bad the network of a seed is."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        rough = chance.random() < 0.3
        self.even = isinstance(chance, Still)
        self.loses = 0.05 if rough else 0.0
        self.doubles = 0.05 if rough else 0.0
        self.reorders = 0.1 if rough else 0.0
        self.latency = 0.01 if self.even else chance.choice((0.002, 0.01, 0.05))

    def delay(self) -> float:
        if self.even:
            return self.latency
        return self.latency * (0.2 + self.chance.random() * (6 if self.chance.random() < 0.05 else 1))


class Stream:
    """One gRPC stream. Numbers are never used twice in a controller's life."""

    def __init__(self, simulation: Simulation, worker: SimWorker, host: ControllerHost, number: int) -> None:
        self.clock, self.weather = simulation.clock, simulation.weather
        self.worker, self.host, self.number, self.life = worker, host, number, host.life
        self.broken = False
        self._last = {True: 0.0, False: 0.0}

    def up(self, deliver: Callable[..., object], *args: Any) -> None:
        """From the worker to the controller. What is sent once a stream is not lost while the stream lives."""
        once = any(isinstance(one, Result) for one in args)
        self._carry(True, once, lambda: self.host.alive and self.host.life == self.life and deliver(*args))

    def down(self, message: object) -> None:
        """From the controller to the worker."""
        self._carry(False, False, lambda: self.worker.awake(self.worker.session.on_message, self, message))

    def _carry(self, upward: bool, once: bool, deliver: Callable[[], object]) -> None:
        weather = self.weather
        for _ in range(2 if weather.doubles and weather.chance.random() < weather.doubles else 1):
            if weather.loses and weather.chance.random() < weather.loses and not once:
                continue
            at = self.clock.now + weather.delay()
            if not (weather.reorders and weather.chance.random() < weather.reorders):
                at = self._last[upward] = max(at, self._last[upward])
            self.clock.after(at - self.clock.now, self._arrive, once, deliver)

    def _arrive(self, once: bool, deliver: Callable[[], object]) -> None:
        """What is lost in a cut is sent again, where it is said only once."""
        if self.broken:
            return
        if not self.worker.cut:
            deliver()
        elif once:
            self.clock.after(AGAIN_SECONDS, self._arrive, once, deliver)

    def break_off(self) -> None:
        """Both ends notice, each in its own time."""
        if self.broken:
            return
        self.broken = True
        late = 2.0 if self.weather.chance.random() < 0.1 else 0.0
        self.clock.after(self.weather.delay() + late, self.host.stream_ended, self)
        self.clock.after(self.weather.delay(), lambda: self.worker.awake(self.worker.session.on_stream_end, self))


class Groups:
    """The process groups: who has arrived to build which, and what is on its way between members."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.clock, self.weather = simulation, simulation.clock, simulation.weather
        self._arrived: dict[int, dict[SimWorker, Callable[[], object]]] = {}
        self._plans: dict[int, Any] = {}
        self._last: dict[tuple[SimWorker, SimWorker], float] = {}
        self.severed: set[tuple[SimWorker, SimWorker]] = set()
        self._met: set[int] = set()
        """Groups whose members were all there at once: who can reach all others has built it."""

    # ---- building

    def arrive(self, worker: SimWorker, plan: Any, done: Callable[[], object]) -> None:
        """A member is at the rendezvous of a plan's group; `done` is called when the group is built."""
        self._plans[plan.generation] = plan
        self._arrived.setdefault(plan.generation, {})[worker] = done
        self.clock.after(self.weather.delay(), self.look, plan.generation)

    def forget(self, generation: int) -> None:
        """A group whose members are dead, and whose number is given again."""
        self._arrived.pop(generation, None)
        self._met.discard(generation)

    def withdraw(self, worker: SimWorker, generation: int) -> None:
        self._arrived.get(generation, {}).pop(worker, None)

    def look(self, generation: int) -> None:
        """Built when all members are there at once; each learns it in its own time."""
        arrived, plan = self._arrived.get(generation, {}), self._plans[generation]
        members = [worker for worker in arrived if worker.alive and not worker.frozen]
        if generation not in self._met:
            if len(members) < plan.world_size:
                return
            if self.simulation.link_fault_within(members):
                self.simulation.report_link_fault(generation, members)
                return
            self._met.add(generation)
        for worker in [worker for worker in arrived if not self.missing(worker, plan)]:
            self.clock.after(self.weather.delay(), worker.awake, arrived.pop(worker))

    def missing(self, worker: SimWorker, plan: Any) -> list[SimWorker]:
        """Whom the building of a group waits for: who has not come, then who cannot be reached."""
        members = [self.simulation.process_of(member) for member in plan.members]
        others = [other for other in members if other is not None and other is not worker]
        if plan.generation in self._met:
            return [other for other in others if not self.simulation.links.joins(worker, other)]
        return [other for other in others if other not in self._arrived.get(plan.generation, {})]

    def look_again(self) -> None:
        for generation in list(self._arrived):
            self.look(generation)

    # ---- messages

    def send(self, source: SimWorker, to: SimWorker, key: tuple[int, str, int], payload: Any) -> None:
        """Key: generation, kind, boundary. To oneself it is there at once."""
        if to is source:
            to.training.keep(key, source, payload)
            return
        pair = source, to
        at = max(self.clock.now + self.weather.delay(), self._last.get(pair, 0.0))
        self._last[pair] = at
        self.clock.after(at - self.clock.now, self._deliver, source, to, key, payload)

    def _deliver(self, source: SimWorker, to: SimWorker, key: tuple[int, str, int], payload: Any) -> None:
        if source.died_at is not None and self.clock.now >= source.lost_after:
            return
        if (source, to) in self.severed:
            return
        if self.simulation.links.carries(source, to):
            self.deliver(source, to, key, payload)
        else:
            self.simulation.links.hold(source, to, key, payload)

    def deliver(self, source: SimWorker, to: SimWorker, key: tuple[int, str, int], payload: Any) -> None:
        to.awake(to.training.arrived, key, source, payload)

    def gone(self, worker: SimWorker, generation: int, members: list[SimWorker]) -> None:
        """A member's end of a group is closed, by its death or its abort: the others' operations fail in a moment."""
        for other in members:
            if other is not worker and other.alive and self.simulation.links.carries(worker, other):
                self.clock.after(self.weather.delay(), other.awake, other.training.peer_gone, generation, worker)
