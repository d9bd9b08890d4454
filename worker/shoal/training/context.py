"""What the parts of a worker's training side share: the world, the state, the loop, and how far this worker is.

The engine owns it, every part takes it, and none of them knows the engine. Parts that need each other are given each
other in one direction, as parts.py says. Only the training thread touches it.

`Untrained` is what a script without a controller leaves untrained. With a controller the job fails of it. Alone the
script's status is 0 also where it has broken out of its loop; so it is said when the script has ended, or has let its
engine go. Kept outside the engine, which may not exist by then.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

from shoal_protos.training_log import get_logger

from shoal.cells.hub import CellHub
from shoal.checkpoint.manifest import DataPosition
from shoal.config.training import TrainingConfig
from shoal.data.seeds import ForwardSeed
from shoal.exchange.world import World
from shoal.guards.loop_guards import FirstWeights
from shoal.process.faults import Faults
from shoal.session.link import Link, Prepared
from shoal.state.half_floats import Autocast
from shoal.state.training_state import NO_STEP, TrainingState
from shoal.training.lane_loop import LaneLoop
from shoal.training.telemetry import LaneClock, Meter

log = get_logger("shoal")
NOTHING = nullcontext()
"""A context of no effect, which may be entered any number of times."""


class TrainingContext:
    """What the parts of one engine share."""

    def __init__(
        self,
        config: TrainingConfig,
        state: TrainingState,
        link: Link,
        loop: LaneLoop,
        faults: Faults,
        hub: CellHub | None = None,
    ) -> None:
        self.config, self.state, self.link, self.loop, self.faults = config, state, link, loop, faults
        self.hub = hub
        """What the collectives of this process's cell go through; None where a cell is one process."""
        self.meter = Meter()
        self.lane_clock = LaneClock(state.device)
        self.forward_seed = ForwardSeed(state.module, config.seed)
        self.first_weights = FirstWeights(self.forward_seed)
        self.autocast = Autocast(config.precision, state.device.kind)
        self.found: tuple[int, float | None] = (0, None)
        """Step and loss of the checkpoint that this worker would go on from; no loss where none is known."""
        self.world: World | None = None
        """The one that this worker is in."""
        self.boundaries = 0
        """Votes that have passed in this world."""
        self.are_parameters_here = True
        """Whether all that was handed out after the last step is."""
        self.is_busy = False
        """Whether the script's code is called where no change of the world can be taken part in: the dataset is asked
        for a batch, or what was measured is told between a reduction and its vote.
        """
        self.calls_back = False
        """Whether the script, or the configuration, has callbacks for committed steps."""
        self.has_saved_turn = False
        """A checkpoint says whose turn it is, and the script has called no `engine.turn` since."""
        self.is_first_step = True
        """Whether no step has been committed in this world."""
        self.begins: Prepared | None = None
        """The planned generation that all have voted for and that begins at the next boundary."""
        self.done = False
        """The last step is committed and its digests are given."""
        self.loop_has_begun = False
        """The script has asked for its first batch."""
        self.left_loop = False
        """The script has gone through its loop, and cannot go back."""
        self.is_through = False
        """The script has gone through all its epochs, where nothing else says at which step the job ends."""
        self.awaits_vote = False
        """After the loop it waits for a vote, which all members make."""
        self.awaits_end = False
        """It waits, in a world at rest, until all others have come to that step."""
        self.left_at = ""
        """Why a loop that was left says nothing of the job's end; empty where none was left so."""
        self.untrained = Untrained()
        """Steps that a loop has left out."""
        self.ended = False
        """The script has ended."""
        self.leaving = False
        """The controller has told this worker to end, or it has said why it failed; nothing is left to report."""

    @property
    def is_cell_whole(self) -> bool:
        """Whether all that the batch at hand has been given came from this process's cell."""
        return self.hub is None or not self.hub.is_void

    def in_backward(self) -> AbstractContextManager[object]:
        """A context in which a collective that fails raises at once: a backward's rest would be for nothing."""
        return self.hub.raising() if self.hub is not None else NOTHING

    def in_evaluation(self) -> AbstractContextManager[object]:
        """A context in which collectives are those of an evaluation."""
        return self.hub.evaluating() if self.hub is not None else NOTHING

    def in_callback(self) -> AbstractContextManager[object]:
        """A context in which collectives are refused."""
        return self.hub.calling_back() if self.hub is not None else NOTHING

    @property
    def global_step(self) -> int:
        """Committed steps of the job; before a world those that it had when it welcomed this worker, or those of the
        checkpoint that it goes on from.
        """
        return self.state.step if self.state.step > NO_STEP else self._before_a_world[0]

    @property
    def loss(self) -> float | None:
        """Of the last of them, where there is one."""
        return self.state.loss if self.state.step > NO_STEP else self._before_a_world[1]

    @property
    def _before_a_world(self) -> tuple[int, float | None]:
        job = self.link.job
        return self.found if self.found[0] >= job.step else (job.step, job.loss)

    @property
    def is_over(self) -> bool:
        """Whether the last step is committed."""
        return 0 < self.state.last_step <= self.state.step

    @property
    def may_begin_at_its_end(self) -> bool:
        """Whether what a script does before a loop may be what it does after its last one: nothing else says where the
        job ends, it goes on from a checkpoint, and has made no step since.
        """
        (step, _), link = self.found, self.link
        goes_on = step > 0 and step >= link.job.step and not link.alone
        return goes_on and not (self.state.last_step or self.loop_has_begun)

    @property
    def rank(self) -> int:
        """This worker's number in the world; -1 while it is in none (before the loop, and in a warm-up)."""
        if self.world is not None:
            return self.world.rank
        return 0 if self.link.alone else -1

    @property
    def generation(self) -> int:
        """The number of the world; 0: in none."""
        return self.world.plan.generation if self.world else 0

    @property
    def lanes(self) -> tuple[int, ...]:
        """The numbers of the lanes trained here."""
        return self.world.lanes if self.world else ()

    @property
    def lane_in_flight(self) -> int:
        """The lane whose micro-batch the user's loop has now; -1: none."""
        counts = self.loop.in_flight and self.world is not None and not self.loop.is_warming_up
        return self.loop.lane if counts else -1

    @property
    def is_to_rehearse(self) -> bool:
        """Whether this member, who has no lanes, is to train one whose result is thrown away: what a lane takes stays
        known so.
        """
        world = self.world
        is_idle = world is not None and world.plan.steps and not world.lanes and self.hub is None
        return is_idle and self.lane_clock.is_stale

    @property
    def data_position(self) -> DataPosition:
        """What decides which samples a step reads, as checkpoints have it."""
        config = self.config
        return DataPosition(
            seed=config.seed,
            lanes=config.lanes,
            micro_batch_size=config.micro_batch_size,
            micro_batches_per_lane=config.micro_batches_of_cell,
            samples=self.loop.samples,
        )

    def step_on(self) -> None:
        """The user's code has come further, as far as anyone watches it."""
        if self.world is not None:
            self.world.group.progress.step_on()

    def abort_group(self) -> None:
        """What a test's fault does to the group of the world."""
        if self.world is not None:
            self.world.group.abort()


class Untrained:
    """The steps that the script's loop had made when it was left."""

    def __init__(self) -> None:
        self._step = self._last_step = NO_STEP

    def on_left(self, step: int, last_step: int) -> None:
        """The loop was left, as far as it was gone through."""
        self._step, self._last_step = step, last_step

    def tell(self) -> None:
        """Says it once. An error that has ended the script says enough."""
        step, self._step = self._step, NO_STEP
        if NO_STEP < step < self._last_step and getattr(sys, "last_value", None) is None:
            means = "the script left its loop before the end; go through it, or call engine.stop()"
            log.warning("ended_early", step=step, last_step=self._last_step, means=means)
