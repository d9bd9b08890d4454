"""The numbers of a step's lanes on this worker: losses, what the script reports, micro-batches that it skips.

Kept per whole subtree of lanes, so that a step's mean has the same bits in every world. A skipped micro-batch says
nothing: the means are over the others.
"""

from __future__ import annotations

import math

from shoal_protos.runs import Span

from shoal.core.tree import push
from shoal.exchange.vote import check_names

Numbers = tuple[float, dict[str, float] | None]
"""Numbers of a subtree of lanes: the sum of their losses, and of what was reported in all of them, by name; None where
all its micro-batches were skipped.
"""


class LaneNumbers:
    """Losses and reported numbers of one step."""

    def __init__(self, job_lanes: int, micro_batches: int) -> None:
        self._job_lanes, self._micro_batches = job_lanes, micro_batches
        self.begin_step()

    def begin_step(self) -> None:
        self._sums: list[tuple[Span, Numbers]] = []
        self.skipped = 0
        """Micro-batches that were given up."""
        self._not_finite: dict[int, float] = {}
        self.begin_lane()

    def begin_lane(self) -> None:
        self._loss, self._reports, self._skipped = 0.0, dict[str, float](), 0
        self.begin_micro_batch()

    def begin_micro_batch(self) -> None:
        self._before = dict(self._reports)

    def add_loss(self, lane: int, loss: float) -> None:
        """The loss of a micro-batch."""
        self._loss += loss / self._micro_batches
        if not math.isfinite(loss):
            self._not_finite.setdefault(lane, loss)

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
        """The lane's numbers join the subtree sums."""
        reports = self._reports if self._skipped < self._micro_batches else None
        push(self._sums, lane, (self._loss, reports), self._job_lanes, _add)

    @property
    def losses(self) -> list[float]:
        """One per whole subtree of lanes."""
        return [loss for _, (loss, _) in self._sums]

    @property
    def reports(self) -> dict[str, list[float]]:
        """Reports by name, one per whole subtree; names that some lane did not report are left out."""
        each = [numbers for _, (_, numbers) in self._sums]
        counted = [numbers for numbers in each if numbers is not None]
        names = set.intersection(*map(set, counted)) if counted else set()
        return {name: [numbers[name] if numbers else 0.0 for numbers in each] for name in sorted(names)}

    @property
    def not_finite(self) -> str:
        """Names the first lane whose loss is not finite; empty where all are."""
        if not self._not_finite:
            return ""
        lane = min(self._not_finite)
        return f"the loss of lane {lane} is {self._not_finite[lane]}"


def _add(kept: Numbers, new: Numbers) -> Numbers:
    loss, mine, theirs = kept[0] + new[0], kept[1], new[1]
    if mine is None or theirs is None:
        return loss, theirs if mine is None else mine
    return loss, {name: mine[name] + theirs[name] for name in mine if name in theirs}
