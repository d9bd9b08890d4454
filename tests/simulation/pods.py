"""A cluster's pods, as the machine hears of them: they wait for room or for an image, and their nodes go.

Used where a job's launcher is `kubernetes`. Where there is room a pod starts as a local process does, so that a seed
means the same with either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal_controller.core.machine.durable import Place
from shoal_controller.core.machine.events import (
    Endangered,
    Event,
    Exited,
    NeverStarted,
    Preempted,
    Spared,
    Spawned,
    Waiting,
)
from shoal_controller.core.machine.pending import Notice, PendingReason

from .controller import Launcher

if TYPE_CHECKING:
    from .simulation import Simulation
    from .worker import SimWorker

PLENTY = 1_000_000
NO_ROOM = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
NO_IMAGE = 'Back-off pulling image "registry/train:lost"'


class PodLauncher(Launcher):
    """See the module's text."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.room = PLENTY
        """Pods that may run at a time."""
        self.image_is_there = True
        self.waiting: list[str] = []
        """Pods that have not started, the oldest first."""

    def has(self, worker: str) -> bool:
        return worker in self.waiting or super().has(worker)

    def ended(self, process: SimWorker) -> None:
        if process not in (self.started[worker] for worker in self.gone):
            super().ended(process)
        self.look_again()

    def _spawned(self, worker: str, life: int) -> None:
        if life == self._life:
            self.waiting.append(worker)
            self._tell(Spawned(worker, self._place(worker)))
            self.look_again()

    def _place(self, worker: str, node: str = "") -> Place:
        return Place.of_pod(f"job-{worker}", f"uid-{worker}", node)

    def _node(self, worker: str) -> str:
        return f"node{self.started[worker].pid}"

    def look_again(self) -> None:
        """Start what can start, and say what the others wait for."""
        running = len(self.running())
        for worker in list(self.waiting):
            if not self.image_is_there:
                self._tell(Waiting(worker, PendingReason.IMAGE, NO_IMAGE, hopeless=True))
            elif running >= self.room:
                self._tell(Waiting(worker, PendingReason.UNSCHEDULABLE, NO_ROOM))
            elif worker in self.waiting:
                self.waiting.remove(worker)
                self.started[worker] = self.simulation.start_process(worker, launched=True)
                running += 1
                self._tell(Spawned(worker, self._place(worker, self._node(worker))))

    def running(self) -> list[str]:
        """Whose pods have started, and are there."""
        return [worker for worker, process in self.started.items() if process.alive and worker not in self.gone]

    def _kill(self, worker: str, life: int) -> None:
        if worker in self.waiting and life == self._life:
            self.waiting.remove(worker)
            self.clock.after(0.02, self._tell, Exited(worker, None, f"pod job-{worker} was deleted"))
        else:
            super()._kill(worker, life)

    def adopt(self, workers: tuple[str, ...], life: int) -> None:
        if life != self._life:
            return
        for worker in (*self.started, *self.waiting):
            self._tell(self._found(worker))
        for worker in workers:
            if worker not in self.started and worker not in self.waiting:
                self._tell(NeverStarted(worker))
        self.look_again()

    def _found(self, worker: str) -> Event:
        if worker in self.waiting:
            return Spawned(worker, self._place(worker))
        if worker in self.gone:
            return self._vanished(worker)
        process = self.started[worker]
        lives = Spawned(worker, self._place(worker, self._node(worker)))
        return lives if process.alive else self._exit(worker, process)

    # ---- what befalls them

    def preempt(self, worker: str, grace_seconds: float = 5.0) -> None:
        why = f"{self._node(worker)} has the taint karpenter.sh/disrupted"
        self.simulation.promises.preempted(worker, grace_seconds)
        self._tell(Preempted(worker, Notice.TAINTED, why, grace_seconds))

    def spare(self, worker: str) -> None:
        self._tell(Spared(worker, f"the taint karpenter.sh/disrupted of {self._node(worker)} is gone"))

    def endanger(self, worker: str, why: str) -> None:
        """`why`: empty: no longer."""
        self._tell(Endangered(worker, why))

    def vanish(self, worker: str) -> None:
        """Its node is gone, and with it the link to it."""
        process = self.started[worker]
        process.set_cut(True)
        process.freeze()
        self.gone.add(worker)
        self._tell(self._vanished(worker))

    def _vanished(self, worker: str) -> Event:
        return Exited(worker, None, f"{self._node(worker)} is not there any more")
