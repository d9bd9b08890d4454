"""What a simulated job is, and how long everything takes in it: all that `shoal what-if` assumes. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal_protos.description import ROUNDS_FROM_STAGE, Description
from shoal_protos.plan import DEFAULT_MIRROR_PARTNERS, EVERYONE

from shoal_controller.core.machine.spec import NO_LAUNCHER, JobSpec

RUN = "what-if"
BLOCKS_EACH = 2
"""Blocks of a worker that owns as many as the others: what is moved is whole blocks."""
LEAST_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Paces:
    """Seconds that are assumed, or were measured."""

    lane: float
    """Of a lane on a worker: forward and backward of its micro-batches."""
    overhead: float = 0.0
    """Of a step beside its lanes: exchange, vote and update."""
    start: float = 60.0
    """From a machine's coming to a worker that is ready to train."""
    group: float = 0.3
    """Of the building of a process group."""
    save: float = 0.0
    """For which training waits where a checkpoint is saved."""
    write: float = 10.0
    """Until a save is whole, beside training."""
    restore: float = 10.0
    """Of the reading of a checkpoint."""
    latency: float = 0.002
    """Of a message between a worker and the controller."""
    of_lanes: int = 0
    """A lane takes `lane` where the job has so many; with more, each is as much shorter. 0: as many as it has."""

    def of(self, lanes: int) -> Paces:
        """Return those of a job with the same batch and so many lanes."""
        return replace(self, lane=self.lane * self.of_lanes / lanes, of_lanes=lanes) if self.of_lanes else self

    def step(self, lanes: int) -> float:
        """Return the seconds of a step in which the busiest worker has so many lanes."""
        return lanes * self.lane + self.overhead


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A job as its training config and its size would say it."""

    workers: int
    lanes: int
    mirrors: int = 1
    spares: int = 0
    least: int = 1
    """Fewest workers to train with."""
    stage: int = 1
    save_steps: int = 0
    """Steps between two checkpoints; 0: none is saved."""
    state_bytes: int = 0
    """Of one copy of the training state."""
    is_on_one_host: bool = False
    """Whether its machines are processes of one host, as those of a benchmark: it answers for the dead."""

    @property
    def slots(self) -> int:
        """Machines that it has a use for."""
        return self.workers + self.spares

    @property
    def keeps_lanes(self) -> bool:
        """Whether lanes that a survivor has trained stay when the world changes in the middle of a step."""
        return self.stage < ROUNDS_FROM_STAGE

    def spec(self) -> JobSpec:
        """Return what the controller is asked for: workers come by themselves, as machines do."""
        return JobSpec("job", self.workers, self.least, self.slots, NO_LAUNCHER, spares=self.spares, run=RUN)

    def description(self) -> Description:
        """Return what a worker's hello says of it."""
        blocks = LEAST_BLOCKS
        while blocks < BLOCKS_EACH * self.slots:
            blocks *= 2
        return Description(
            self.lanes, blocks, 4096, self.state_bytes // blocks, EVERYONE if self.stage == 0 else self.mirrors, 0, 0,
            (), "AdamW", {}, {}, False, can_checkpoint=self.save_steps > 0, keep=3,
            mirror_partners=max(self.mirrors, DEFAULT_MIRROR_PARTNERS), stage=self.stage,
        )  # fmt: skip
