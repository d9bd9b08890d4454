"""The numbers of a step's lanes on this worker: losses, what the script reports, micro-batches that it skips.

Kept per whole subtree of lanes, so that a step's mean has the same bits in every world. A skipped micro-batch says
nothing: the means are over the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from shoal_protos.runs import Span
from torch import Tensor

from shoal.core.tree import push
from shoal.exchange.vote import check_names

Loss = float | Tensor
"""`()` float64 on a device, which may still be making it."""
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
