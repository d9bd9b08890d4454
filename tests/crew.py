"""Several real engines in one process, each on a thread of its own, and the real job machine: all but the sockets.

    with Crew("abc", options) as crew:
        crew.train_to(3)
        crew.kill("b")
        assert crew.finish() == undisturbed(options)

One thread runs at a time and gives the lock away only where it waits (its random state it keeps); so everything can be
looked at between two waits, every post is seen, and a fault can strike at any point. Time is virtual: when nothing is
left to be done, everybody's heart beats and time goes on.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from crew_link import CrewLink
from integration.scripts import Model, Samples, config, optimizer_of
from memory_group import MemoryGroup, Wire, group_on
from shoal.config.load import Beside, load_config
from shoal.data.data_workers import HERE
from shoal.data.fetch import Fetcher
from shoal.data.seeds import RandomState
from shoal.data.stream_source import source_of
from shoal.optim.hyper import take_over
from shoal.process.device import HOST, Device
from shoal.process.faults import Faults, PlantedFault
from shoal.process.numerics import make_exact
from shoal.session.link import Link
from shoal.session.link_choice import AloneLink
from shoal.state.training_state import NO_STEP, Limits, TrainingState
from shoal.training.activation_checkpointing import checkpoint_activations
from shoal.training.engine import Engine
from shoal.training.exit import _Ending
from shoal.training.residency import residency_of
from shoal.training.start import _description
from shoal_controller.core.machine import events
from shoal_controller.core.machine.effects import AskPlanner, Note, Probe, Send
from shoal_controller.core.machine.job import Job
from shoal_controller.core.machine.machine import new_job, step
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.core.planning.question import answer
from shoal_protos.errors import UserError
from shoal_protos.messages import Hello, MemberState, Status
from torch import nn

PATIENCE_SECONDS = 100.0
"""Far above what anything takes here; a busy machine needed more than 30, and a test ends at 120 without a story."""
QUIET_SECONDS = 0.01
"""When nothing has happened for so long, virtual time goes on by a heartbeat."""

ONE_AT_A_TIME = threading.RLock()
"""Held by the thread that runs: random state is the process's, and two that run at once spoil each other's bits."""
_open: list[Crew] = []  # crews whose threads may run


def _model() -> nn.Module:
    """With dropout and batch normalization, tied, frozen and unused parameters."""
    return Model(0.1, True)


def _scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


@dataclass(frozen=True)
class Task:
    """What is trained. `options` are those of integration/scripts.py."""

    options: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = _model
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = optimizer_of
    scheduler: Callable[[torch.optim.Optimizer], Any] = _scheduler
    prepare: Callable[[Engine], None] = lambda _: None
    """Called before the loop."""
    in_loop: Callable[[Engine], None] = lambda _: None
    """Called before each micro-batch's forward."""
    step: Callable[[Engine], object] = Engine.step
    """What the loop does at a micro-batch's end."""
    data: Callable[[], Any] = lambda: Samples(40)
    device: Callable[[], Device] = lambda: HOST
    """A worker's own."""
    body: Callable[[Engine, Any], None] | None = None
    """All that the loop does with a batch, in place of forward, backward and `step`."""
    script: Callable[[Engine, Callable[[], None]], None] | None = None
    """All of the script after the engine is made. It is given what must be called before each micro-batch."""
    whole: Callable[[Opened], None] | None = None
    """All of the script, which makes the engine itself."""


@dataclass(frozen=True)
class Opened:
    """What a script that makes its engine itself has of its process."""

    link: Link
    faults: Faults
    made: Callable[[Engine], None]
    """To be called with the engine, before its loop."""
    before: Callable[[], None]
    """To be called before each micro-batch."""


def engine_of(task: Task, link: Link, faults: Faults) -> Engine:
    """As `shoal.initialize` makes it, with another link and without hooks at the process's exit."""
    _check_turn()
    beside = Beside(open_end=task.options.get("max_steps", 0) is None)
    settled = load_config(config({"lanes": 4, "dropout": 0.1, **task.options}), beside)
    make_exact(settled.exact, settled.torch_threads)
    source = source_of(task.data(), None, settled, HERE)
    limits = Limits.of(settled, source.sampler.last_step(settled.max_steps, settled.epochs))
    torch.manual_seed(0)
    model = task.model()
    checkpoint_activations(model, settled)
    optimizer, by_stage = task.optimizer(model), residency_of(settled.stage)
    state = TrainingState(model, optimizer, task.scheduler(optimizer), limits, by_stage, task.device())
    fetcher = Fetcher(source, None, settled.seed, state.device.kind)
    status = Status(sequence=0, generation=0, state=MemberState.WARMING_UP, promised=0, step=-1, committed_in=0)
    link.introduce(_description(settled, state, optimizer, source.sampler.samples, are_others=not link.alone), status)
    take_over(optimizer, state.scheduler, lambda: state.step > NO_STEP)
    engine = Engine(settled, state, link, fetcher, faults)
    engine.parts.loading.begin(engine.parts.status.publish)
    return engine


