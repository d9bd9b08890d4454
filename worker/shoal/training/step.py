"""One optimizer step, as docs/architecture.md ("A step") tells it: `Step.make` is its list, one line per sentence.

Where no step runs a vote alone stands in for it. Raises `WorldChanged` wherever the world breaks; then the step was not
made here, or, past its vote, its boundary is owed.

`Voting` is a vote as this member takes part in it: its ballot, the all-gather, and what follows from the record alone.
`Update` makes a vote's record real on this worker, of a step or of one that it rolls forward; it is the only caller of
`TrainingState.commit`. An update that fails half-way leaves a torn state: this worker counts as dead from then on, also
where its script goes on after the error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from shoal_protos.activity import StepPhase
from shoal_protos.errors import UserError
from shoal_protos.plan import Fill
from shoal_protos.runs import NO_BLOCKS
from shoal_protos.training_log import get_logger
from torch import Tensor

from shoal.blocks.state_home import OnUpdated, unheard
from shoal.checkpoint.failure import result_of
from shoal.config.out_of_memory import explain, naming, note_what
from shoal.exchange.ballot import Ballot
from shoal.exchange.canonical import CanonicalReduction
from shoal.exchange.fill_slices import receive_slice, send_slice, wait_for
from shoal.exchange.finite import stop_where_not_finite, stop_where_nothing_scales, subtree_sums, warn
from shoal.exchange.hand_out import HandOut
from shoal.exchange.pieces import FillTimes
from shoal.exchange.round_reduction import RoundReduction
from shoal.exchange.shaping import Shaping
from shoal.exchange.vote import Findings, Record, Undecided, cast, gather_of, halts, norm_before, unused_text
from shoal.exchange.world import World
from shoal.group.group import Work
from shoal.guards.agreed_values import agreed_values, refuse_others, take_over_where_no_body_runs
from shoal.optim.hyper import Group as Values
from shoal.optim.hyper import are_untouched, digest, has_turn, without_turn
from shoal.process.faults import fault_point
from shoal.state.training_state import ENDS
from shoal.training.boundary import Boundary
from shoal.training.checkpoint_saving import CheckpointSaving
from shoal.training.context import TrainingContext
from shoal.training.corruption_watch import CorruptionWatch
from shoal.training.evaluation import Evaluation
from shoal.training.lane_loop import LaneTotals
from shoal.training.memory_report import MemoryReport, memory_setting
from shoal.training.parameters import Parameters
from shoal.training.reducing import Reducing
from shoal.training.requests import Requests

log = get_logger("shoal")


class Step:
    """The steps of one worker. `number` is the current step."""

    reducing: Reducing
    """Calls `on_reduced`; set by parts.py."""

    def __init__(
        self,
        context: TrainingContext,
        voting: Voting,
        update: Update,
        boundary: Boundary,
        evaluation: Evaluation,
        parameters: Parameters,
    ) -> None:
        self._context, self._voting, self.update, self._boundary = context, voting, update, boundary
        self._evaluation = evaluation
        self.parameters = parameters
        self._memory = MemoryReport(context)
        self._shaping: Shaping | None = None
        self.faults = context.faults
        self.number = 0

    # ---- a step

    def make(self) -> None:
        """Reduce, vote, update, hand out: one optimizer step, or none of it."""
        self.number = self._context.state.step + 1
        self._boundary.end_body()
        reduction, fills = self.reducing.take(), self._slice()
        sends = self._send_fills(fills)
        self._reduce(reduction)
        self._receive_fills(fills)
        self._exchange_buffers()
        take_over_where_no_body_runs(self._world, self._context.state.optimizer, self._context.state.modes)
        norms = self._sums_of_squares()  # by whose turn it is
        self._shape(norms)
        wait_for(sends, self._world.group)
        record = self._pass_vote(reduction.find_bad_gradient, norms)  # past this line the step is committed
        if halts(record):
            self._end_before(record)  # or the job ends before it
            return
        hand_out = self._begin_hand_out()
        self._apply(record, hand_out)
        self._hand_out(hand_out)
        self._boundary.pass_step(record)

    @property
    def _world(self) -> World:
        assert self._context.world is not None
        return self._context.world

    def _slice(self) -> tuple[Fill, ...]:
        """What is filled beside this vote."""
        return self._world.plan.fill_slice(self._context.boundaries)

    def _send_fills(self, fills: tuple[Fill, ...]) -> list[Work]:
        world = self._world
        sends = send_slice(world.group, self._context.state.held, fills)
        if self._context.boundaries and any(world.rank in (fill.source, fill.target) for fill in fills):
            self._on_later_slice()
        return sends

    @fault_point("fill")
    def _on_later_slice(self) -> None:
        """A slice that is not the first is on its way."""

    @fault_point("exchange")
    def _reduce(self, reduction: CanonicalReduction | RoundReduction) -> None:
        reduction.finish()

    @fault_point("mirror")
    def on_reduced(self) -> None:
        """A piece's reduced gradient is here, and not yet with its mirrors."""

    def _receive_fills(self, fills: tuple[Fill, ...]) -> None:
        began = time.monotonic()
        taken = self._receive_slice(fills)
        self._context.meter.on_fill(taken, time.monotonic() - began)

    def _receive_slice(self, fills: tuple[Fill, ...]) -> int:
        """Returns its bytes; after the plan's last slice, what the job's changes have cut becomes few segments."""
        world, held = self._world, self._context.state.held
        with naming("blocks that this worker is to hold came from those that have them"):
            taken = receive_slice(world.group, held, fills)
        if fills and self._context.boundaries + 1 == world.plan.boundaries:
            held.join()
        return taken

    def _exchange_buffers(self) -> None:
        self._world.group.progress.reach(StepPhase.BUFFERS)
        self._context.state.buffers.exchange(self._world.group, self._world.traffic)

    def _sums_of_squares(self) -> Tensor | None:
        """`(subtrees owned,)` float64, where gradients are clipped."""
        state = self._context.state
        if not state.clipping:
            return None
        self._forget_gradients_without_a_turn()
        return subtree_sums(state.sums.reduced, self._world.traffic.owned[self._world.rank], state.layout)

    def _forget_gradients_without_a_turn(self) -> None:
        """What no group's update uses is in no norm."""
        layout, groups = self._context.state.layout, self._context.state.optimizer.param_groups
        for stretch in layout.stretches(self._world.traffic.owned[self._world.rank]):
            if not has_turn(groups[layout.buckets[stretch.bucket].group]):
                self._context.state.sums.reduced.of(stretch).zero_()

    @fault_point("shape")
    def _shape(self, norms: Tensor | None) -> None:
        """Updates of tensors that must be seen whole are made, and wait for the vote beside the gradient."""
        state, world = self._context.state, self._world
        if not state.held.optimizer_step.whole.are_trained:
            return
        if self._shaping is None or self._shaping.traffic is not world.traffic:
            self._shaping = Shaping(world.group, world.traffic, state.held)
        scale = state.clip(norm_before(world.group, world.traffic, norms)) if norms is not None else 1.0
        self._shaping.run(state.sums.reduced, scale, self._context.boundaries, state.is_new)

    def _pass_vote(self, find_bad_gradient: Callable[[], str] = str, norms: Tensor | None = None) -> Record:
        """The vote that decides. One that tells of evaluations which some may not have heard of decides nothing: all
        hear of them, and vote again.
        """
        self._boundary.settle_evaluations()
        try:
            record = self._vote_once(find_bad_gradient, norms)
        except Undecided as undecided:
            self._boundary.settle_evaluations(undecided.messages)
            record = self._vote_once(find_bad_gradient, norms)
        self._world.group.order.begin_step(self._kind_after(record), record.in_order)
        return record

    def _kind_after(self, record: Record) -> object:
        """What decides which messages there are until the next vote, as all members have it; None: there may be others
        than in any step.
        """
        context, plan = self._context, self._world.plan
        voted = set(record.generations)
        ends = len(voted) == 1 and plan.generation not in voted
        takes_turns = self._shaping is not None and self._shaping.takes_turns  # the next step's is not known yet
        ends = ends or takes_turns or any(request.kind in ENDS for request in record.requests)
        if self.number == context.state.step or ends:
            return None
        here, following = (min(context.boundaries + more, plan.boundaries) for more in (0, 1))
        times = self.reducing.fill_times
        return plan.generation, here, following, times.order if times is not None else None

    def _vote_once(self, find_bad_gradient: Callable[[], str], norms: Tensor | None) -> Record:
        self.parameters.before_vote()
        self._boundary.before_vote()
        bad_gradient = find_bad_gradient()  # what it asks of a device is made beside the rest
        for check in self._context.state.guards.before_vote:  # also where it broke before its vote
            check()
        self._context.state.device.settle()
        if self.number > self._context.state.step:
            self._note_pending()
            bad_gradient = bad_gradient or (self._shaping.find_bad() if self._shaping is not None else "")
        return self._vote(bad_gradient, norms)

    def _note_pending(self) -> None:
        """All that the commit reads is here: these blocks could roll forward."""
        self._context.state.pending = self._world.replays(self._context.boundaries)

    @fault_point("vote")
    def _vote(self, bad_gradient: str = "", norms: Tensor | None = None) -> Record:
        times = self.reducing.fill_times if self.number > self._context.state.step else None
        return self._voting.vote(self._world, self.number, bad_gradient, norms, times)

    @fault_point("optimizer")
    def _apply(self, record: Record, hand_out: HandOut) -> None:
        copies = self._boundary.look_for_corruption(record)
        self.update.apply(record, self._world.plan.generation, hand_out.on_updated, copies)
        self._context.state.forget_gradients()
        self._context.is_first_step = False
        self._tell_of_a_saved_turn()
        if self._context.hub is not None:
            self._context.hub.on_commit()
        self._context.loop.begin_step(self._world.lanes)

    def _tell_of_a_saved_turn(self) -> None:
        """Once after a checkpoint, where a body has run and has not said whose turn it is."""
        context = self._context
        if context.has_saved_turn and context.lanes:
            context.has_saved_turn = False
            log.warning("turn_as_saved", stay=without_turn(context.state.optimizer),
                        means="the loop's body has not called engine.turn since the checkpoint, so these networks are "
                        "not updated until it does")  # fmt: skip

    @fault_point("hand_out")
    def _hand_out(self, hand_out: HandOut) -> None:
        context = self._context
        coming = self.parameters.on_updated(hand_out)
        context.state.module_guard.on_commit(self._world, coming)
        context.boundaries += 1
        self.parameters.on_boundary(self._world)
        context.meter.on_step()
        self._memory.on_step(self._world)

    def _begin_hand_out(self) -> HandOut:
        """Parameters go to the workers that do not update them; what is updated leaves while the rest is."""
        world, state, boundaries = self._world, self._context.state, self._context.boundaries
        return HandOut(world.group, state.weights, world.traffic, world.traffic.handed(boundaries))

    def hand_to(self, joiners: Collection[int]) -> None:
        """A planned world has begun: these ranks get the parameters with which it begins, beside the next forward.
        Raises `WorldChanged`.
        """
        world, state = self._world, self._context.state
        lacking = state.everything - state.memory.fetched
        flow = world.traffic.brought([lacking if rank in joiners else NO_BLOCKS for rank in world.plan.ranks])
        coming = self.parameters.on_updated(HandOut(world.group, state.weights, world.traffic, flow))
        state.module_guard.on_commit(world, coming)

    # ---- no step

    def vote_alone(self) -> Record:
        """A vote without a step: changes begin by it, fills run, requests travel, an owed boundary is settled."""
        context, group, held = self._context, self._world.group, self._context.state.held
        self.number = context.state.step
        if context.is_over and not context.done:
            self._on_end()
        self._boundary.end_body()
        fills = self._slice()
        sends = send_slice(group, held, fills)
        context.meter.on_fill(self._receive_slice(fills), 0.0)
        wait_for(sends, group)
        record = self._pass_vote()
        self._commit_nothing(record, steps=self._world.plan.steps)
        return record

    def _end_before(self, record: Record) -> None:
        """The vote of a step has said that the job is over before it."""
        context = self._context
        context.state.end_here()
        context.loop.begin_step(self._world.lanes)
        self._commit_nothing(replace(record, step=context.state.step), steps=False)

    def _commit_nothing(self, record: Record, steps: bool) -> None:
        """What follows such a vote. `steps`: whether steps follow in this world."""
        context = self._context
        self._evaluation.on_vote(record.evaluations)
        if not steps and not context.boundaries:
            # a bad copy that made the job pause had handed its parameters out; once it is gone, good owners do
            self._begin_hand_out().finish()
            context.state.current = context.state.everything
        context.boundaries += 1
        self.parameters.on_boundary(self._world)
        self._boundary.pass_vote(record)

    @fault_point("after_last")
    def _on_end(self) -> None:
        """The last step is committed, and its digests are not given yet."""


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
        them. Raises `WorldChanged`, and `Undecided`.
        """
        context, group = self._context, world.group
        goes_on = step > context.state.step and not 0 < context.state.last_step <= step
        in_order = group.order.end_step() and goes_on
        saving = self._saving.status
        self._saving.take_in_outcome()  # after the status: who is idle in a ballot says there what was saved
        ballot = self._ballot(step, bad_gradient, saving, world.traffic.coordinates.tells, in_order)
        self._corruption.before_vote()
        group.progress.reach(StepPhase.VOTE)
        gather = gather_of(context.faults, group, ballot, world.plan.generation)
        record = cast(gather, world.traffic, ballot, norms, self._corruption.comparisons(step), times)
        if step > context.state.step:  # in one without a step some have begun the next body, and set its values
            samples = context.loop.fetcher.given_late
            refuse_others(world, record, context.state.optimizer, context.state.modes, samples)
        context.begins = context.link.leave_vote(list(record.generations))
        return record

    def _digest(self) -> str:
        state, samples = self._context.state, self._context.loop.fetcher.given_late
        values = agreed_values(state.optimizer, state.modes, samples)
        if not are_untouched(values, self._digested[0]):
            self._digested = values, digest(values).hex()
        return self._digested[1]

    def _ballot(self, step: int, bad_gradient: str, saving: str, tells: bool, in_order: bool) -> Ballot:
        """`tells`: whether it speaks for its lanes. `in_order`: whether the next step's messages may go as this one's
        have.
        """
        context = self._context
        state, loop = context.state, context.loop
        trained, before = step > state.step, state.record
        numbers = loop.numbers.of_step() if trained and tells else LaneTotals()
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
            evaluation_messages=self._evaluation.messages,
            in_order=int(in_order),
            unused=unused_text(state.sums.unused) if trained and state.held.loaded.only_counts and loop.lanes else "",
        )


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
