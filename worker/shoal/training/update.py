"""The update: what makes a vote's record real on this worker; of a step, and of one that it rolls forward.

The only caller of `TrainingState.commit`. An update that fails half-way leaves a torn state: this worker counts as dead
from then on, also where its script goes on after the error.
"""

from __future__ import annotations

from functools import partial

from shoal_protos.errors import UserError

from shoal.blocks.held import OnUpdated, unheard
from shoal.exchange.copies import Findings
from shoal.exchange.finite import stop_where_not_finite, stop_where_nothing_scales, warn
from shoal.exchange.vote import Record
from shoal.failure import result_of
from shoal.out_of_memory import explain, note_what
from shoal.training.context import TrainingContext
from shoal.training.evaluation import Evaluation
from shoal.training.memory_setting import memory_setting


class Update:
    """The update of one worker's blocks."""

    def __init__(self, context: TrainingContext, evaluation: Evaluation) -> None:
        self._context, self._evaluation = context, evaluation
        self._torn = ""
        """Why an update failed half-way."""

    def apply(
        self, record: Record, generation: int, on_updated: OnUpdated = unheard, copies: Findings | None = None
    ) -> None:
        """`generation`: the one in which the vote passed. `on_updated`: see `HeldBlocks.apply`.

        Raises `JobFailed` for a step that is not finite; `copies`: what is known then of the copies of all blocks.
        """
        context, before = self._context, self._context.state.record
        try:
            if context.config.stop_on_nan:
                stop_where_not_finite(record, copies)
            stop_where_nothing_scales(record, context.state.loss_scale)
            context.state.commit(record, generation, on_updated)
        except BaseException as error:
            note_what(error, "the update was made, and with the first one optimizer state")
            explain(error, f"in the update of step {record.step}", partial(memory_setting, context))
            result = result_of(error, context.state.step)
            self._torn, context.leaving = result.failure, True
            context.link.result(result)
            raise
        if context.rank == 0:
            warn(before, record, context.state.scale)
        self._evaluation.on_commit()

    def check_whole(self) -> None:
        """Raises `UserError` where the state is torn."""
        if self._torn:
            raise UserError(f"this worker left the job because its update failed: {self._torn.splitlines()[0]}")