def _check_turn() -> None:
    assert not _open or ONE_AT_A_TIME._is_owned(), "beside a crew, train within `with ONE_AT_A_TIME:`"  # type: ignore[attr-defined]


def train(engine: Engine, task: Task, before: Callable[[], None]) -> None:
    """A user's loop. `before`: called before each micro-batch."""
    _check_turn()
    task.prepare(engine)
    if task.script is not None:
        task.script(engine, before)
        return
    for batch in engine:
        before()
        task.in_loop(engine)
        if task.body is not None:
            task.body(engine, batch)
            continue
        loss = engine.module(**batch)
        engine.backward(loss)
        task.step(engine)


def undisturbed(task: Task) -> str:
    """The fingerprint of a world of one."""
    if task.whole is not None:
        engines: list[Engine] = []
        with ONE_AT_A_TIME:
            task.whole(Opened(AloneLink(), Faults([]), engines.append, lambda: None))
            return str(engines[0].fingerprint())
    with ONE_AT_A_TIME:
        engine = engine_of(task, AloneLink(), Faults([]))
        train(engine, task, lambda: None)
        engine.script_end.reach()
        return str(engine.fingerprint())


class Killed(BaseException):
    """A worker's process is no more."""


class Strikes(Faults):
    """The faults of one worker; `also` is called at every point, before a fault strikes there."""

    def __init__(self, planted: list[PlantedFault], also: Callable[[str, int], None]) -> None:
        super().__init__(planted)
        self._also = also

    def at(self, point: str, step: int) -> None:
        self._also(point, step)
        super().at(point, step)

    def _act(self, action: str) -> None:
        if action == "kill":
            raise Killed
        super()._act(action)


class Worker:
    """One process of the crew: a thread, an engine, a link."""

    def __init__(self, crew: Crew, name: str, task: Task) -> None:
        self.crew, self.name, self.task = crew, name, task
        self.link = CrewLink(crew, name, self.wait)
        self.engine: Engine
        self.killed = False
        self.failure = ""
        self.seen: list[str] = []
        """Points of steps and changes, in order."""
        self.thread = threading.Thread(target=self._run, name=f"worker {name}", daemon=True)
        self.thread.start()

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()

    @property
    def planned(self) -> bool:
        """Whether a fault that was planted for it has not struck yet."""
        return bool(self.engine.context.faults._planted)

    def wait(self, until: Callable[[], bool]) -> None:
        """Gives the lock away, but not its random state. Raises `Killed` when its process is to be no more."""
        if not until():
            random = RandomState.save()
            self.crew.changed.wait_for(lambda: self.killed or until())
            random.restore()
        if self.killed:
            raise Killed

    def at(self, point: str, step: int) -> None:
        self.seen.append(point)
        for watcher in self.crew.watchers:
            watcher(self, point, step)

    def _run(self) -> None:
        with self.crew.changed:
            try:
                self._live()
            except Killed:
                self.killed = True
            except BaseException:
                self.failure = traceback.format_exc()
            finally:
                self._stop_saving()
                self.link.abort_all()
                self.crew.changed.notify_all()

    def _stop_saving(self) -> None:
        """A killed process leaves its file as it is."""
        saver = self.engine.parts.saving._saver if hasattr(self, "engine") else None
        if saver is not None and self.killed:
            saver.join()

    def _live(self) -> None:
        """As the interpreter runs a script to its end and past it."""
        faults = Strikes([], self.at)
        if self.task.whole is not None:
            opened = Opened(self.link, faults, lambda engine: setattr(self, "engine", engine), self._pass_the_gate)
            self._end_after(self.task.whole, opened)
            return
        try:
            self.engine = engine_of(self.task, self.link, faults)
        except UserError as error:
            self.failure = str(error)
            return
        self._end_after(train, self.engine, self.task, self._pass_the_gate)

    def _end_after(self, script: Callable[..., None], *arguments: Any) -> None:
        failure: Exception | None = None
        try:
            script(*arguments)
            self.engine.fingerprint()
        except SystemExit:
            self.crew.note(f"{self.name} leaves its loop")
        except AssertionError as error:
            self.crew.broken = self.crew.broken or error
            raise
        except Exception as error:
            failure, self.failure = error, traceback.format_exc()
        if hasattr(self, "engine"):
            ending = _Ending(self.engine)
            ending._failure = failure
            ending.at_exit()

    def _pass_the_gate(self) -> None:
        """Not before the controller has come round, and no step that is not allowed."""
        crew, rounds = self.crew, self.crew.rounds
        crew.changed.notify_all()
        self.wait(
            lambda: self.link.stopping or (crew.rounds > rounds and self.engine.context.state.step < crew.allowed),
        )


