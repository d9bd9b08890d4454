"""The end of a simulated script; where nothing says beforehand which step is the last, it waits for all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal_protos.messages import Result

if TYPE_CHECKING:
    from .training import Training


class OpenEnd:
    """Of one process. `last_step`: the job's, as far as it knows it; 0: else."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.last_step = 0 if training.simulation.open_end else training.simulation.max_steps
        self.is_through = self.is_awaited = False
        """Its script has gone through its epochs; it waits in a world at rest, and its status says so."""
        self.body_of = 0
        """The step of which its loop ran a body last; 0: in the one under way, or the last one, it had no lanes."""

    @property
    def known(self) -> int:
        """The last step, where nothing said it beforehand and it is known."""
        return 0 if not self._training.simulation.open_end else self.last_step

    @property
    def is_last(self) -> bool:
        """Whether its step is known to be the last one."""
        return 0 < self.last_step <= self._training.step

    def stop(self) -> None:
        """A vote says that the job ends with its step."""
        self.last_step = min(self.last_step or self._training.step + 1, self._training.step + 1)

    def begins(self) -> bool:
        """Instead of a boundary, where the script is through."""
        training = self._training
        self.is_awaited = False
        if not self.last_step and (self.is_through or self._has_left()):
            training.idle, training.step_phase = True, ""
            training.lanes.serve_on()
            training.worker.after(training.worker.chance.random(), self._rest, training.generation, training.boundary)
            return True
        if not training.idle and training.world is not None:
            self.body_of = training.step + 1 if training.world.plan.shares[training.rank].lanes else 0
        return False

    def _has_left(self) -> bool:
        """Where the loop is left in the middle of an epoch, by the engine's counter: only in a body."""
        simulation, step = self._training.simulation, self._training.step
        return step >= simulation.max_steps and (not simulation.leaves_by_counter or self.body_of == step)

    def _rest(self, generation: int, boundary: int) -> None:
        training = self._training
        if training.is_over(generation, boundary):
            return
        self.is_through = True
        if self.last_step:
            training.begin_boundary()  # it was told before it came here
            return
        self.is_awaited = True
        training.worker.session.publish()

    def stop_waiting(self) -> None:
        """The world is to be another one."""
        self.is_awaited = False

    def learn(self, step: int) -> None:
        """All scripts are through at this step."""
        self.last_step = self.last_step or step
        self._training.saves.saving.on_end(self._training.step)
        self._training.worker.session.publish()
        if self.is_awaited:
            self._training.begin_boundary()

    def look_done(self) -> None:
        """After a vote: the digests of the last step are given, and the script ends."""
        training = self._training
        if not training.done and self.is_last:
            training.done = True
            training.worker.session.report(Result(training.step, f"fingerprint of {training.step}", 1.0))
            training.worker.after(training.worker.chance.random(), self._end_script)

    def _end_script(self) -> None:
        self._training.ended = True
        self._training.worker.session.publish()

    def is_given_up(self, step: int) -> bool:
        """Whether all go back to before where this script has ended."""
        has_ended = self._training.ended or self.is_through
        return has_ended and step < (self.last_step or self._training.step)
