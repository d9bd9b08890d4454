"""The user's loop within a step: which lane and micro-batch it is at, and the numbers that it has summed up so far.

A lane can be void: the world changed under it, and what the user's loop still does with its batch has no effect until
the iterator yields the next one.

The numbers (losses, what the script reports, micro-batches that it skips) are kept per whole subtree of lanes, so that
a step's mean has the same bits in every world. A skipped micro-batch says nothing: the means are over the others. Knows
no world and no group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from shoal_protos.errors import UserError
from shoal_protos.runs import Span
from torch import Tensor

from shoal.blocks.flat import drop_gradients
from shoal.core.tree import push
from shoal.data.fetch import Fetcher, upcoming
from shoal.exchange.pieces import Extent
from shoal.exchange.vote import check_names
from shoal.guards.loop_guards import (
    OF_LOSSES,
    CallOrder,
    LoopCalls,
    PortedLoss,
    check_loss,
    refuse_more_in_half_precision,
)
from shoal.state.training_state import TrainingState

Loss = float | Tensor
"""`()` float64 on a device, which may still be making it."""
Made = Callable[[], Sequence[Loss]]
"""A call that makes all forwards and backwards of a lane, and returns the losses of its micro-batches."""


class LaneLoop:
    """`lanes` are those of this worker in this step; `lane` is the one at hand."""

    def __init__(
        self,
        job_lanes: int,
        micro_batches: int,
        fetcher: Fetcher,
        calls: LoopCalls = OF_LOSSES,
        expert: tuple[int, int] = (0, 1),
    ) -> None:
        """`micro_batches`: those of a lane that are trained here. `calls`: what the script calls for each batch.
        `expert`: this worker's place among those of a cell's experts, which take a lane's micro-batches in turn, and
        how many they are.
        """
        self._micro_batches, self.fetcher, self.calls = micro_batches, fetcher, calls
        index, places = expert
        self._numbers = range(index, micro_batches * places, places)
        """Of these, among all of the lane."""
        self.numbers = LaneNumbers(job_lanes, micro_batches)
        self._ported = PortedLoss(job_lanes, micro_batches)
        self.is_warm = False
        self.is_warming_up = False
        self.in_flight = False
        """The user's loop has a batch whose lane counts."""
        self._void = self._more = False
        self.comes_again = False
        """The lane of the batch that the user's loop had last is void, and there is no next batch yet."""
        self.void_lanes = 0
        """Lanes that were begun and counted no more, in the life of this worker."""
        self._order = CallOrder(calls)
        self.begin_step(())

    def begin_step(self, lanes: tuple[int, ...]) -> None:
        """From the first lane."""
        if self.in_flight:
            self._void = self.comes_again = True
            self.void_lanes += not self.is_warming_up
        self.in_flight = self.is_warming_up = False
        self._order.reset()
        self.lanes, self._index, self._micro = lanes, 0, 0
        self.numbers.begin_step()

    def continue_with(self, lanes: tuple[int, ...]) -> bool:
        """Go on with the step where the lanes finished and the one in flight are among `lanes`; returns whether it
        does.

        Not once the step's last lane is done: its sums have been sent and changed in place. Nor where none would be
        left: sums leave with the last lane's backward.
        """
        is_within = self.in_flight or self._micro > 0
        begun = self.lanes[: self._index + is_within]
        if self.lanes_done or not set(begun) <= set(lanes):
            return False
        if not is_within and len(begun) == len(lanes):
            return False
        self.lanes = (*begun, *(lane for lane in lanes if lane not in begun))
        return True

    @property
    def lane(self) -> int:
        return self.lanes[self._index]

    @property
    def place(self) -> tuple[int, int]:
        """Lane and micro-batch at hand."""
        return (0, 0) if self.is_warming_up else (self.lane, self._numbers[self._micro])

    @property
    def begins_lane(self) -> bool:
        """Whether the next batch is a lane's first one."""
        return self._micro == 0

    @property
    def lanes_done(self) -> bool:
        return self._index >= len(self.lanes)

    @property
    def at_last_backward(self) -> bool:
        """Whether the next backward is the step's last one here."""
        return self._index == len(self.lanes) - 1 and self._micro == self._micro_batches - 1

    @property
    def at_lanes_last_backward(self) -> bool:
        """Whether the next backward is the last one of the lane at hand."""
        return not self.is_warming_up and self._micro == self._micro_batches - 1

    @property
    def has_begun(self) -> bool:
        """Whether something of the step at hand is trained here."""
        return self._index > 0 or self._micro > 0 or self.has_gradient

    @property
    def samples(self) -> int:
        """Length of the dataset."""
        return self.fetcher.sampler.samples

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which the dataset is read once."""
        return self.fetcher.sampler.steps_per_epoch

    @property
    def is_void(self) -> bool:
        """Whether the user's loop has a batch that counts no more."""
        return self._void

    # ---- a micro-batch

    def next_batch(self, state: TrainingState) -> Any:
        """The next micro-batch of this step. Raises `UserError` where the loop has not ended the one before, or goes on
        after an error with which the step has ended.
        """
        if self.lanes_done:
            raise UserError(
                f"step {state.step + 1} was not made: the script caught the error that engine.step had raised, and "
                "went on. Nothing of the step is left to do; let such an error end the script."
            )
        self._order.begin(self._where(state))
        drop_gradients(state.parameters)
        if self._micro == 0:
            state.sums.begin_lane()
            state.buffers.put_back()
            self.numbers.begin_lane()
        else:
            state.buffers.begin_micro_batch()
            self.numbers.begin_micro_batch()
        place = state.step, *self.place
        after = upcoming(place, self.lanes, self._numbers, state.last_step)
        batch = self.fetcher.micro_batch(*place, after)
        for look in state.guards.on_batch:
            look()
        self.in_flight, self._void, self.comes_again = True, False, False
        return batch

    def collate(self, dataset: Any, numbers: list[int]) -> Any:
        """Samples of another dataset as a batch: for evaluation."""
        return self.fetcher.collate(dataset, numbers)

    def warm_up_batch(self, state: TrainingState) -> Any:
        """Lane 0 of a step, the first one or that at hand: of the right shape for the model, whatever comes of it."""
        self._order.begin("in the warm-up")
        drop_gradients(state.parameters)
        state.sums.begin_lane()
        batch = self.fetcher.micro_batch(max(0, state.step), 0, 0)
        for look in state.guards.on_batch:
            look()
        self.is_warming_up = self.in_flight = True
        return batch

    def end_warm_up(self, state: TrainingState) -> None:
        """Throw the warm-up's gradients, buffers and losses away."""
        self._order.check_ended("in the warm-up")
        self.is_warming_up, self.is_warm, self.in_flight = False, True, False
        state.sums.clear()
        state.buffers.put_back()
        self.numbers.begin_step()

    def prepare_backward(self, loss: Tensor | Made, state: TrainingState, more: bool) -> None:
        """All that may be refused of a backward, before anything is changed. `more`: another one of this micro-batch
        is to come. Raises `UserError`.
        """
        self._order.check_backward(self._where(state))
        if not callable(loss):
            check_loss(loss)
        if more and self._micro_batches == 1:
            refuse_more_in_half_precision(state.layout)
        where, is_continued = self._where(state), self._order.awaits_more
        for check in state.guards.before_backward:
            check(where, is_continued)
        if is_continued:
            drop_gradients(state.parameters)
        self._more = more
        state.sums.before_backward()
        state.sums.live.put_back(state.parameters)

    def backward(self, loss: Tensor | Made, state: TrainingState, arriving: Iterable[Extent] = ()) -> None:
        """Accumulates into the live gradient copy. `loss`: or what makes all gradients of a lane. `arriving`: where the
        reduction may write to it from now on.
        """
        self._order.backward_begins(self._where(state))
        if callable(loss):
            losses = loss()
        else:
            if not self.is_warming_up:
                self._ported.look(loss, self.lane)
            scaled = loss if state.loss_scale is None else loss.float() * state.scale
            (scaled / self._micro_batches if self._micro_batches > 1 else scaled).backward()
            losses = (kept_loss(loss, state),) if not self.is_warming_up else ()
        self._order.backward_ends(self._more)
        state.sums.backward_done(state.parameters, self.at_lanes_last_backward and not self._more)
        for look in state.guards.after_backward:
            look(arriving)
        for one in losses:
            self.numbers.add_loss(one / len(losses) if len(losses) > 1 else one)

    @property
    def has_gradient(self) -> bool:
        """Whether the micro-batch at hand has begun its backward."""
        return self._order.has_gradient

    def skip(self, state: TrainingState, has_samples: bool = True) -> None:
        """Gives the micro-batch at hand up: it has a gradient of zero, and leaves no trace in buffers and numbers. One
        without samples is not counted as skipped: it adds nothing to the loss, whose divisor stays.
        """
        self._order.skip(self._where(state))
        state.buffers.undo_micro_batch()
        if has_samples:
            self.numbers.skip()

    def _where(self, state: TrainingState) -> str:
        if self.is_warming_up:
            return "in the warm-up"
        part = f", micro-batch {self._micro}" if self._micro_batches > 1 else ""
        return f"step {state.step + 1}, lane {self.lane}{part}"

    def check_step(self, state: TrainingState) -> None:
        """Raises `UserError` where this micro-batch has no gradient, or the script has changed it."""
        self._order.check_step(self._where(state))
        for check in state.guards.before_step:
            check()

    def end_warm_up_batch(self, state: TrainingState) -> None:
        """The user's loop is done with the warm-up's batch."""
        self.check_step(state)
        self._order.reset()
        self.in_flight = False

    def end_micro_batch(self, state: TrainingState) -> None:
        """After the lane's last micro-batch its gradient joins the subtree sums. Raises `UserError` without one.

        The script's hands are taken off the gradients: what it does with them from here would change finished sums.
        """
        self.check_step(state)
        self._order.reset()
        drop_gradients(state.parameters)
        self.in_flight = False
        self._micro += 1
        if self._micro < self._micro_batches:
            return
        state.buffers.lane_done(self.lane)
        state.sums.lane_done(self.lane, is_last=self._index == len(self.lanes) - 1)
        self.numbers.lane_done(self.lane)
        self._index, self._micro = self._index + 1, 0

    def give_back(self) -> None:
        """The user's loop is left with a micro-batch, of a warm-up perhaps, of which nothing was made."""
        if self.in_flight and not self.has_begun:
            self.begin_step(self.lanes)

    # ---- a void lane

    def check_void(self, call: str) -> None:
        """Raises `UserError` when the call stands where no batch was yielded."""
        if not self._void:
            raise UserError(
                f"{call} was called without a {self.calls.batch}; call it once for each batch that this engine yields "
                "(networks that train each other, as in a GAN, belong into one module with one engine)."
            )

    def forget_void(self, call: str) -> None:
        """The user's loop is done with a void lane."""
        self.check_void(call)
        self._void = False


