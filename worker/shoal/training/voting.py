"""A vote as this member takes part in it: its ballot, the all-gather, and what everybody's record says of itself."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_protos.activity import StepPhase
from torch import Tensor

from shoal.exchange.ballot import Ballot
from shoal.exchange.piece_order import FillTimes
from shoal.exchange.torn_vote import gather_of
from shoal.exchange.vote import Record, cast, unused_text
from shoal.optim.hyper import Group as Values
from shoal.optim.hyper import are_untouched, digest
from shoal.training.agreed_hyper import agreed_values, refuse_others
from shoal.training.checkpoint_saving import CheckpointSaving
from shoal.training.context import TrainingContext
from shoal.training.corruption_watch import CorruptionWatch
from shoal.training.evaluation import Evaluation
from shoal.training.lane_numbers import LaneTotals
from shoal.training.requests import Requests
from shoal.world import World


class Voting:
    """Called by the step, once all that a commit needs is here."""

    def __init__(
        self,
        context: TrainingContext,
        corruption: CorruptionWatch,
        saving: CheckpointSaving,
        evaluation: Evaluation,
        requests: Requests,
    ) -> None:
        self._context, self._corruption = context, corruption
        self._saving, self._evaluation, self._requests = saving, evaluation, requests
        self._digested: tuple[Sequence[Values], str] = (), ""
        """The newest values that all must agree upon, and their digest."""

    def vote(self, world: World, step: int, bad_gradient: str, norms: Tensor | None, times: FillTimes | None) -> Record:
        """Returns once all members have voted. `step`: the one that it commits; the last committed one where it commits
        none. `norms`: `(subtrees owned,)` float64, where the step needs the norm. `times`: where the next step goes by
        them. Raises `WorldChanged`.
        """
        context, group = self._context, world.group
        saving = self._saving.status
        self._saving.take_in_outcome()  # after the status: who is idle in a ballot says there what was saved
        ballot = self._ballot(step, bad_gradient, saving)
        self._corruption.before_vote()
        group.progress.reach(StepPhase.VOTE)
        gather = gather_of(context.faults, group, ballot, world.plan.generation)
        record = cast(gather, world.traffic, ballot, norms, self._corruption.comparisons(step), times)
        if step > context.state.step:  # in one without a step some have begun the next body, and set its values
            samples = context.loop.fetcher.given_late
            refuse_others(group, record, context.state.optimizer, context.state.modes, samples)
        context.begins = context.link.leave_vote(list(record.generations))
        return record

    def _digest(self) -> str:
        state, samples = self._context.state, self._context.loop.fetcher.given_late
        values = agreed_values(state.optimizer, state.modes, samples)
        if not are_untouched(values, self._digested[0]):
            self._digested = values, digest(values).hex()
        return self._digested[1]

    def _ballot(self, step: int, bad_gradient: str, saving: str) -> Ballot:
        context = self._context
        state, loop = context.state, context.loop
        trained, before = step > state.step, state.record
        numbers = loop.numbers.of_step() if trained else LaneTotals()
        return Ballot(
            step=step,
            generation=context.link.enter_vote(state.pending if trained else state.held.runs),
            hyper=self._digest(),
            losses=numbers.losses,
            reports=numbers.reports,
            skipped=loop.numbers.skipped if trained else 0,
            micro_batches=context.config.micro_batches_per_lane,
            skipped_before=before.skipped_micro_batches if before else 0,
            bad_loss=numbers.not_finite,
            bad_gradient=bad_gradient,
            is_scaled=int(state.loss_scale is not None),
            not_finite_before=before.not_finite_steps if before else 0,
            calls_back=int(context.calls_back),
            evaluations=self._evaluation.take_to_vote(),
            stream=loop.fetcher.bookmark(loop.lanes) if trained else "",
            requests=self._requests.pending + (self._saving.scheduled_requests() if trained else ()),
            saving=saving,
            saved=self._saving.saved,
            unused=unused_text(state.sums.unused) if trained and state.held.loaded.only_counts and loop.lanes else "",
        )
