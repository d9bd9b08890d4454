"""Workers of lasting different speed, in a quarter of the seeds, and what lanes that follow it have to keep to.

A slow worker is so as long as its process lives. It says what its lanes take, with noise; one that has none says what
the last one took that it trained for nothing. In the other seeds nobody says anything, and lanes are even.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from shoal_controller.core.machine.job import Job
from shoal_controller.core.planning.lanes import LEAST_PAUSE, seconds_of_step
from shoal_protos.plan import Plan

if TYPE_CHECKING:
    from .simulation import Simulation
    from .worker import SimWorker

LANE_SECONDS, NOISE = 0.1, 0.05
LONGEST_LANE = 1.5
"""Of the usual time, by chance."""
REHEARSAL_STEPS = 50
"""As the worker's: so often it trains a lane for nothing."""
FACTORS = (1.0, 1.0, 1.0, 1.5, 2.0, 4.0, 12.0)
"""So many times as long as usual a lane takes. With the last one every lane is one too many.
None with which a lane takes so long that its script counts as stuck.
"""


class Speeds:
    """See the module's text."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        drawn = () if simulation.still else (False, False, False, True)
        self.are_known = bool(drawn and Random(f"{simulation.seed} speeds").choice(drawn))
        self._noise = Random(f"{simulation.seed} noise of lanes")
        self._last_lanes: dict[int, tuple[int, float]] = {}
        """By process, the step at which it last had a lane to measure, and what that took."""
        self.changes = self.idle = 0
        """How often lanes were shared anew, and for how many plans somebody had none for its speed."""

    def factor(self, pid: int) -> float:
        """So many times as long as usual a lane takes on a process."""
        if not self.are_known or self._simulation.still:
            return 1.0
        spec, usual = self._simulation.spec, self._simulation.step_seconds
        allowed = [one for one in FACTORS if one * LONGEST_LANE * usual < spec.stall_seconds]
        return Random(f"{self._simulation.seed} speed of {pid}").choice(allowed)

    def slow(self, worker: SimWorker, factor: float) -> None:
        """From now on."""
        self.are_known, worker.factor = True, factor

    def lane_seconds(self, worker: SimWorker) -> float:
        """As it tells; 0: it tells nothing."""
        if not self.are_known or worker.training.step < 1:
            return 0.0
        step, world = worker.training.step, worker.training.world
        has_lanes = world is None or bool(world.plan.lanes_of(worker.training.rank))
        at, kept = self._last_lanes.get(worker.pid, (step, 0.0))
        if not has_lanes and kept and at <= step < at + REHEARSAL_STEPS:
            return kept
        noise = 0.0 if self._simulation.still else self._noise.uniform(-NOISE, NOISE)
        seconds = LANE_SECONDS * worker.factor * (1 + noise)
        self._last_lanes[worker.pid] = step, seconds
        return seconds

    def stepped(self, before: Job, after: Job) -> None:
        """After every batch of the machine."""
        old, new = before.durable.sharing, after.durable.sharing
        if new.changed_at != old.changed_at:
            self.changes += 1
            if old.changed_at and old.changed_at <= new.changed_at < old.changed_at + LEAST_PAUSE:
                self._simulation.watch.violated("lanes are shared anew too soon", old.changed_at, new.changed_at)
        for plan in after.durable.planned:
            if plan not in before.durable.planned and new.seconds:
                self._is_no_longer(after, plan)

    def _is_no_longer(self, job: Job, plan: Plan) -> None:
        """A step takes no longer than with even lanes, by what was measured."""
        idle = without_lanes(job, plan)
        self.idle += bool(idle)
        cells = plan.cells if plan.homes else [(rank,) for rank in sorted((*plan.trainers, *idle))]
        counts = [len(plan.lanes_of(cell[0])) for cell in cells]
        taken = [max(job.durable.lane_seconds(plan.members[rank].worker) for rank in cell) for cell in cells]
        evenly = -(-plan.lanes // len(cells)) * max(taken) if cells else 0.0
        if cells and seconds_of_step(counts, taken, self._simulation.stage >= 2) > evenly * (1 + 1e-9):
            self._simulation.watch.violated("lanes by speed make steps longer", counts, taken)
        usual = min(taken, default=0.0)
        if any(job.durable.lane_seconds(plan.members[rank].worker) <= usual for rank in idle):
            self._simulation.watch.violated("the fastest has no lane", counts, taken)


def without_lanes(job: Job, plan: Plan) -> list[int]:
    """The ranks that have none for their speed."""
    if plan.homes or not job.durable.sharing.seconds:
        return []
    staying = [rank for rank in plan.ranks if not job.durable.roster[plan.members[rank].worker].leaving]
    return [rank for rank in staying[: job.durable.trainers or None] if not plan.lanes_of(rank)]
