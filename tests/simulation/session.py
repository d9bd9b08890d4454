"""The session half of a simulated worker: hello, heartbeats, and what it hears, carried out on its `Membership`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from shoal_protos.messages import (
    Ask,
    AskKind,
    Ending,
    Heartbeat,
    Hello,
    Open,
    Ping,
    PlanMessage,
    Prepare,
    Ready,
    Refusal,
    Request,
    RequestKind,
    Result,
    Shutdown,
    Status,
    Telemetry,
    Welcome,
)
from shoal_protos.plan import Plan

from .activity import activity, builds

if TYPE_CHECKING:
    from .network import Stream
    from .worker import SimWorker

RECONNECT_SECONDS = 0.4


class Session:
    """See the module's text."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker, self.membership = worker, worker.membership
        self.spec = worker.simulation.spec
        self.stream: Stream | None = None
        self.welcomed = False
        self.run = worker.simulation.spec.run if worker.launched else ""
        self.cluster = ""
        self.claims: Status | None = None
        """Of a liar: what it says of itself instead of the truth."""
        self.sequence = 0
        self._last_said: object = None
        self._beats = self._dials = 0
        self._asked: set[int] = set()
        self.drains = False
        self.result: Result | None = None
        self.telemetry = Telemetry(step_seconds=worker.simulation.step_seconds)

    def start_over(self) -> None:
        if self.stream is not None:
            self.stream.break_off()
        self.stream, self.welcomed, self.drains, self.result = None, False, False, None
        self.dial_after(RECONNECT_SECONDS)

    def process_ended(self) -> None:
        if self.stream is not None and not self.worker.cut:
            self.stream.break_off()
        self.stream = None

    # ---- speaking

    def dial_after(self, seconds: float) -> None:
        self._dials += 1
        self.worker.after(seconds, self.connect, self._dials)

    def connect(self, dials: int) -> None:
        """Open a stream and say hello; again and again while nobody answers."""
        worker = self.worker
        if dials != self._dials or (self.stream is not None and not self.stream.broken and self.welcomed):
            return
        if self.stream is not None:
            self.stream.break_off()
        self.welcomed = False
        self.stream = worker.simulation.dial(worker)
        if self.stream is not None:
            claimed, host = self.membership.worker or worker.asked_id, f"host{worker.pid}"
            hello = Hello(
                1, "job", claimed, worker.incarnation, worker.address, host, worker.pid,
                f"domain{worker.pid % 3}", worker.simulation.description, self.status(), run=self.run,
            )  # fmt: skip
            self.stream.up(self.stream.host.connected, self.stream, hello)
        self.dial_after(RECONNECT_SECONDS * (1 + worker.chance.random()))

    def beat(self, beats: int = 0) -> None:
        """A heartbeat an interval; `beats` ends the line of a session that was started over."""
        if beats != self._beats:
            return
        self.say_status()
        if self.result is not None:
            self.say(self.result)
        if self.drains:
            self.say(Request(RequestKind.DRAIN, 5.0))
        self.worker.after(self.spec.heartbeat_seconds, self.beat, beats)

    def say(self, message: object) -> None:
        if self.stream is not None and self.welcomed:
            self.stream.up(self.stream.host.said, self.stream, message)

    def say_status(self, echo: int = 0) -> None:
        self._last_said = self._key()
        median = self.telemetry.step_seconds if self.worker.training.step > 0 else 0.0
        telemetry = replace(self.telemetry, step_seconds_median=median, saves=self.worker.training.saving.told)
        self.say(Heartbeat(self.status(), telemetry, echo, activity(self.worker), builds(self.worker)))

    def changed(self) -> None:
        """Any change but the step's is said at once."""
        if self._key() != self._last_said:
            self.say_status()

    def _key(self) -> object:
        m, t, s = self.membership, self.worker.training, self.worker.training.saving
        knows = s.knows, s.damage, t.copies.told
        return m.generation, m.point, m.newest_known, t.broken, t.done, t.ended, self.drains, knows

    def status(self) -> Status:
        m, t, s = self.membership, self.worker.training, self.worker.training.saving
        self.sequence += 1
        if self.claims is not None:
            return replace(self.claims, sequence=self.sequence)
        return Status(
            self.sequence, m.generation, m.point, m.newest_known, t.step, t.committed_in, t.boundary, t.holds(),
            t.current, tuple(sorted(t.broken)), t.done, t.ended, self.drains, checkpoint=s.knows,
            unreadable_checkpoint=s.damage,
            corrupt=t.copies.told,
        )  # fmt: skip

    # ---- hearing

    def stream_ended(self, stream: Stream) -> None:
        if stream is self.stream:
            self.stream, self.welcomed = None, False
            self.dial_after(RECONNECT_SECONDS * self.worker.chance.random())

    def heard(self, stream: Stream, message: object) -> None:
        """Even on a stream that was left: a late message must do no harm."""
        hear = HEARS.get(type(message))
        if hear is not None:
            hear(self, message)
        if self.worker.alive:
            self.changed()

    def _welcome(self, message: Welcome) -> None:
        saving = self.worker.training.saving
        if self.membership.worker not in ("", message.worker):
            return  # meant for what this process was before it started over
        self.membership.worker, self.run, self.cluster = message.worker, message.run, message.cluster
        if self.membership.is_joiner:
            saving.generations = message.opened_generations
            saving.look()
        if not self.welcomed:
            self.welcomed = True
            self._beats += 1
            self.beat(self._beats)

    def _ping(self, message: Ping) -> None:
        self.say_status(message.number)

    def _prepare(self, message: Prepare) -> None:
        training = self.worker.training
        groups = self._groups()
        if self.membership.on_prepare(message.generation):
            training.halt(groups)
            training.code.run(training.user_seconds(), training.report, message.generation)
        elif message.generation == self.membership.promised and training.reported == message.generation:
            training.report(message.generation)

    def _groups(self) -> set[int]:
        """The numbers of all groups that a stop aborts."""
        m = self.membership
        plans = [plan for plan in (m.next, m.recovery, m.begins, *m.kept.values()) if plan is not None]
        return {m.generation, *(plan.generation for plan in plans)}

    def _plan(self, message: PlanMessage) -> None:
        plan, training = message.plan, self.worker.training
        if plan.recovery is not None:
            if training.reported >= plan.generation and self.membership.on_recovery(plan):
                training.build_recovery(plan)
        else:
            self.hear_plan(plan)

    def hear_plan(self, plan: Plan) -> None:
        """A planned change; also one that waited for the end of a vote."""
        before = self.membership.next
        if self.membership.on_planned(plan):
            self.worker.training.build_planned(plan, before)

    def _open(self, message: Open) -> None:
        if self.membership.on_open(message.generation):
            self.worker.training.opened()

    def _ask(self, message: Ask) -> None:
        if message.kind is AskKind.STOP:
            self.worker.training.stop_asked = True
        elif message.number not in self._asked:
            self._asked.add(message.number)
            self.worker.training.saving.ask()

    def _shutdown(self, message: Shutdown) -> None:
        worker = self.worker
        worker.say("is told", message.ending.value, message.reason)
        if message.ending is Ending.DRAINED:
            worker.simulation.watch.drained(worker, message.reason)
        if message.ending is Ending.START_OVER:
            worker.start_over()
        elif message.ending is Ending.FAILED:
            worker.end(1, message.ending.value)
        elif seconds := worker.training.saving.closes_in():
            worker.training.over = True
            worker.after(seconds, worker.end, 0, message.ending.value)
        else:
            worker.end(0, message.ending.value)

    def _refusal(self, message: Refusal) -> None:
        """● Only the store that has welcomed a worker of a world can end it."""
        is_ours = message.cluster == self.cluster
        if message.ends_members and is_ours if self.membership.generation else message.final:
            self.worker.end(2, message.sentence)

    def ready(self, generation: int) -> None:
        """READY, and the same in a heartbeat."""
        if self.membership.report_ready(generation):
            self.say(Ready(generation, self.status()))
            self.changed()


HEARS: dict[type, Callable[[Session, object], None]] = {
    Welcome: Session._welcome,
    Ping: Session._ping,
    Prepare: Session._prepare,
    PlanMessage: Session._plan,
    Open: Session._open,
    Ask: Session._ask,
    Shutdown: Session._shutdown,
    Refusal: Session._refusal,
}
