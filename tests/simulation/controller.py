"""The controller's process: the real job machine, a store, a launcher and a prober, all of which can die or lie late.

Effects are carried out strictly in order, as the shell does; a crash may come between any two of them. What comes while
the store writes, or while the controller is late, lies in its inbox, and is one batch as it is in the shell. What is
durable goes through its JSON text whenever a controller starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from shoal_controller.core.machine.durable import Durable, Place
from shoal_controller.core.machine.effects import (
    Adopt,
    AskPlanner,
    Close,
    Effect,
    Kill,
    Note,
    Persist,
    Probe,
    Send,
    Spawn,
)
from shoal_controller.core.machine.events import (
    Connected,
    Disconnected,
    Event,
    Exited,
    MessageReceived,
    NeverStarted,
    Probed,
    SeatAsked,
    Spawned,
    Started,
    Tick,
    first_batch,
)
from shoal_controller.core.machine.job import Job
from shoal_controller.core.machine.machine import new_job, restore, step
from shoal_controller.core.machine.phases.waiting import rests_until
from shoal_protos.errors import UserError
from shoal_protos.messages import AskSeat, Refusal, Welcome

from .clock import SetClock
from .network import Stream
from .stored import StoredJob

if TYPE_CHECKING:
    from .simulation import Simulation
    from .worker import SimWorker

TICK_SECONDS = 0.1
CLUSTER = "store"


class ControllerHost:
    """See the module's text."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.clock, self.chance = simulation, simulation.clock, simulation.chance
        self.set_clock = SetClock(simulation)
        self.job: Job = new_job(simulation.spec, self.now)
        self.stored: Durable = self.job.durable
        """What the store must give back."""
        self.store = StoredJob(128 if simulation.still else Random(f"{simulation.seed} room").choice((1, 3, 128)))
        self._write(self.stored)
        self._parts = Random(f"{simulation.seed} parts")
        self.life = 0
        self.alive = False
        self.is_empty = False
        """Another controller stands in its place, whose store knows nothing."""
        self.crash_after: int | None = None
        self.crash_before: type | None = None
        """The kind of effect that it does not live to carry out."""
        self.streams: dict[int, Stream] = {}
        self.late = 0.0
        """Seconds by which every tick is late; whatever comes meanwhile lies in the inbox."""
        self.store_seconds = 0.0
        """How long a write takes, in the same way."""
        self._is_writing = False
        self._inbox: list[Event] = []
        self._prompt: Event | None = None
        """What the planner has answered at once: handled after the effects of the event that asked."""
        self._next_stream = 0

    @property
    def now(self) -> float:
        """By the clock of its machine."""
        return self.clock.now + self.set_clock.by

    # ---- its life

    def start(self) -> None:
        """With what is in the store, and nothing else."""
        if self.alive:
            return
        self.alive, self.is_empty, self._is_writing = True, False, False
        self.life += 1
        self.set_clock.begin_life(self.life)
        self.streams = {}
        durable = self.store.read()
        if durable != self.stored:
            self.simulation.watch.violated("the store gives back something else", "the controller")
        self.job = restore(durable, self.now)
        self.simulation.say("controller starts, life", self.life)
        self.simulation.promises.begins(self.life)
        self.simulation.planner.begin_life()
        self._handle([Started()])
        self.clock.after(TICK_SECONDS + self.late, self._tick, self.life)

    def put_back(self, backup: StoredJob) -> None:
        """The controller dies, and its store is what it was then."""
        self.crash()
        self.store, self.stored = backup, backup.read()
        self.simulation.say("the store is put back to generation", self.stored.last_generation)
        self.simulation.watch.put_back(self.stored)
        self.simulation.launcher.forget_the_dead()

    def crash(self) -> None:
        if not self.alive:
            return
        self.alive = False
        self._inbox.clear()
        self._prompt = None
        self.crash_after = self.crash_before = None
        self.simulation.say("controller dies")
        for stream in self.streams.values():
            stream.break_off()

    def _tick(self, life: int) -> None:
        if self.alive and self.life == life:
            is_due = self.now >= rests_until(self.job)
            if is_due and not any(isinstance(event, Tick) for event in self._inbox):
                self._inbox.append(Tick())
            if not self._is_writing:
                self._empty_inbox()
            self.clock.after(TICK_SECONDS + self.late, self._tick, life)

    # ---- events

    def dial(self, worker: SimWorker) -> Stream | None:
        if not self.alive:
            if self.is_empty:
                refusal = Refusal("there is no job job", unknown_job=True)
                self.clock.after(
                    self.simulation.weather.delay(), worker.awake, worker.session.on_message, None, refusal
                )
            return None
        self._next_stream += 1
        stream = self.streams[self._next_stream] = Stream(self.simulation, worker, self, self._next_stream)
        return stream

    def connected(self, stream: Stream, hello: object) -> None:
        stream.worker.last_message_at = self.clock.now
        self.feed(Connected(stream.number, hello))  # type: ignore[arg-type]

    def seat_asked(self, stream: Stream, ask: AskSeat) -> None:
        self.feed(SeatAsked(stream.number, ask))

    def receive(self, stream: Stream, message: object) -> None:
        stream.worker.last_message_at = self.clock.now
        self.feed(MessageReceived(stream.number, message))  # type: ignore[arg-type]

    def stream_ended(self, stream: Stream) -> None:
        if self.alive and self.life == stream.life and self.streams.pop(stream.number, None) is not None:
            self.feed(Disconnected(stream.number, "reset"))

    def request(self, event: Event) -> None:
        """An operator's request; the impossible is refused and changes nothing."""
        self.simulation.promises.asked(event)
        self._empty_inbox()
        before, life = self.job, self.life
        try:
            self._handle([event])
        except UserError as error:
            self.simulation.say("refused:", error)
            if self.job is not before:
                self.simulation.watch.violated("a refused request changed the job", "the controller")
        else:
            if self.alive and self.life == life:
                self.simulation.promises.accepted(event, self.job)

    def feed(self, event: Event) -> None:
        """What comes from outside."""
        if not self.alive:
            return
        self._inbox.append(event)
        if not (self.late or self._is_writing):
            self._empty_inbox()

    def _empty_inbox(self) -> None:
        while self._inbox:
            batch, self._inbox = first_batch(self._inbox, lambda event: event)
            self._handle(batch)

    def _has_written(self, life: int) -> None:
        if self.alive and self.life == life:
            self._is_writing = False
            if not self.late:
                self._empty_inbox()

    def _handle(self, events: Sequence[Event]) -> None:
        if not self.alive:
            return
        before = self.job
        self.job, effects = step(self.job, events, self.now)
        self.simulation.watch.stepped(before, events, self.job)
        if self.store_seconds and not self._is_writing and any(isinstance(effect, Persist) for effect in effects):
            self._is_writing = True
            self.clock.after(self.store_seconds, self._has_written, self.life)
        for effect in effects:
            if self._dies_at(effect):
                if isinstance(effect, Persist):
                    self._begin_to_write(self.job.durable)
                self.crash()
                return
            self._act(effect)
        self.simulation.watch.shows(self.job)
        if self._prompt is not None:
            event, self._prompt = self._prompt, None
            self._handle([event])

    def _dies_at(self, effect: Effect) -> bool:
        if self.crash_after is not None:
            self.crash_after -= 1
            return self.crash_after < 0
        return self.crash_before is not None and isinstance(effect, self.crash_before)

    def _write(self, durable: Durable) -> None:
        for transaction in self.store.write(durable):
            transaction()
        self.stored = durable

    def _begin_to_write(self, durable: Durable) -> None:
        """Some transactions of a change are carried out, never the last one."""
        *ahead, _ = self.store.write(durable)
        for transaction in ahead[: self._parts.randint(0, len(ahead))]:
            transaction()

    def _act(self, effect: Effect) -> None:
        simulation = self.simulation
        if isinstance(effect, Send):
            stream = self.streams.get(effect.connection)
            if stream is not None:
                message = effect.message
                if isinstance(message, Welcome | Refusal):
                    message = replace(message, cluster=CLUSTER)
                simulation.watch.sent(self.stored, message)
                stream.down(message)
        elif isinstance(effect, Persist):
            simulation.watch.stored(self.stored, self.job.durable)
            self._write(self.job.durable)
            simulation.promises.stored(self.stored)
        elif isinstance(effect, Note):
            if effect.kind == "claim_refused" and effect.worker not in simulation.liars:
                simulation.watch.violated("an honest worker was not believed", effect.message)
            if effect.kind != "survives":  # it tells what the job is made of, which is a transcript's first line
                simulation.say("controller:", effect.kind, "|", effect.message)
            simulation.links.noted(effect)
        elif isinstance(effect, Close):
            stream = self.streams.get(effect.connection)
            if stream is not None:
                self.clock.after(0.2, stream.break_off)
        elif isinstance(effect, Spawn):
            simulation.watch.spawns(self.stored, effect.worker)
            simulation.launcher.spawn(effect.worker)
        elif isinstance(effect, Adopt):
            self.clock.after(0.02, simulation.launcher.adopt, effect.workers, self.life)
        elif isinstance(effect, Kill):
            simulation.launcher.kill(effect.worker)
        elif isinstance(effect, AskPlanner):
            self._prompt = simulation.planner.ask(effect)
        elif isinstance(effect, Probe):
            self.clock.after(2 * simulation.weather.delay(), self._probe, effect, self.life)

    def _probe(self, probe: Probe, life: int) -> None:
        if self.life == life:
            refused = self.simulation.refuses(probe.address)
            reached = self.simulation.answers(probe.address, probe.incarnation)
            self.feed(Probed(probe.worker, probe.incarnation, refused, reached))


