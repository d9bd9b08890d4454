"""Drives the job machine by hand: workers that say exactly what a test wants, and the effects of every event."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from shoal_controller.core.machine.durable import Durable
from shoal_controller.core.machine.effects import AskPlanner, Effect, Kill, Note, Send, Spawn
from shoal_controller.core.machine.events import (
    Connected,
    Disconnected,
    Event,
    Exited,
    MessageReceived,
    PlannerAnswered,
    PlannerBegan,
    Probed,
    Started,
    Tick,
)
from shoal_controller.core.machine.figures import series_key
from shoal_controller.core.machine.machine import new_job, restore, step, view
from shoal_controller.core.machine.spec import JobSpec, JobView
from shoal_controller.core.machine.stored_form import changed_records, durable_from, state_of
from shoal_controller.core.planning.question import answer
from shoal_protos.activity import Activity, StepPhase
from shoal_protos.description import Description
from shoal_protos.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    Inventory,
    MemberState,
    Status,
    Telemetry,
    ToWorker,
    Welcome,
)
from shoal_protos.plan import Plan
from shoal_protos.runs import NO_BLOCKS, every

MADE_OF = Description(8, 8, 4096, 1 << 15, 1, 0, 100, (), "AdamW", {}, {}, False, False)
NEW = Status(0, 0, MemberState.WAITING, 0, -1, 0)
RUN = "run-1"


def stored(durable: Durable) -> tuple[str, dict[str, str]]:
    """The state and the records that the store has of it."""
    records = {name: text for name, text in changed_records(None, durable).items() if text is not None}
    return json.dumps(state_of(durable)), records


def through_the_store(durable: Durable) -> Durable:
    """What another controller finds."""
    state, records = stored(durable)
    return durable_from(json.loads(state), records)


class Driver:
    """One job. `said` and `done` are the messages and other effects of the last event."""

    def __init__(self, wanted: int = 2, made_of: Description = MADE_OF, **spec: Any) -> None:
        self.spec = JobSpec("job", wanted, **{"run": RUN, **spec})
        self.made_of = made_of
        self.job = new_job(self.spec, 0.0)
        self.now = 0.0
        self.effects: list[Effect] = []
        self.connections: dict[str, int] = {}
        self.statuses: dict[str, Status] = {}
        self.activities: dict[str, tuple[Activity, float]] = {}
        """What training threads do, and since when."""
        self.builds: dict[str, tuple[tuple[Activity, float], ...]] = {}
        self.welcomed: set[str] = set()
        """Who knows the run."""
        self.sequence = 0
        self.questions: list[AskPlanner] = []
        """What the planner was asked, oldest first."""
        self.planner_answers = True
        """Whether it does, at once."""
        self.planner_begins = True
        """Whether it takes up at once what it does not answer."""
        self._next = 0
        self.feed(Started())

    def feed(self, event: Event) -> list[Effect]:
        """All effects of an event; the planner answers at once, if it does at all."""
        self.job, self.effects = step(self.job, [event], self.now)
        for asked in [effect for effect in self.effects if isinstance(effect, AskPlanner)]:
            self.effects.remove(asked)
            self.questions.append(asked)
            if self.planner_answers:
                before = self.effects
                self.effects = [*before, *self.feed(PlannerAnswered(asked, answer(asked.question)))]
            elif self.planner_begins:
                before = self.effects
                self.effects = [*before, *self.feed(PlannerBegan(asked.number))]
        return self.effects

    def wait(self, seconds: float, beating: bool = True) -> list[Effect]:
        """Time passes, in which all say their heartbeats; all effects of it."""
        effects: list[Effect] = []
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            if beating:
                for worker in list(self.connections):
                    effects += self.beat(worker)
            effects += self.feed(Tick())
        self.effects = effects
        return effects

    def tick(self) -> list[Effect]:
        return self.feed(Tick())

    def restart(self) -> None:
        """Another controller, with what is in the store."""
        self.job = restore(through_the_store(self.job.durable), self.now)
        self.connections = {}
        self.feed(Started())

    # ---- workers

    def hello(self, worker: str, **fields: Any) -> list[Effect]:
        status = fields.pop("status", self.statuses.get(worker, NEW))
        hello = Hello(
            PROTOCOL_VERSION, "job", worker, f"inc-{worker}", f"{worker}:1", "host", 7, "", self.made_of, status,
            run=RUN if worker in self.welcomed else "",
        )  # fmt: skip
        self._next += 1
        self.connections[worker] = self._next
        self.statuses[worker] = status
        effects = self.feed(Connected(self._next, replace(hello, **fields), release="0.1.0"))
        self.welcomed |= {
            effect.message.worker
            for effect in effects
            if isinstance(effect, Send) and isinstance(effect.message, Welcome)
        }
        return effects

    def beat(self, worker: str, telemetry: Telemetry | None = None, **fields: Any) -> list[Effect]:
        self.sequence += 1
        status = self.statuses[worker] = replace(self.statuses[worker], sequence=self.sequence, **fields)
        activity, since = self.activities.get(worker, (Activity(), self.now))
        builds = [replace(build, seconds=self.now - at) for build, at in self.builds.get(worker, ())]
        activity = replace(activity, seconds=self.now - since)
        return self.say(worker, Heartbeat(status, telemetry or Telemetry(), 0, activity, tuple(builds)))

    def does(self, worker: str, boundary: int, phase: StepPhase, *waits_for: str) -> None:
        """From now on this is what its training thread does in the world that it is in."""
        generation = self.statuses[worker].generation
        self.activities[worker] = Activity(generation, boundary, phase, 0, waits_for), self.now

    def builds_a_group(self, worker: str, generation: int, *waits_for: str) -> None:
        """From now on it builds this group, or has built it."""
        phase = StepPhase.BUILDING if waits_for else StepPhase.BUILT
        self.builds[worker] = ((Activity(generation, 0, phase, 0, waits_for), self.now),)

    def say(self, worker: str, message: Any) -> list[Effect]:
        return self.feed(MessageReceived(self.connections[worker], message))

    def die(self, worker: str) -> None:
        """Its stream breaks, and its host refuses its port."""
        self.feed(Disconnected(self.connections.pop(worker), "reset"))
        self.feed(Probed(worker, f"inc-{worker}", refused=True, reached=True))

    def exit(self, worker: str, code: int | None = -9, why: str = "killed", tail: str = "") -> list[Effect]:
        self.connections.pop(worker, None)
        return self.feed(Exited(worker, code, why, tail))

    # ---- the way to a world

    def start(self, workers: int) -> None:
        """A world of so many trains its first steps."""
        for number in range(workers):
            self.hello(f"w{number}")
        self.recover()

    def recover(self) -> None:
        """Everybody asked stops, tells what it holds, and gets ready; the world opens and trains."""
        attempt = self.job.attempt
        assert attempt is not None
        for worker, status in list(self.statuses.items()):
            if worker in self.connections:
                self.stop(worker, status)
        plan = self.planned()
        for member in plan.members:
            self.beat(member.worker, state=MemberState.READY, promised=plan.generation)
        for member in plan.members:
            self.train(member.worker, plan)

    def stop(self, worker: str, status: Status) -> None:
        attempt = self.job.attempt
        if attempt is None:
            return
        point = MemberState.STOPPED if status.generation else MemberState.WAITING
        self.beat(worker, state=point, promised=attempt.generation)
        held = status.holds if status.step >= 0 else NO_BLOCKS
        parameters = every(self.made_of.blocks) if status.step >= 0 else NO_BLOCKS
        record = b"r" if status.step > 0 else b""
        self.say(
            worker,
            Inventory(
                attempt.generation,
                status.generation,
                status.step,
                status.committed_in,
                record,
                held,
                NO_BLOCKS,
                parameters,
            ),
        )

    def train(self, worker: str, plan: Plan, steps: int = 1) -> None:
        """It is in the plan's world and has committed steps in it."""
        rank = plan.rank_of(worker, f"inc-{worker}")
        assert rank is not None
        before = plan.recovery.step if plan.recovery is not None else self.statuses[worker].step
        self.beat(
            worker, generation=plan.generation, state=MemberState.TRAINING, promised=plan.generation,
            step=before + steps, committed_in=plan.generation, boundaries=steps,
            holds=plan.shares[rank].keeps,
        )  # fmt: skip

    def planned(self) -> Plan:
        """The plan of the recovery under way."""
        assert self.job.attempt is not None and self.job.attempt.plan is not None, self.job.attempt
        return self.job.attempt.plan

    # ---- what came of it

    def messages_to(self, worker: str) -> list[ToWorker]:
        connection = self.connections.get(worker)
        return [
            effect.message for effect in self.effects if isinstance(effect, Send) and effect.connection == connection
        ]

    def of(self, *kinds: type) -> list[Any]:
        return [effect for effect in self.effects if isinstance(effect, kinds)]

    @property
    def spawned(self) -> list[str]:
        return [effect.worker for effect in self.of(Spawn)]

    @property
    def killed(self) -> list[str]:
        return [effect.worker for effect in self.of(Kill)]

    @property
    def notes(self) -> list[str]:
        return [effect.message for effect in self.of(Note)]

    def counted(self, metric: str, **labels: str) -> float:
        """What a counter shows."""
        return self.view.figures.counters.get(series_key(metric, labels), 0.0)

    def observed(self, metric: str, **labels: str) -> tuple[int, float]:
        """How many observations a histogram shows, and their sum."""
        series = self.view.figures.histograms.get(series_key(metric, labels))
        return (sum(series.buckets), series.total) if series is not None else (0, 0.0)

    @property
    def view(self) -> JobView:
        return view(self.job, self.now)


def training(workers: int = 3, mirrors: int = 1, made_of: Description = MADE_OF, **spec: Any) -> Driver:
    """A job whose first world has trained for a second."""
    job = Driver(wanted=workers, made_of=replace(made_of, mirrors=mirrors), **spec)
    job.start(workers)
    job.wait(1)
    return job


def notes(effects: list[Effect], kind: str) -> list[str]:
    """Messages of the events of one kind."""
    return [effect.message for effect in effects if isinstance(effect, Note) and effect.kind == kind]


def cut(job: Driver, one: str, other: str) -> None:
    """Nothing gets through between these two any more."""
    job.does(one, 2, StepPhase.VOTE, other)
    job.does(other, 2, StepPhase.VOTE, one)
    for worker in set(job.connections) - {one, other}:
        job.does(worker, 2, StepPhase.HAND_OUT, one)
