"""What goes wrong, and what operators ask for: drawn from the seed, one thing after another."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from shoal_controller.core.machine.effects import Adopt, Kill, Persist, Send, Spawn
from shoal_protos.acts import ConfirmLost, DrainWorker, Pause, Resume, Save, Scale

from .disasters import Disasters
from .liars import Liars
from .operators import Operators
from .pod_faults import PodFaults

if TYPE_CHECKING:
    from .simulation import Simulation
    from .worker import SimWorker


class Faults:
    """See the module's text."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.clock = simulation, simulation.clock
        self.chance = Random(simulation.chance.random())
        self.every = self.chance.choice((0.4, 1.0, 2.5))
        self.until = 0.0
        self.count = 0
        kinds = KINDS if simulation.cell.processes == 1 else {**KINDS, **OF_CELLS}
        chosen = simulation.kinds or self.chance.sample(list(kinds), self.chance.randint(2, len(kinds)))
        self.kinds = [kind for kind in chosen for _ in range(kinds[kind])]
        self.saves = Random(f"wishes of {simulation.seed}")
        """Apart from the rest, so that a job without checkpoints meets the same whether others have them or not."""
        self.liars = Liars(simulation)
        self.operators = Operators(simulation)
        self.links = simulation.links
        self.disasters = Disasters(simulation)
        self.pods = PodFaults(simulation)
        self.flips = Random(f"flips of {simulation.seed}")

    def rage(self, seconds: float) -> None:
        self.until = self.clock.now + seconds
        self._next()
        self.liars.rage(seconds)
        self.operators.rage(seconds)
        self.links.rage(seconds)
        self.disasters.rage(seconds)
        self.pods.rage(seconds)
        for _ in range(self.flips.choice((0, 0, 0, 1, 1, 2))):
            self.clock.after(self.flips.uniform(0, seconds), self.flip)
        if self.simulation.checkpoints.every:
            for act in self.saves.choice(((), (self.save,), (self.leave,), (self.save, self.save, self.leave))):
                self.clock.after(self.saves.uniform(0, seconds), act)

    def _next(self) -> None:
        delay = self.chance.expovariate(1 / self.every)
        if self.clock.now + delay < self.until:
            self.clock.after(delay, self._strike)

    def _strike(self) -> None:
        if not self.simulation.host.job.durable.phase.is_over:
            self.count += 1
            getattr(self, self.chance.choice(self.kinds))()
        self._next()

    def calm(self) -> None:
        """Everything that lives is well from now on."""
        simulation = self.simulation
        simulation.say("--- the faults are over")
        simulation.link_faults.clear()
        self.links.mend_all()
        simulation.groups.look_again()
        self._wall(False)
        for worker in simulation.workers():
            worker.set_cut(False)
            if worker.frozen and not worker.hangs:
                worker.thaw()
        simulation.host.crash_after = simulation.host.crash_before = None
        simulation.planner.mend()
        self.pods.calm()
        self.disasters.calm()
        simulation.host.start()
        if simulation.host.job.durable.paused:
            simulation.host.request(Resume())

    # ---- whom

    def _any(self, fit: Callable[[SimWorker], bool] = lambda _: True) -> SimWorker | None:
        found = [worker for worker in self.simulation.workers() if fit(worker)]
        return self.chance.choice(found) if found else None

    def _soon(self, call: Callable[[], object], least: float, most: float) -> None:
        self.clock.after(self.chance.uniform(least, most), call)

    # ---- what

    def kill(self) -> None:
        worker = self._any()
        if worker is not None and (len(self.simulation.workers()) > 1 or self.chance.random() < 0.2):
            worker.end(-9, "killed")
            if self.simulation.spec.launcher == "none" and self.chance.random() < 0.8:
                self._soon(self.simulation.start_process, 0.1, 2.0)

    def kill_host(self) -> None:
        """A machine is gone, with all processes on it."""
        worker = self._any()
        if worker is None:
            return
        host_of, host = self.simulation.host_of, self.simulation.host_of(worker.pid)
        for process in [one for one in self.simulation.workers() if host_of(one.pid) == host]:
            process.end(-9, f"killed with {host}")
            if self.simulation.spec.launcher == "none" and self.chance.random() < 0.8:
                self._soon(self.simulation.start_process, 0.1, 2.0)

    def kill_in_a_change(self) -> None:
        """When somebody builds, votes a new number, or waits to open."""
        for worker in self.simulation.workers():
            m = worker.membership
            if m.next is not None or m.recovery is not None:
                return worker.end(-9, "killed in a change")
        return None

    def fail(self) -> None:
        """Its script raises."""
        worker = self._any(lambda worker: not worker.frozen)
        if worker is not None and len(self.simulation.workers()) > 1:
            worker.fail("ValueError: drawn")

    def freeze(self) -> None:
        worker = self._any(lambda worker: not worker.frozen)
        if worker is not None:
            worker.freeze()
            self._soon(lambda: worker.frozen and worker.thaw(), 0.2, 8.0)

    def cut(self) -> None:
        """The network between the controller and some workers; half the time all of them."""
        workers = self.simulation.workers()
        if workers and self.chance.random() < 0.5:
            workers = self.chance.sample(workers, self.chance.randint(1, len(workers)))
        for worker in workers:
            worker.set_cut(True)
        self.simulation.say("cut off:", *workers)
        self._soon(lambda: self._heal(workers), 0.3, 6.0)

    def _heal(self, workers: list[SimWorker]) -> None:
        self.simulation.say("reachable again:", *workers)
        for worker in workers:
            worker.set_cut(False)

    def firewall(self) -> None:
        """The controller is started again behind a firewall that refuses its connections to the workers."""
        simulation = self.simulation
        simulation.say("a firewall refuses the controller's connections")
        self._wall(True)
        simulation.host.crash()
        self._soon(simulation.host.start, 0.1, 3.0)
        self._soon(lambda: self._wall(False), 3.0, 12.0)

    def _wall(self, walled: bool) -> None:
        self.simulation.walled = walled
        for worker in self.simulation.workers():
            worker.walled = walled

    def break_stream(self) -> None:
        worker = self._any()
        if worker is not None and worker.session.stream is not None:
            self.simulation.say("the stream of", worker, "breaks")
            worker.session.stream.break_off()

    def crash(self) -> None:
        """At once, or between two effects: after so many, or before the next one of a kind."""
        host = self.simulation.host
        how = self.chance.random()
        if how < 0.4:
            host.crash_after = self.chance.randint(0, 6)
        elif how < 0.7:
            host.crash_before = self.chance.choice(EFFECTS)
        else:
            host.crash()
        within = 1.0 if host.crash_before is not None else 0.2
        self._soon(host.crash, within, within)
        self._soon(host.start, within + 0.1, 5.0)

    def break_between(self) -> None:
        workers = [worker for worker in self.simulation.workers() if not worker.frozen]
        if len(workers) >= 2:
            self.simulation.break_between(*self.chance.sample(workers, 2))

    def link_fault(self) -> None:
        """Two living workers cannot reach each other for a while."""
        workers = self.simulation.workers()
        if len(workers) >= 2:
            pair = self.chance.sample(workers, 2)
            link_fault = frozenset(worker.pid for worker in pair)
            self.simulation.link_faults.add(link_fault)
            self.simulation.break_between(*pair)
            self._soon(lambda: self._peace(link_fault), 1.0, 10.0)

    def _peace(self, link_fault: frozenset[int]) -> None:
        self.simulation.link_faults.discard(link_fault)
        self.simulation.groups.look_again()

    def drain(self) -> None:
        worker = self._any()
        if worker is not None and worker.membership.worker:
            self.simulation.say("an operator drains", worker)
            self.simulation.host.request(DrainWorker(worker.membership.worker, 5.0))

    def confirm(self) -> None:
        """An operator says that a worker is dead which is."""
        roster = self.simulation.host.job.durable.roster
        dead = [
            worker
            for worker, record in roster.items()
            if record.incarnation and not self.simulation.processes[record.incarnation].alive
        ]
        if dead:
            self.simulation.host.request(ConfirmLost(self.chance.choice(dead)))

    def sigterm(self) -> None:
        worker = self._any()
        if worker is not None and len(self.simulation.workers()) > 1:
            self.simulation.say("SIGTERM to", worker)
            worker.awake(worker.session.request_drain)

    def scale(self) -> None:
        workers = self.chance.randint(1, self.simulation.spec.max_workers or 6)
        self.simulation.say("an operator scales to", workers)
        self.simulation.host.request(Scale(workers))

    def pause(self) -> None:
        host = self.simulation.host
        host.request(Pause())
        self._soon(lambda: host.request(Resume()), 0.2, 4.0)

    def save(self) -> None:
        self.simulation.say("an operator asks for a checkpoint")
        self.simulation.host.request(Save())

    def leave(self) -> None:
        """All who are here are drained."""
        self.simulation.say("an operator drains everybody")
        for worker in self.simulation.workers():
            if worker.membership.worker:
                self.simulation.host.request(DrainWorker(worker.membership.worker, 3.0))

    def flip(self) -> None:
        """A bit of a block's state, in the memory of whoever holds it."""
        holders = [
            worker for worker in self.simulation.workers() if worker.training.blocks and worker.training.step > 0
        ]
        if holders and not self.simulation.host.job.durable.phase.is_over:
            self.count += 1
            worker = self.flips.choice(holders)
            self.simulation.bits.flip(worker, self.flips.choice(sorted(worker.training.blocks)))

    def come(self) -> None:
        """A worker comes by itself; now and then with an id that is taken."""
        most = 8 * self.simulation.cell.processes
        if self.simulation.spec.launcher == "none" and len(self.simulation.workers()) < most:
            taken = self._any()
            claimed = taken.membership.worker if taken is not None and self.chance.random() < 0.3 else ""
            self.simulation.start_process(claimed)


EFFECTS = (Spawn, Spawn, Kill, Kill, Adopt, Persist, Send)
"""Those that a controller may die before."""

KINDS = {
    "kill": 4,
    "kill_in_a_change": 2,
    "fail": 1,
    "freeze": 3,
    "cut": 2,
    "break_stream": 2,
    "firewall": 1,
    "crash": 3,
    "break_between": 1,
    "link_fault": 1,
    "drain": 2,
    "confirm": 1,
    "sigterm": 1,
    "scale": 2,
    "pause": 1,
    "come": 3,
}
"""How often each is drawn, where a seed has it at all."""
OF_CELLS = {"kill_host": 3}
"""Likewise, where several processes make a cell."""
