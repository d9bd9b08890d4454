"""What this worker states to its controller: where it stands, what it holds, which checkpoints it knows of."""

from __future__ import annotations

from dataclasses import replace

from shoal_protos.messages import MOST_REPORTS, MemberState, Status

from shoal.training.checkpoint_loading import CheckpointLoading
from shoal.training.checkpoint_saving import CheckpointSaving
from shoal.training.context import TrainingContext
from shoal.training.corruption_watch import CorruptionWatch
from shoal.training.evaluation import Evaluation, reported_numbers


class StatusReport:
    """Composed anew whenever something has changed."""

    def __init__(
        self,
        context: TrainingContext,
        loading: CheckpointLoading,
        saving: CheckpointSaving,
        corruption: CorruptionWatch,
        evaluation: Evaluation,
    ) -> None:
        self._context, self._loading, self._saving, self._corruption = context, loading, saving, corruption
        self._evaluation = evaluation
        self._reports: dict[str, float] = {}
        evaluation.measured.add_listener(lambda _: self.publish())

    def publish(self) -> None:
        """States it; the link sends it at once unless only the step has changed."""
        context = self._context
        state = context.state
        status = Status(
            sequence=0, generation=0, state=MemberState.WARMING_UP, promised=0,  # the link says these
            step=state.step, committed_in=state.committed_in, boundaries=context.boundaries, holds=state.held.runs,
            done=context.done, ended=context.ended or context.awaits_end,
            checkpoint=self._loading.known.reference,
            unreadable_checkpoint=self._loading.known.unreadable_checkpoint,
            highest_saved=self._loading.highest_saved,
            corrupt=self._corruption.corrupt, last_step=state.last_step if context.config.is_open else 0,
        )  # fmt: skip
        telemetry = context.meter.telemetry(
            state, self._saving.recent, " ".join(self._loading.skipped), self._loading.changed, self._latest_reports()
        )
        telemetry = replace(telemetry, lane_seconds=context.lane_clock.lane_seconds)
        if context.hub is not None:
            void, waited = context.loop.void_lanes, context.hub.wait_seconds
            telemetry = replace(telemetry, void_lanes=void, cell_wait_seconds=waited)
        context.link.publish(status, telemetry)

    def _latest_reports(self) -> dict[str, float]:
        """Return the last number of each name: one of every hundredth step is shown until it is reported again."""
        new = reported_numbers(self._context, self._evaluation)
        if not new:
            return self._reports
        kept = {name: value for name, value in self._reports.items() if name not in new}
        self._reports = dict([*kept.items(), *new.items()][-MOST_REPORTS:])
        return self._reports
