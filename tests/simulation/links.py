"""Links between workers that carry nothing, one way or both, with nobody dead; and user code that is slow or stuck.

What is sent meanwhile arrives when the link is mended, as TCP sends it again. Drawn apart from the other faults, so
that a seed without them goes as it did before there were any. Whoever the progress watch evicts must have been out
of reach, or stuck: that is looked at here.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from shoal_controller.core.machine.effects import Note

if TYPE_CHECKING:
    from .simulation import Simulation
    from .worker import SimWorker

SHARE_OF_SEEDS = 0.4
NEVER, NOW = float("-inf"), float("inf")
SOON_SECONDS = 0.5
"""So long after user code came on its worker may be ended for it: the news is on its way."""
LATE_SECONDS = 6.0
"""So long after it was mended a link may be blamed: heartbeats are on their way, a controller is late."""


class Links:
    """See the module's text."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.clock = simulation, simulation.clock
        self.chance = Random(f"links of {simulation.seed}")
        self._held: dict[tuple[SimWorker, SimWorker], list[tuple[Any, ...]]] = {}
        self._down_until: dict[frozenset[int], float] = {}
        self.cuts = self.separated = self.ended = 0

    # ---- what they carry

    def carries(self, source: SimWorker, to: SimWorker) -> bool:
        return (source, to) not in self._held

    def joins(self, one: SimWorker, other: SimWorker) -> bool:
        """Whether the two can connect to each other."""
        return self.carries(one, other) and self.carries(other, one)

    def hold(self, source: SimWorker, to: SimWorker, *message: Any) -> None:
        self._held[source, to].append(message)

    def drop(self, source: SimWorker, to: SimWorker, both: bool = False) -> None:
        self.simulation.say("what", source, "sends to", to, "is dropped", "and the other way" if both else "")
        self.cuts += 1
        self._down_until[frozenset((source.pid, to.pid))] = NOW
        for way in ((source, to), (to, source))[: 1 + both]:
            self._held.setdefault(way, [])

    def mend(self, one: SimWorker, other: SimWorker) -> None:
        """What was held back arrives now, in order."""
        if self.joins(one, other):
            return
        self.simulation.say(one, "and", other, "reach each other again")
        self._down_until[frozenset((one.pid, other.pid))] = self.clock.now
        for way in ((one, other), (other, one)):
            for message in self._held.pop(way, ()):
                self.simulation.groups.deliver(*way, *message)
        self.simulation.groups.look_again()

    def mend_all(self) -> None:
        for one, other in list(self._held):
            self.mend(one, other)
        for worker in self.simulation.workers():  # code that is stuck is no fault that others could mend: it may last
            self.clock.after(self.chance.choice((0.0, 0.0, 16.0)), worker.training.code.unstick)

    # ---- faults

    def rage(self, seconds: float) -> None:
        if self.chance.random() < SHARE_OF_SEEDS and not self.simulation.kinds:
            for _ in range(self.chance.randint(1, 4)):
                strike = self.chance.choice((self._part, self._part, self._stick, self._slow))
                self.clock.after(self.chance.uniform(0, seconds), strike)

    def _part(self) -> None:
        workers = self.simulation.workers()
        if len(workers) >= 2:
            one, other = self.chance.sample(workers, 2)
            self.drop(one, other, both=self.chance.random() < 0.5)
            self.clock.after(self.chance.uniform(0.5, 20.0), self.mend, one, other)

    def _stick(self) -> None:
        workers = self.simulation.workers()
        if workers:
            worker = self.chance.choice(workers)
            worker.training.code.stick()
            self.clock.after(self.chance.uniform(0.5, 30.0), worker.training.code.unstick)

    def _slow(self) -> None:
        workers = self.simulation.workers()
        if workers:
            self.chance.choice(workers).training.code.slow_down(self.chance.uniform(2.0, 9.0))

    # ---- what the progress watch makes of it

    def noted(self, note: Note) -> None:
        """● Nobody is evicted whose links all carry, nor for slow code."""
        if note.kind in ("lost", "kept_out") and "cannot reach" in note.message:
            self.separated += 1
            pid = self._pid_of(note.worker)
            since = max((at for pair, at in self._down_until.items() if pid in pair), default=NEVER)
            if since < self.clock.now - LATE_SECONDS - 4 * self.simulation.host.late:
                self.simulation.watch.violated("a worker whose links all carry was evicted", note.message)
        elif "has made no progress" in note.message and note.kind == "dismissed":
            self.ended += 1
            training = self.simulation.by_id(note.worker).training
            code = training.code
            if self.simulation.cell.processes > 1 and training.end.is_awaited:
                return  # its script has left the loop in a step in which the others of its cell have a lane
            last_seen = self.clock.now - self.simulation.spec.stall_seconds
            it_came_on = last_seen + self.simulation.step_seconds  # and stuck within its next step
            soon = SOON_SECONDS + 2 * self.simulation.host.late
            stuck_since = code.stuck_since if self.clock.now > code.came_out_at + soon else code.was_stuck_since
            if stuck_since is None or min(stuck_since, code.inside_since) > it_came_on:
                self.simulation.watch.violated("user code that goes on was ended", note.message)

    def _pid_of(self, worker: str) -> int:
        incarnation = self.simulation.host.job.durable.roster[worker].incarnation
        return self.simulation.processes[incarnation].pid


class UserCode:
    """What a training thread does between two waits: it may be slow for once, or stuck."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self._inside: list[tuple[Any, ...]] = []
        self._more = 0.0
        self.stuck_since: float | None = None
        self.was_stuck_since: float | None = None
        self.came_out_at = NEVER
        self.inside_since = NOW
        """When it was entered, slow or not."""

    def run(self, seconds: float, call: Any, *args: Any) -> None:
        """`call` when it comes out."""
        more, self._more = self._more, 0.0
        self.inside_since = self._worker.clock.now
        self._worker.after(seconds + more, self._come_out, call, *args)

    def _come_out(self, call: Any, *args: Any) -> None:
        if self.stuck_since is not None:
            self._inside.append((call, *args))
        else:
            call(*args)

    def stick(self) -> None:
        self._worker.say("is stuck in user code from now on")
        self.stuck_since = self._worker.clock.now

    def unstick(self) -> None:
        if self.stuck_since is not None:
            self._worker.say("comes out of user code again")
            self.was_stuck_since, self.came_out_at = self.stuck_since, self._worker.clock.now
        self.stuck_since = None
        inside, self._inside = self._inside, []
        for call, *args in inside:
            self._worker.awake(call, *args)

    def slow_down(self, seconds: float) -> None:
        self._worker.say(f"is slow: {seconds:.1f} s more in user code")
        self._more = seconds