class Launcher:
    """Local processes: it starts them, sees them end while a controller lives, and finds them again after a restart.

    It is a part of the controller's process: what it was asked for and has not done is lost with that one.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.clock, self.chance = simulation, simulation.clock, simulation.chance
        self.started: dict[str, SimWorker] = {}
        self.unseen: set[str] = set()
        """Whose end no controller has seen: nobody knows how they ended."""
        self.gone: set[str] = set()
        """Whose machine is gone: nothing more is heard of their processes, which may run on for a while."""

    @property
    def _life(self) -> int:
        """0: no controller is there."""
        host = self.simulation.host
        return host.life if host.alive else 0

    def has(self, worker: str) -> bool:
        """Whether it was started, or is there to be."""
        return worker in self.started

    def spawn(self, worker: str) -> None:
        self.clock.after(0.05 + 0.2 * self.chance.random(), self._spawned, worker, self._life)

    def forget_the_dead(self) -> None:
        """Their ends were reported to a controller whose store is gone."""
        self.started = {worker: process for worker, process in self.started.items() if process.alive}
        self.gone &= self.started.keys()

    def _spawned(self, worker: str, life: int) -> None:
        if life == self._life:
            process = self.started.get(worker)  # of a store that was put back, and gives the id again
            if process is None or not process.alive:
                process = self.simulation.start_process(worker, launched=True)
            self.started[worker] = process
            self._tell(Spawned(worker, Place.of_process(process.pid, f"{worker}.log")))

    def kill(self, worker: str) -> None:
        self.clock.after(0.01, self._kill, worker, self._life)

    def _kill(self, worker: str, life: int) -> None:
        process = self.started.get(worker)
        if process is not None and life == self._life:
            process.end(-9, "killed by the launcher")

    def ended(self, process: SimWorker) -> None:
        for worker, started in self.started.items():
            if started is process:
                if not self._life:
                    self.unseen.add(worker)
                self.clock.after(0.02 + 0.1 * self.chance.random(), self._tell, self._exit(worker, process))

    def adopt(self, workers: tuple[str, ...], life: int) -> None:
        """Tell what became of the processes that an earlier controller started."""
        if life != self._life:
            return
        for worker, process in self.started.items():
            lives = Spawned(worker, Place.of_process(process.pid, f"{worker}.log"))
            self._tell(lives if process.alive else self._exit(worker, process))
        for worker in workers:
            if worker not in self.started:
                self._tell(NeverStarted(worker))

    def _exit(self, worker: str, process: SimWorker) -> Exited:
        if worker in self.unseen:
            return Exited(worker, None, "it ended while no controller watched it; its exit status is not known")
        return Exited(worker, process.exit_code, f"exit status {process.exit_code}")

    def _tell(self, event: Event) -> None:
        self.simulation.host.feed(event)