class Crew:
    """A job; its workers are named by letters."""

    def __init__(
        self,
        names: str,
        task: Task,
        odd: Mapping[str, Task] | None = None,
        domains: Mapping[str, str] | None = None,
    ) -> None:
        """By name: `odd`, workers whose task is another one; `domains`, those that share a failure domain."""
        self.changed = threading.Condition(ONE_AT_A_TIME)
        self.task, self.names, self._odd, self.domains = task, names, odd or {}, domains or {}
        self.watchers: list[Callable[[Worker, str, int], None]] = []
        self.workers: dict[str, Worker] = {}
        self.wires: dict[int, Wire] = {}
        self.events: list[tuple[str, str]] = []
        self.broken: AssertionError | None = None
        """The first assertion that failed on a worker's thread; the test fails of it."""
        self.allowed = 0
        """Steps that may be trained."""
        self.now, self.beats, self.rounds, self.group_on = 0.0, 0, 0, group_on
        self.job: Job = new_job(JobSpec("job", wanted=len(names)), 0.0)
        self._links: dict[int, CrewLink] = {}
        self._connections = 0

    def __enter__(self) -> Self:
        _open.append(self)
        with self.changed:
            self._feed(events.Started())
            for name in self.names:
                self.add(name, self._odd.get(name))
        return self

    def __exit__(self, *_: object) -> None:
        with self.changed:
            for worker in self.workers.values():
                worker.killed = True
            self.changed.notify_all()
        for worker in self.workers.values():
            worker.thread.join(PATIENCE_SECONDS)
            if hasattr(worker, "engine"):
                worker.engine.parts.step.parameters.forget()  # the process has hooks for all models
        _open.remove(self)

    # ---- what a test does

    def add(self, name: str, task: Task | None = None) -> Worker:
        """Returns when it has said hello."""
        with self.changed:
            worker = self.workers[name] = Worker(self, name, task or self.task)
            self.changed.wait_for(lambda: worker.link in self._links.values() or not worker.alive, PATIENCE_SECONDS)
        return worker

    def kill(self, name: str) -> None:
        """Wherever it waits now."""
        with self.changed:
            self.workers[name].killed = True
            self.changed.notify_all()
        self.workers[name].thread.join(PATIENCE_SECONDS)

    def plant(self, name: str, step: int, point: str, action: str = "kill") -> None:
        """A fault for that worker, once it stands there in that step or a later one."""
        with self.changed:
            self.workers[name].engine.context.faults._planted.append(PlantedFault(name, step, point, action))

    def request(self, event: events.Event) -> None:
        """An operator's."""
        with self.changed:
            self._feed(event)

    def allow(self, step: int = 1 << 30) -> None:
        """Steps up to this one may be trained."""
        with self.changed:
            self.allowed = max(self.allowed, step)
            self.changed.notify_all()

    def train_to(self, step: int) -> None:
        """Until every member that lives has committed that step; no more are begun."""
        self.allow(step)
        self.until(f"step {step}", lambda: all(w.engine.global_step >= step for w in self.members()))

    def train_until(self, goal: str, seen: Callable[[], bool]) -> None:
        """Step by step until then; no more are begun."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not seen():
            assert time.monotonic() < deadline, f"waited for {goal}\n{self.story()}"
            self.train_to(self.allowed + 1)

    def finish(self) -> str:
        """Until the job is over; returns its fingerprint."""
        self.allow()
        self.until("the end", lambda: self.job.durable.phase.is_over)
        assert self.job.durable.phase.value == "succeeded", self.story()
        return self.job.durable.fingerprint

    def until(self, goal: str, seen: Callable[[], bool]) -> None:
        """Everything goes on until then."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        with self.changed:
            while not seen():
                if self.broken is not None:
                    raise self.broken
                assert time.monotonic() < deadline, f"waited for {goal}\n{self.story()}"
                did = self._come_round()
                self.changed.notify_all()
                if not did and not self.changed.wait(QUIET_SECONDS):
                    self._beat()

    def beat(self, intervals: int) -> None:
        """So many heartbeat intervals pass."""
        last = self.beats + intervals
        self.until(f"{intervals} heartbeats", lambda: self.beats >= last)

    def members(self) -> list[Worker]:
        """Those of the world that live."""
        world = self.job.durable.current
        names = [member.worker for member in world.members] if world is not None else []
        living = [w for w in self.workers.values() if w.alive and not w.killed and w.link.worker in names]
        return living or [w for w in self.workers.values() if w.alive and not w.killed]

    def at_rest(self) -> bool:
        """All members are in one world, every block has its copies, and no change is under way."""
        durable = self.job.durable
        world = durable.current
        if world is None or world.fills or durable.planned or self.job.attempt is not None:
            return False
        return all(worker.link.own.generation == world.generation for worker in self.members())

    def note(self, sentence: str) -> None:
        self.events.append(("crew", sentence))

    def story(self) -> str:
        lines = [f"{kind}: {message}" for kind, message in self.events]
        lines += [f"{w.name}: {w.link.own.state.value} {w.seen[-5:]} {w.failure}" for w in self.workers.values()]
        return "\n".join(lines)

    # ---- the controller

    def connect(self, link: CrewLink) -> None:
        """A stream with its hello, and with all of it where that is asked for."""
        self._connections += 1
        connection = self._connections
        self._links[connection] = link
        self._feed(events.Connected(connection, link.dialogue.say_hello()))
        if not link.dialogue.welcomed:
            self._carry(connection, link)

    def _carry(self, connection: int, link: CrewLink) -> bool:
        """What the worker has to say; whether it was anything."""
        messages = link.take_outgoing() if not link.muted else []
        for message in messages:
            kind = events.Connected if isinstance(message, Hello) else events.MessageReceived
            self._feed(kind(connection, message))
        return bool(messages)

    def _feed(self, event: events.Event) -> None:
        self.job, effects = step(self.job, [event], self.now)
        answers: list[events.Event] = []
        for effect in effects:
            if isinstance(effect, Send):
                link = self._links.get(effect.connection)
                if link is not None and not link.muted:
                    link.on_message(effect.message)
            elif isinstance(effect, Note):
                self.events.append((effect.kind, effect.message))
            elif isinstance(effect, Probe):
                dead = self._is_dead(effect.address)
                answers.append(events.Probed(effect.worker, effect.incarnation, refused=dead, reached=not dead))
            elif isinstance(effect, AskPlanner):
                answers.append(events.PlannerAnswered(effect, answer(effect.question)))
        for answered in answers:
            self._feed(answered)

    def _is_dead(self, address: str) -> bool:
        return all(not w.alive or w.killed for w in self.workers.values() if w.link.address == address)

    def _come_round(self) -> bool:
        """Carry what is said and built; whether there was anything."""
        did = False
        self.rounds += 1
        for connection, link in tuple(self._links.items()):
            worker = next(w for w in self.workers.values() if w.link is link)
            if not worker.alive:
                del self._links[connection]
                self._feed(events.Disconnected(connection, "the process is gone"))
                did = True
                continue
            did |= self._carry(connection, link)
            did |= link.look_for_first_message()
        return self._meet() or did

    def _meet(self) -> bool:
        """Groups are built where all members have come."""
        plans = {plan.generation: plan for link in self._links.values() for plan in link.plans.values()}
        for generation, plan in plans.items():
            come = (link for link in self._links.values() if generation in link.plans and generation not in link.groups)
            there = {link.incarnation: link for link in come}
            links = [there.get(member.incarnation) for member in plan.members]
            if all(links):
                wire = self.wires[generation] = Wire(plan.world_size, self.changed)
                for rank, link in enumerate(links):
                    assert link is not None
                    worker = next(w for w in self.workers.values() if w.link is link)
                    device = worker.engine.context.state.device
                    link.on_built(plan, self.group_on(device, MemoryGroup(wire, rank, worker.wait)))
                return True
        return False

    def _beat(self) -> None:
        """A heartbeat interval passes."""
        self.now += 1.0
        self.beats += 1
        for link in self._links.values():
            link.dialogue.beat()
        self._feed(events.Tick())
        self.changed.notify_all()
