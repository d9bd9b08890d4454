"""The end of a simulated script; where nothing says beforehand which step is the last, it waits for all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal_protos.messages import Result

if TYPE_CHECKING:
    from .training import Training


class OpenEnd:
    """Of one process. `is_told`: it knows the job's last step."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.is_told = not training.simulation.open_end
        self.is_through = self.is_awaited = False
        """Its script has gone through its epochs; it waits in a world at rest, and its status says so."""

    @property
    def known(self) -> int:
        """The last step, where nothing said it beforehand and it is known."""
        simulation = self._training.simulation
        return simulation.max_steps if simulation.open_end and self.is_told else 0

    @property
    def is_last(self) -> bool:
        """Whether its step is known to be the last one."""
        training = self._training
        return (training.step >= training.simulation.max_steps and self.is_told) or training.stops

    def begins(self) -> bool:
        """Instead of a boundary, where the script is through."""
        training = self._training
        self.is_awaited = False
        if self.is_told or training.stops:
            return False
        if not (self.is_through or training.step >= training.simulation.max_steps):
            return False
        training.idle, training.step_phase = True, ""
        training.worker.after(training.worker.chance.random(), self._rest, training.generation, training.boundary)
        return True

    def _rest(self, generation: int, boundary: int) -> None:
        if not self._training.is_over(generation, boundary):
            self.is_through = self.is_awaited = True
            self._training.worker.session.publish()

    def learn(self) -> None:
        """All scripts are through at this step."""
        self.is_told = True
        self._training.saves.saving.on_end(self._training.step)
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
        training = self._training
        has_ended = training.ended or self.is_through
        return has_ended and step < (training.simulation.max_steps if self.is_told else training.step)
