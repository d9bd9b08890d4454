"""The session half of a simulated worker: a driver of the real `Dialogue`, as session/shared.py is one.

What goes out and what a message means is the dialogue's. Here are the streams, the timers, and what becomes of its
effects: a group is built or aborted, and the training half does what the training thread finds in its inbox.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.session.dialogue import Abort, Build, Deliver, Dialogue, Effect, ProcessInfo
from shoal.session.link import Asked, Ended, Item, Opened, Stopped
from shoal_protos.activity import Activity
from shoal_protos.messages import (
    START_AGAIN,
    AskKind,
    Describe,
    Ending,
    Heartbeat,
    Hello,
    Inventory,
    Ready,
    Result,
    Status,
    Telemetry,
    ToController,
    ToWorker,
    Welcome,
)
from shoal_protos.plan import Plan

from .activity import activity, builds

if TYPE_CHECKING:
    from .network import Stream
    from .worker import SimWorker

RECONNECT_SECONDS = 0.4
ANSWERS = 3
"""A worker waits for so many answers of a controller, however late each is: to its hello, to its description."""


class Session:
    """See the module's text."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker, self.membership = worker, worker.membership
        simulation = worker.simulation
        process = ProcessInfo(
            "job", simulation.host_of(worker.pid), worker.pid, self._domain(), worker.address,
            simulation.spec.run if worker.launched else "",
        )  # fmt: skip
        self.dialogue = Dialogue(self.membership, process, simulation.description, self._status())
        self.stream: Stream | None = None
        self.welcomed = False
        """On this stream."""
        self.claims: Status | None = None
        """Of a liar: what it says of itself instead of the truth."""
        self._lies: dict[str, int] = {}
        self._beats = self._dials = 0

    def _domain(self) -> str:
        """Some hosts share one; where a cell fits on a host, no two do."""
        pid, simulation = self.worker.pid, self.worker.simulation
        return f"domain{pid % 3}" if simulation.cell.processes == 1 else simulation.host_of(pid)

    def start_over(self, incarnation: str) -> None:
        self._leave_stream()
        self.dialogue.start_over(incarnation)
        self.dial_after(RECONNECT_SECONDS)

    def on_process_end(self) -> None:
        if self.stream is not None and not self.worker.cut:
            self.stream.break_off()
        self.stream = None

    # ---- streams

    def dial_after(self, seconds: float) -> None:
        self._dials += 1
        self.worker.after(seconds, self.connect, self._dials)

    def connect(self, dials: int) -> None:
        """Open a stream and say hello; again and again while nobody answers."""
        worker = self.worker
        if dials != self._dials or (self.stream is not None and not self.stream.broken and self.welcomed):
            return
        self._leave_stream()
        if self.dialogue.ending is not None:
            return
        self.stream = worker.simulation.dial(worker)
        if self.stream is not None:
            self._say_hello(self.stream, self.dialogue.say_hello())
        patience = RECONNECT_SECONDS * (1 + worker.chance.random())
        self.dial_after(patience + ANSWERS * worker.simulation.host.late)

    def _say_hello(self, stream: Stream, hello: Hello) -> None:
        hello = replace(hello, worker=self.membership.worker or self.worker.asked_id)
        stream.up(stream.host.connected, stream, self._claimed(hello))

    def _leave_stream(self) -> None:
        if self.stream is not None:
            self.stream.break_off()
        self.stream, self.welcomed = None, False

    def on_stream_end(self, stream: Stream) -> None:
        if stream is self.stream:
            self.stream, self.welcomed = None, False
            self.dial_after(RECONNECT_SECONDS * self.worker.chance.random())

    # ---- what goes out

    def beat(self, beats: int) -> None:
        """A heartbeat an interval; `beats` ends the line of an older stream."""
        if beats == self._beats:
            self.dialogue.beat()
            self._send()
            self.worker.after(self.dialogue.heartbeat_seconds, self.beat, beats)

    def lie(self, name: str, value: int) -> None:
        """One heartbeat says a number that cannot be."""
        self._lies = {name: value}
        self.dialogue.beat()
        self._send()
        self._lies = {}

    def _send(self) -> None:
        """What is due, where somebody listens."""
        stream = self.stream
        if stream is None or not self.welcomed or self.dialogue.ending is not None or not self.dialogue.due:
            return
        self.dialogue.activities = self._activities()
        for message in self.dialogue.take_outgoing():
            stream.up(stream.host.receive, stream, self._claimed(message))

    def _claimed(self, message: ToController) -> ToController:
        """As a liar says it."""
        if not isinstance(message, Hello | Heartbeat | Ready | Inventory) or message.status is None:
            return message
        status = replace(self.claims, sequence=message.status.sequence) if self.claims is not None else message.status
        return replace(message, status=replace(status, **self._lies))  # type: ignore[arg-type]

    def _activities(self) -> dict[int, Activity]:
        own = activity(self.worker)
        return {one.generation: one for one in (*builds(self.worker), own)}

    # ---- from the training half

    def publish(self) -> None:
        """Where it stands."""
        training = self.worker.training
        telemetry = Telemetry(
            step_seconds=self.worker.simulation.step_seconds,
            step_seconds_median=self.worker.simulation.step_seconds if training.step > 0 else 0.0,
            saves=training.saves.reported,
            lane_seconds=self.worker.simulation.speeds.lane_seconds(self.worker),
        )
        self.dialogue.update_status(self._status(), telemetry)
        self._send()

    def _status(self) -> Status:
        """The dialogue fills in what it and the membership know."""
        m, t, knows = self.membership, self.worker.training, self.worker.training.loading.known
        return Status(
            0, 0, m.state, 0, t.step, t.committed_in, t.boundary, t.holds(),
            done=t.done, ended=t.ended or t.end.is_awaited, checkpoint=knows.reference,
            unreadable_checkpoint=knows.unreadable_checkpoint, corrupt=t.copies.reported, last_step=t.end.known,
        )  # fmt: skip

    def notice(self) -> None:
        """The membership may have changed."""
        self.dialogue.notice()
        self._send()

    def leave_vote(self, voted: list[int]) -> Plan | None:
        plan = self.membership.leave_vote(voted)
        if plan is None:
            self._carry_out(self.dialogue.on_vote_over())
        return plan

    def answer(self, inventory: Inventory) -> None:
        self.dialogue.answer(inventory)
        self._send()

    def report_ready(self, generation: int) -> None:
        self.dialogue.report_ready(generation)
        self.dialogue.notice()
        self._send()

    def report(self, result: Result) -> None:
        self.dialogue.report(result)
        self._send()

    # ---- from elsewhere

    def request_drain(self) -> None:
        """SIGTERM."""
        self.dialogue.request_drain()
        self._send()

    def on_death(self, incarnation: str) -> None:
        self.dialogue.on_death(incarnation)
        self._send()

    def on_broken_peer(self, peer: str) -> None:
        self.dialogue.on_broken_peers({peer})
        self._send()

    # ---- from the controller

    def on_message(self, stream: Stream | None, message: ToWorker) -> None:
        """What comes on a stream that was left is nobody's any more."""
        if self.worker.seat.is_open:
            self.worker.seat.on_message(message)
            return
        if stream is not self.stream or self.dialogue.ending is not None:
            return
        self._carry_out(self.dialogue.on_message(message))
        if isinstance(message, Describe) and stream is not None:
            self._describe(stream)
        if isinstance(message, Welcome):
            self._on_welcome()
        if self.worker.alive:
            self._send()

    def _describe(self, stream: Stream) -> None:
        """Nothing but the hello is of use on a stream that is not welcomed yet."""
        for message in self.dialogue.take_outgoing():
            if isinstance(message, Hello):
                self._say_hello(stream, message)

    def _on_welcome(self) -> None:
        loading = self.worker.training.loading
        if self.membership.is_joiner:
            loading.generations = self.dialogue.job.opened_generations
            loading.look()
            self.publish()
        if not self.welcomed:
            self.welcomed = True
            self._beats += 1
            self.beat(self._beats)

    def _carry_out(self, effects: list[Effect]) -> None:
        training = self.worker.training
        for effect in effects:
            match effect:
                case Deliver(item):
                    self._deliver(item)
                case Build(plan) if plan.recovery is not None:
                    training.build_recovery(plan)
                case Build(plan):
                    training.build_planned(plan)
                case Abort():
                    training.close_groups()
        training.call_off(self.membership.live)

    def _deliver(self, item: Item) -> None:
        training = self.worker.training
        match item:
            case Stopped(generation):
                training.stop(generation)
            case Opened():
                training.opened()
            case Asked(AskKind.STOP, _):
                training.stop_asked = True
            case Asked(AskKind.END, step):
                training.end.learn(step)
            case Asked():
                training.saves.ask()
            case Ended():
                self._on_ended(item)

    def _on_ended(self, ended: Ended) -> None:
        worker = self.worker
        if ended.reason == self.dialogue.refusal:
            worker.end(2, ended.reason)
            return
        worker.say("is told", ended.ending.value, ended.reason)
        if ended.ending is Ending.DRAINED:
            worker.simulation.watch.drained(worker, ended.reason)
        if ended.ending is Ending.START_OVER:
            worker.start_over()
        elif ended.ending is Ending.FAILED:
            worker.end(1, ended.ending.value)
        else:
            is_replaced = ended.ending is Ending.REPLACED and not worker.launched
            worker.training.over = True
            worker.training.saves.close(lambda: worker.end(START_AGAIN if is_replaced else 0, ended.ending.value))
