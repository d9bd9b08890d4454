"""One simulated worker process: its life, and the two halves that share a `Membership`, as in a real one.

`session.py` is the half that hears the controller, `training.py` the half that trains. A frozen process does nothing;
what it would have done waits for its thaw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.core.loading import StepZero
from shoal.core.membership import Membership
from shoal_protos.messages import FRESH_PROCESS, START_AGAIN, Fault, Result

from .seat import AskedSeat
from .session import Session
from .training import Training

if TYPE_CHECKING:
    from .simulation import Simulation


NEVER = float("inf")
RESTARTS = 3
"""How often `shoal worker` starts its command again."""


class SimWorker:
    """See the module's text. `name` is for people: the id once it is known, and a letter per incarnation."""

    def __init__(self, simulation: Simulation, pid: int, worker: str, launched: bool) -> None:
        self.simulation, self.clock, self.chance = simulation, simulation.clock, simulation.chance
        self.pid, self.launched, self.asked_id = pid, launched, worker
        self.address = simulation.address_of(pid)
        self.incarnation = f"i{pid}"
        self.membership = Membership("", self.incarnation)
        self.alive, self.frozen, self.cut = True, False, False
        self.walled = simulation.walled
        """A firewall refuses the controller's connections to it; its own to the controller pass."""
        self._silent_at = NEVER
        self.reachable_since = self.clock.now
        self.last_message_at = self.clock.now
        """When anything of it came to a controller the last time."""
        self.died_at: float | None = None
        self.lost_after = 0.0
        self.exit_code: int | None = None
        self.hangs = self.has_trained = False
        self.restarts = RESTARTS
        self.stubborn = launched and simulation.stubborn and self.chance.random() < 0.3
        self._backlog: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.factor = simulation.speeds.factor(pid)
        """So many times as long as usual its lanes take."""
        self.coordinate = 0
        """Its place in a cell, once it has one."""
        self.is_seated = False
        self.training = Training(self)
        self.session = Session(self)
        self.seat = AskedSeat(self)

    @property
    def name(self) -> str:
        return f"{self.membership.worker or 'new'}/{self.incarnation}"

    def __repr__(self) -> str:
        return self.name

    def say(self, *words: object) -> None:
        self.simulation.say(self.name, *words)

    # ---- doing things only while awake

    def awake(self, call: Callable[..., object], *args: Any) -> None:
        """Now, or when it thaws; never when it is dead."""
        if self.frozen:
            self._backlog.append((call, args))
        elif self.alive:
            call(*args)

    def after(self, delay: float, call: Callable[..., object], *args: Any) -> None:
        self.clock.after(delay, self.awake, call, *args)

    # ---- its life

    def begin(self) -> None:
        """Its model is built: it says hello, and warms up."""
        self.is_seated = True
        self.session.dial_after(0.05)
        self.training.warm_up()

    @property
    def unreachable_since(self) -> float:
        """When it was frozen or cut off; never, if it is not."""
        return self._silent_at if self.frozen or self.cut else NEVER

    def set_cut(self, cut: bool) -> None:
        """The network between it and the controller."""
        if cut and not self.cut and not self.frozen:
            self._silent_at = self.clock.now
        if self.cut and not cut:
            self.reachable_since = self.clock.now
        self.cut = cut

    def freeze(self) -> None:
        if not self.cut and not self.frozen:
            self._silent_at = self.clock.now
        self.frozen = True
        self.say("freezes", self.where())

    def thaw(self) -> None:
        self.frozen = False
        self.reachable_since = self.clock.now
        self.say("thaws", self.where())
        backlog, self._backlog = self._backlog, []
        for call, args in backlog:
            self.awake(call, *args)
        self.simulation.groups.look_again()

    def end(self, code: int, why: str = "") -> None:
        """The process is gone. Part of what it had sent is gone too."""
        if not self.alive:
            return
        if self.stubborn and code != -9:
            self.hang()
            return
        self.say("ends with", code, why, self.where())
        self.alive, self.frozen, self.exit_code = False, False, code
        self.died_at = self.clock.now
        self.lost_after = self.clock.now + self.chance.random() * 3 * self.simulation.weather.latency
        self._backlog = []
        self.training.close_groups()
        self.session.on_process_end()
        self.simulation.process_ended(self)
        if code == START_AGAIN and self.restarts and not self.launched:
            self.clock.after(0.3, self.simulation.start_again, self.restarts - 1)

    def hang(self) -> None:
        """It was to end and does not: a driver, a script that waits for ever in its last lines."""
        self.training.over = self.hangs = True
        self.freeze()

    def fail(self, why: str, everyone: bool = False, fault: Fault | None = None, status: int = 1) -> None:
        """The script raises: it is out of the training loop, tells why, and ends."""
        self.training.over = True
        self.session.report(Result(self.training.step, failure=why, everyone=everyone, fault=fault))
        self.after(0.05, self.end, status, why)

    def fail_to_begin(self, step_zero: StepZero, taken: str) -> None:
        """It is to begin at step 0 and cannot; a fresh process may."""
        if step_zero is StepZero.UNREADABLE:
            self.fail(f"{taken} cannot be read whole", everyone=True)
        else:
            self.fail("it has trained before", fault=Fault(FRESH_PROCESS, "", ""), status=START_AGAIN)

    def start_over(self) -> None:
        """It changes nothing any more, and comes back as a joiner with a new id."""
        self.training.close_groups()
        self.simulation.incarnations += 1
        self.incarnation = f"i{self.pid}.{self.simulation.incarnations}"
        self.asked_id = ""
        self.simulation.processes[self.incarnation] = self
        self.training.forget()
        self.session.start_over(self.incarnation)
        self.training.warm_up()

    def where(self) -> str:
        m, t = self.membership, self.training
        return f"at {m.state.value}/{t.step_phase} generation {m.generation} promised {m.promised} step {t.step}"