def kept_loss(
    loss: Tensor,  # of one element
    state: TrainingState,
) -> Loss:
    """What a script may change no more. The host does not wait for a device: what is there is read when the lanes are
    done.
    """
    if state.device.on_host or not state.device.holds(loss):
        return loss.item()
    return loss.detach().to(torch.float64, copy=True).reshape(())


Numbers = tuple[float, dict[str, float] | None]
"""Numbers of a subtree of lanes: the sum of their losses, and of what was reported in all of them, by name; None where
all its micro-batches were skipped.
"""


@dataclass(frozen=True, slots=True)
class LaneTotals:
    """Of all lanes of a step, one number per whole subtree."""

    losses: tuple[float, ...] = ()
    reports: dict[str, list[float]] = field(default_factory=dict)
    """By name; names that some lane did not report are left out."""
    not_finite: str = ""
    """Names the first lane whose loss is not finite; empty where all are."""


class LaneNumbers:
    """Losses and reported numbers of one step."""

    def __init__(self, job_lanes: int, micro_batches: int) -> None:
        self._job_lanes, self._micro_batches = job_lanes, micro_batches
        self.begin_step()

    def begin_step(self) -> None:
        self._lanes: list[tuple[int, list[Loss], dict[str, float] | None]] = []
        """Those that are done: the losses of their micro-batches, and what was reported."""
        self.skipped = 0
        """Micro-batches that were given up."""
        self.begin_lane()

    def begin_lane(self) -> None:
        self._losses, self._reports, self._skipped = list[Loss](), dict[str, float](), 0
        self.begin_micro_batch()

    def begin_micro_batch(self) -> None:
        self._before = dict(self._reports)

    def add_loss(self, loss: Loss) -> None:
        """The loss of a micro-batch."""
        self._losses.append(loss)

    def report(self, numbers: dict[str, float]) -> None:
        """Adds to the lane's numbers: the mean over its micro-batches."""
        if not numbers.keys() <= self._reports.keys():
            check_names(self._reports.keys() | numbers.keys(), "engine.report")
        for name, value in numbers.items():
            self._reports[name] = self._reports.get(name, 0.0) + value / self._micro_batches

    def skip(self) -> None:
        """The micro-batch at hand is given up, and what was reported in it."""
        self._reports = self._before
        self._skipped += 1
        self.skipped += 1

    def lane_done(self, lane: int) -> None:
        """The lane's numbers join the step's."""
        reports = self._reports if self._skipped < self._micro_batches else None
        self._lanes.append((lane, self._losses, reports))

    def of_step(self) -> LaneTotals:
        """Waits for a device, once."""
        known = iter(_on_host([loss for _, losses, _ in self._lanes for loss in losses]))
        sums: list[tuple[Span, Numbers]] = []
        not_finite: dict[int, float] = {}
        for lane, losses, reports in self._lanes:
            total = 0.0
            for loss in islice(known, len(losses)):
                total += loss / self._micro_batches
                if not math.isfinite(loss):
                    not_finite.setdefault(lane, loss)
            push(sums, lane, (total, reports), self._job_lanes, _add)
        numbers = [each for _, each in sums]
        first = min(not_finite, default=0)
        return LaneTotals(
            tuple(loss for loss, _ in numbers),
            _reports_of([reports for _, reports in numbers]),
            f"the loss of lane {first} is {not_finite[first]}" if not_finite else "",
        )


def _on_host(losses: Sequence[Loss]) -> list[float]:
    there = [loss for loss in losses if isinstance(loss, Tensor)]
    came = iter(torch.stack(there).tolist() if there else [])
    return [next(came) if isinstance(loss, Tensor) else loss for loss in losses]


def _reports_of(each: Sequence[dict[str, float] | None]) -> dict[str, list[float]]:
    counted = [reports for reports in each if reports is not None]
    names = set.intersection(*map(set, counted)) if counted else set()
    return {name: [reports[name] if reports else 0.0 for reports in each] for name in sorted(names)}


def _add(kept: Numbers, new: Numbers) -> Numbers:
    loss, mine, theirs = kept[0] + new[0], kept[1], new[1]
    if mine is None or theirs is None:
        return loss, theirs if mine is None else mine
    return loss, {name: mine[name] + theirs[name] for name in mine if name in theirs}
