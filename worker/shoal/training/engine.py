"""The engine: the user's loop, and one optimizer step as ARCHITECTURE section 3 tells it.

`for batch in engine`, `engine.backward(loss)`, `engine.step()`. All that can fail in an exchange is inside `backward`
and `step`; when the world changes they take part in the change (resize.py) and return, and the iterator yields what is
to be done next, perhaps the same lane again. Knows the controller only through its link.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from shoal_protos.activity import StepPhase
from shoal_protos.errors import UserError
from shoal_protos.messages import Status
from torch import Tensor, nn

from shoal.blocks.bucket_hooks import BucketHooks
from shoal.config.training import TrainingConfig
from shoal.data.fetch import Fetcher
from shoal.data.forward_seed import ForwardSeed
from shoal.exchange.canonical import CanonicalReduction
from shoal.exchange.fills import receive_slice, send_slice, wait_for
from shoal.exchange.finite import stop_where_not_finite, warn
from shoal.exchange.hand_out import hand_out
from shoal.exchange.norm import subtree_sums
from shoal.exchange.torn_vote import gather_of
from shoal.exchange.vote import Ballot, Record, Request, cast
from shoal.failure import result_of
from shoal.faults import Faults
from shoal.group.group import WorldChanged
from shoal.numerics import check_threads
from shoal.session.link import Link
from shoal.training.ballot import ballot_of
from shoal.training.boundary import Boundary, StepCallback
from shoal.training.checkpoint_loading import Resuming
from shoal.training.checkpoint_saving import Saving
from shoal.training.corruption import CorruptionWatch
from shoal.training.evaluation import Evaluation
from shoal.training.lane_loop import LaneLoop
from shoal.training.requests import Requests, refuse_other_hyper_parameters
from shoal.training.resize import Resize
from shoal.training.state import NO_STEP, TrainingState
from shoal.training.telemetry import Meter
from shoal.world import World

PUBLIC = {
    "backward", "device", "evaluating", "export", "fingerprint", "generation", "global_step", "lanes", "loss", "module",
    "on_step", "rank", "register_state", "report", "reports", "save_checkpoint", "shard", "skip", "step", "stop",
    "warming_up", "world_size",
}  # fmt: skip
"""What scripts may use; all else is between the parts of this package."""

IDLE_SECONDS = 0.1
"""Pause between two votes without a step."""


class Engine:
    """Made by `shoal.initialize`. What a script may use is in docs/api.md, and what `dir(engine)` lists."""

    def __init__(
        self, config: TrainingConfig, state: TrainingState, link: Link, fetcher: Fetcher, faults: Faults
    ) -> None:
        self.config, self.state, self.link, self.faults = config, state, link, faults
        self.world: World | None = None
        self.boundaries = 0
        self.loop = LaneLoop(config.lanes, config.micro_batches_per_lane, fetcher)
        self.forward_seed = ForwardSeed(state.module, config.seed)
        self.requests = Requests(self)
        self.corruption = CorruptionWatch(self)
        self.resize = Resize(self)
        self.meter = Meter()
        self.evaluation = Evaluation(self)
        self.saving = Saving(self)
        self.boundary = Boundary(self)
        self.resuming = Resuming(self)
        self.module: nn.Module = state.module
        self.device = torch.device("cpu")
        self.done = False
        """The last step is committed and its digests are given."""
        self.left_loop = False
        """The script has gone through its loop, and cannot go back."""
        self.ended = False
        """The script has ended."""
        self.leaving = False
        """The controller has told this worker to end, or it has said why it failed; nothing is left to report."""
        self._torn = ""
        """Why an update failed half-way: this worker counts as dead."""
        self._bucket_hooks = BucketHooks(state.layout, state.parameters)
        self._reduction: CanonicalReduction | None = None
        self._bad_gradient = ""
        """Of the step at hand, where this worker's blocks have one."""
        faults.abort = self._abort_group
        link.before_building = lambda: faults.at("group", max(0, state.step))

    def _abort_group(self) -> None:
        if self.world is not None:
            self.world.group.abort()

    def __dir__(self) -> list[str]:
        return sorted(PUBLIC)

    # ---- what a script reads

    @property
    def world_size(self) -> int:
        """Members of the world, standbys too."""
        return self.world.plan.world_size if self.world else 1

    @property
    def rank(self) -> int:
        """This worker's number in the world; -1 while it is in none (before the loop, and in a warm-up)."""
        if self.world is not None:
            return self.world.rank
        return 0 if self.link.alone else -1

    @property
    def warming_up(self) -> bool:
        """Whether the loop's body runs for a warm-up: its result is thrown away, requests made in it are ignored."""
        return self.loop.is_warming_up

    @property
    def generation(self) -> int:
        """The number of the world; 0: in none."""
        return self.world.plan.generation if self.world else 0

    @property
    def global_step(self) -> int:
        """Committed steps of the job."""
        return self.state.step if self.state.step > NO_STEP else self.link.progress[0]

    @property
    def lanes(self) -> list[int]:
        """The numbers of the lanes trained here."""
        return list(self.world.lanes) if self.world else []

    @property
    def loss(self) -> float:
        """The last step's canonical loss: the mean over all lanes; nan before the first step."""
        loss = self.state.loss if self.state.step > NO_STEP else self.link.progress[1]
        return loss if loss is not None else math.nan

    @property
    def reports(self) -> dict[str, float]:
        """The last step's reported numbers, reduced like the loss, and evaluations (means over the lanes that
        arrived).
        """
        record = self.state.record
        return {**record.reports, **record.evaluations, **self.evaluation.since_the_step} if record else {}

    # ---- the loop

    def __iter__(self) -> Iterator[Any]:
        self.left_loop = False
        try:
            yield from self._batches()
            self.evaluation.settle()
            self.requests.settle()
        finally:
            self.left_loop = True
            self.forward_seed.disarm()

    def _batches(self) -> Iterator[Any]:
        while not self.over:
            self._check_whole()
            if self.world is None:
                yield from self._warm_up()
                self.resize.take_part()
            elif self.link.stopping:
                self.resize.take_part()
            elif self.world.lanes:
                self.faults.at("forward", self.state.step + 1)
                self.state.module_guard.mark(self.world)
                batch = self.loop.next_batch(self.state)
                self.forward_seed.arm(self.state.step, *self.loop.place)
                yield batch
            else:
                self.guarded(self._standby_step if self.world.plan.steps else self._vote_and_idle)

    @property
    def over(self) -> bool:
        """The last step is committed."""
        return 0 <= self.state.last_step <= self.state.step

    def _warm_up(self) -> Iterator[Any]:
        """A joiner runs one lane whose result is thrown away, so that compiling stalls nobody; then it is ready."""
        if self.loop.is_warm:
            return
        if not self.link.alone:
            batch = self.loop.warm_up_batch(self.state)
            self.forward_seed.arm(0, 0, 0)
            yield batch
        self.loop.end_warm_up(self.state)
        self.publish()  # what it knows of checkpoints, before anyone counts on it
        self.link.end_warm_up()
        self.publish()

    def backward(self, loss: Tensor) -> None:
        """Accumulates the gradient of this micro-batch's mean loss. `loss`: a scalar tensor of `engine.module`'s
        graph.
        """
        self._check_whole()
        if self.world is not None and self.link.stopping:
            self.resize.take_part()
        if not self.loop.in_flight:
            self.loop.check_void("engine.backward")
            return
        self.loop.prepare_backward(loss, self.state)
        self.faults.at("backward", self.state.step + 1)
        if self.world is None or not self.loop.at_last_backward:
            self.loop.backward(loss, self.state)
        else:
            self._last_backward(loss)

    def _last_backward(self, loss: Tensor) -> None:
        """Buckets leave for their owners as soon as the step's last backward has filled them."""
        try:
            self._reduction = self._new_reduction()
        except WorldChanged:
            self.resize.take_part(broken=True)
            self.backward(loss)
            return
        self.state.sums.begin_push(self.loop.lane)
        self._bucket_hooks.arm(self._reduction.on_filled)
        try:
            self.loop.backward(loss, self.state)
        finally:
            self._bucket_hooks.disarm()
        self.state.sums.end_push()

    def _new_reduction(self) -> CanonicalReduction:
        assert self.world is not None
        return CanonicalReduction(self.world.group, self.world.traffic, self.state.sums, self.boundaries)

    def step(self) -> bool:
        """Ends a micro-batch; after the last one of this worker's last lane it makes the optimizer step.

        Returns whether an optimizer step was committed.
        """
        if not self.loop.in_flight:
            self.loop.forget_void("engine.step")
            return False
        if self.loop.is_warming_up:
            self.loop.end_warm_up_batch(self.state)
            return False
        if self.loop.at_last_backward:
            self.state.module_guard.check(self.world)
            self.state.buffers.check()
            check_threads(self.config.torch_threads)
        before = self.state.step
        self.loop.end_micro_batch(self.state)
        self.step_on()
        if self.loop.lanes_done:
            self.guarded(self._optimizer_step)
        return self.state.step > before  # also where others had passed the vote, and this worker caught up

    def step_on(self) -> None:
        """The user's code has come further, as far as anyone watches it."""
        if self.world is not None:
            self.world.group.progress.step_on()

    def skip(self) -> bool:
        """In place of `backward` and `step`: gives this micro-batch up for good, in every world alike.

        Its gradient is zero; the step's gradient stays the mean over all lanes × micro-batches, `engine.loss` is the
        mean over those not skipped. A step in which all are skipped updates nothing. Returns what `step` returns.
        Raises `UserError` after `backward`.
        """
        self._check_whole()
        if not self.loop.in_flight:
            self.loop.forget_void("engine.skip")
            return False
        self.loop.skip(self.state)
        if not self.loop.is_warming_up and self.loop.at_last_backward:
            self.state.sums.push(self.loop.lane)
        return self.step()

    def guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except WorldChanged:
            self.resize.take_part(broken=True)

    # ---- one step

    def _optimizer_step(self) -> None:
        """Reduce, vote, update, hand out: one optimizer step, or none of it (raises WorldChanged)."""
        world, state, t = self.world, self.state, self.state.step + 1
        assert world is not None
        reduction, self._reduction = self._reduction or self._new_reduction(), None
        fills = world.plan.fill_slice(self.boundaries)
        sends = send_slice(world.group, state.held, fills)
        if self.boundaries and any(world.rank in (fill.source, fill.target) for fill in fills):
            self.faults.at("fill", t)
        self.faults.at("exchange", t)
        reduction.finish(reduced=lambda: self.faults.at("mirror", t))
        self._bad_gradient = reduction.bad_gradient
        began = time.monotonic()
        self.meter.on_fill(receive_slice(world.group, state.held, fills), time.monotonic() - began)
        world.group.progress.reach(StepPhase.BUFFERS)
        state.buffers.exchange(world.group, world.traffic)
        norms = (
            subtree_sums(state.sums.live.flats, world.plan.shares[world.rank].owned, state.layout)
            if state.clipping
            else None
        )
        wait_for(sends, world.group)
        state.pending = world.replays(self.boundaries)
        record = self._vote(world, self._ballot(t), norms)  # past this line the step is committed
        self.faults.at("optimizer", t)
        self.commit(record, world.plan.generation)
        self._after_commit(world)

    def commit(self, record: Record, generation: int) -> None:
        """The update; also of a roll-forward. When it fails half-way, the state is torn and this worker counts as
        dead, also where the script goes on after the error. Raises `JobFailed` for a step that is not finite.
        """
        before = self.state.record
        try:
            if self.config.stop_on_nan:
                stop_where_not_finite(record)
            self.state.commit(record, generation)
        except BaseException as error:
            result = result_of(error, self.state.step)
            self._torn, self.leaving = result.failure, True
            self.link.result(result)
            raise
        if self.rank == 0:
            warn(before, record)
        self.evaluation.on_commit()
        self.requests.on_commit(record)

    def _check_whole(self) -> None:
        if self._torn:
            raise UserError(f"this worker is out of the job since its update failed: {self._torn.splitlines()[0]}")

    def _standby_step(self) -> None:
        """A member without lanes takes part in the exchange, the vote and the hand-out all the same."""
        self.state.sums.live.zero()
        self._optimizer_step()

    def _after_commit(self, world: World) -> None:
        """The hand-out, and all that the passed vote asks for."""
        state = self.state
        state.forget_gradients()
        self.loop.begin_step(world.lanes)
        self.faults.at("hand_out", state.step)
        self._hand_out(world)
        state.module_guard.on_commit(world)
        self.boundaries += 1
        assert state.record is not None
        self.meter.on_step()
        self.boundary.pass_step(state.record)

    def _hand_out(self, world: World) -> None:
        """Owners hand out parameters to whoever has not updated them itself: then everybody has all."""
        boundaries, state = self.boundaries, self.state
        hand_out(world.group, state.flats, lambda owner, receiver: world.traffic.handed(boundaries, owner, receiver))
        if self.resize.frozen_in_place:
            state.current = state.everything

    def _vote(self, world: World, ballot: Ballot, norms: Tensor | None) -> Record:
        world.group.progress.reach(StepPhase.VOTE)
        self.faults.at("vote", ballot.step)
        gather = gather_of(self.faults, world.group, ballot, world.plan.generation)
        record = cast(gather, world.traffic, ballot, norms, self.corruption.comparisons(ballot.step))
        refuse_other_hyper_parameters(world.group, record, self.state.optimizer)
        prepared = self.link.leave_vote(list(record.generations))
        self.resize.begins = prepared
        return record

    def _ballot(self, step: int) -> Ballot:
        assert self.world is not None
        return ballot_of(self, step, self._bad_gradient)

    def guarded_vote(self) -> None:
        """One vote without a step, or a part in a change of the world."""
        if self.world is None or self.link.stopping:
            self.resize.take_part()
        else:
            self.guarded(self._vote_and_idle)

    def _vote_and_idle(self) -> None:
        """Where no step runs (paused, below `min`, the end), members vote all the same, some times a second."""
        world, record = self.world, self.vote_without_step()
        if all(request.kind == "save" for request in record.requests) and self.world is world:
            self.link.pause(IDLE_SECONDS)

    def vote_without_step(self) -> Record:
        """By it changes begin, fills run, requests are heard, an owed boundary is settled. Raises `WorldChanged`."""
        world = self.world
        assert world is not None
        if self.over and not self.done:
            self.faults.at("after_last", self.state.step)
        fills = world.plan.fill_slice(self.boundaries)
        sends = send_slice(world.group, self.state.held, fills)
        self.meter.on_fill(receive_slice(world.group, self.state.held, fills), 0.0)
        wait_for(sends, world.group)
        record = self._vote(world, self._ballot(self.state.step), None)
        self.evaluation.on_vote(record.evaluations)
        if not world.plan.steps and not self.boundaries:
            self._hand_out(world)  # joiners would wait for a step's
        self.boundaries += 1
        self.boundary.pass_vote(record)
        return record

    def publish(self) -> None:
        """States where this worker stands; the link says it at once unless only the step has changed."""
        state = self.state
        status = Status(
            sequence=0, generation=0, state=self.link.membership().point, promised=0,
            step=state.step, committed_in=state.committed_in, boundaries=self.boundaries, holds=state.held.runs,
            parameters_current=state.is_current and self.world is not None, done=self.done, ended=self.ended,
            checkpoint=self.resuming.sighting, unreadable_checkpoint=self.resuming.damage,
            highest_saved=self.resuming.highest_saved,
            corrupt=self.corruption.corrupt,
        )  # fmt: skip
        passed_over = " ".join(self.resuming.skipped)
        self.link.publish(status, self.meter.telemetry(state.loss, state, self.saving.recent, passed_over))

    # ---- what a script asks for

    def report(self, **numbers: float | Tensor) -> None:
        """Per-lane numbers of this step, reduced like the loss; within `evaluating()`, sums of the evaluation."""
        values = {name: float(torch.as_tensor(value).detach()) for name, value in numbers.items()}
        if self.evaluation.active:
            self.evaluation.report(values)
        else:
            self.loop.numbers.report(values)

    def on_step(self, callback: StepCallback) -> None:
        """Calls `callback(engine)` once per committed step, on whoever is rank 0 then."""
        self.boundary.on_step(callback)

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation over `engine.shard(dataset)` between two micro-batches: no gradients, eval mode, all put back.

        Also at the top of the loop's body, and after the loop. Raises `UserError` between a forward and `step`.
        """
        return self.evaluation.running()

    def shard(self, dataset: Any) -> Iterator[Any]:
        """The micro-batches of a dataset that belong to the lanes held here. Waits for nobody."""
        return self.evaluation.shard(dataset)

    def fingerprint(self) -> str | None:
        """In the loop asks for it and returns None; after the loop blocks and returns the digest, hexadecimal."""
        return self.requests.ask(Request("fingerprint"))

    def export(self, path: str | Path) -> None:
        """Rank 0 writes the model as safetensors; in the loop after this step, after the loop at once."""
        self.requests.ask(Request("export", str(path)))

    def save_checkpoint(self) -> None:
        """Saves a checkpoint to `shoal.checkpoint.path`; in the loop after this step, after the loop at once."""
        self.saving.ask()

    def register_state(self, name: str, of: Any) -> None:
        """An object with `state_dict` and `load_state_dict`: rank 0's is saved in checkpoints and given to joiners.
        Before the loop.
        """
        self.saving.register(name, of)

    def stop(self) -> None:
        """An early end, voted: all members leave their loops after the same step."""
        self.requests.ask(Request("stop"))

    def lanes_in_flight(self) -> int:
        """The lane whose micro-batch the user's loop has now; -1: none."""
        return self.loop.lane if self.loop.in_flight and self.world is not None else -1
