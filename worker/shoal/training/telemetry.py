"""Telemetry of one worker: numbers for people. No bit depends on them, and no decision but how lanes are shared.

`Meter` counts what the worker has done since it started. `LaneClock` measures what a lane takes here. `StepTimes`, on
request, has the loop's seconds by phase (reading, forward, backward, step); a forward is all between batch and
backward, the loop's code too. Called by the engine; monitoring.py takes them once a step. `ChangeClock`: a world
change's seconds by phase, and what it moved.
"""

from __future__ import annotations

import resource
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from shoal_protos.checkpoint import SaveReport
from shoal_protos.messages import Change, Telemetry

from shoal.group.group import GroupProgress
from shoal.process.device import Device
from shoal.state.training_state import TrainingState

LATEST_CHANGES = 8
LATEST_STEPS = 1000
MEMORY_SECONDS = 0.5
"""How old a count of memory may be: heartbeats tell of it once a second, and steps may be a thousand in that time."""


class Meter:
    """Counts what this worker has done since it started."""

    def __init__(self) -> None:
        self._fill_bytes = 0
        self._fill_seconds = 0.0
        self._step_seconds = 0.0
        self._latest_steps: deque[float] = deque()
        self._in_order: list[float] = []
        """Step times, kept sorted: their median is reported after every step."""
        self._training_seconds = 0.0
        self._not_finite = ""
        self._step_began = time.monotonic()
        self._changes: list[Change] = []
        self._change: Change | None = None
        self._memory: dict[str, int] = {}
        self._memory_counted = -MEMORY_SECONDS

    def on_step(self) -> None:
        """A step is committed and handed out."""
        now = time.monotonic()
        self._step_seconds = now - self._step_began
        self._latest_steps.append(self._step_seconds)
        insort(self._in_order, self._step_seconds)
        if len(self._latest_steps) > LATEST_STEPS:
            del self._in_order[bisect_left(self._in_order, self._latest_steps.popleft())]
        self._training_seconds += self._step_seconds
        self._step_began = now

    def on_fill(self, count: int, seconds: float) -> None:
        """Bytes of state were received by a fill, and a step was so much longer for it."""
        self._fill_bytes += count
        self._fill_seconds += seconds

    def on_start_over(self) -> None:
        """From now on this is another worker, which has received nothing."""
        self._fill_bytes = 0
        self._fill_seconds = 0.0

    def on_change(self, change: Change, planned: bool) -> None:
        """A generation begins; what it cost is reported after its first vote."""
        self._record_change({})
        if planned:
            change = replace(change, phases={**change.phases, "fill": self._fill_seconds})
        self._fill_seconds = 0.0
        self._change = change
        self._step_began = time.monotonic()

    def on_vote(self, stepped: bool) -> None:
        """A vote has passed, and all it asked for is done."""
        self._record_change({"first_step": self._step_seconds} if stepped else {})

    def _median(self) -> float:
        count = len(self._in_order)
        return (self._in_order[count // 2] + self._in_order[(count - 1) // 2]) / 2 if count else 0.0

    def _record_change(self, more: dict[str, float]) -> None:
        if self._change is not None:
            change = replace(self._change, phases={**self._change.phases, **more})
            self._changes = [*self._changes[-LATEST_CHANGES + 1 :], change]
            self._change = None

    def telemetry(
        self,
        state: TrainingState,
        saves: tuple[SaveReport, ...],
        skipped_folders: str,
        changed_values: str,
        reports: Mapping[str, float],
    ) -> Telemetry:
        """All of it: what is counted here, and what others know."""
        record = state.record
        if record is not None and record.not_finite:
            self._not_finite = f"step {record.step}: {record.not_finite}"
        return Telemetry(
            loss=state.loss,
            step_seconds=self._step_seconds,
            step_seconds_median=self._median(),
            training_seconds=self._training_seconds,
            fill_bytes=self._fill_bytes,
            memory_bytes=self._memory_bytes(state),
            changes=tuple(self._changes),
            skipped_micro_batches=record.skipped_micro_batches if record else 0,
            not_finite_steps=record.not_finite_steps if record else 0,
            not_finite=self._not_finite,
            state_file_bytes_per_second=round(state.held.home.bytes_per_second),
            saves=saves,
            skipped_folders=skipped_folders,
            changed_values=changed_values,
            reports=reports,
        )

    def _memory_bytes(self, state: TrainingState) -> dict[str, int]:
        now = time.monotonic()
        if now - self._memory_counted >= MEMORY_SECONDS:
            self._memory_counted = now
            self._memory = {**held_bytes(state), "rss": resident_bytes()}
        return self._memory


def held_bytes(state: TrainingState) -> dict[str, int]:
    """What the state of training takes between two steps, by kind."""
    return {
        "parameters": state.weights.bytes + state.frozen_bytes,
        "gradients": state.sums.bytes,
        **state.held.home.bytes_by_place(),
    }


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; its peak where the system does not say (macOS)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * resource.getpagesize()


LATEST_LANES, FEWEST_LANES = 9, 3
"""Of so many lanes the median is reported, and none before so many are measured: the first ones may compile."""
REHEARSAL_STEPS = 50
"""Steps without a lane here after which one is trained for nothing, so that what a lane takes stays known; more where
it takes so much longer than a step that more than one part of so many of the time would be lost."""
MOST_PENDING = 256
"""Lanes that the device may still be at, or whose seconds were not asked for yet."""

Spans = list[tuple[Any, Any]]
"""Moments of the device, a beginning and an end each."""


class LaneClock:
    """What a lane takes on this worker: from the request of its batch to the end of its backward, without the waits for
    others in between, or a slow worker would make all others look slow. By the device's own clock: the host only gives
    an accelerator its work. A lane that the script gives up, or that begins again, is not counted. Where this worker
    has no lanes, the last one that it rehearsed stands for all.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._began: Any = None
        """None: no micro-batch is measured at the moment."""
        self._spans: Spans | None = None
        """Of the lane at hand; None: it is not counted."""
        self._thread = 0
        self._pending: deque[tuple[Spans, int]] = deque(maxlen=MOST_PENDING)
        """With how many lanes each stands for."""
        self._latest: deque[float] = deque(maxlen=LATEST_LANES)
        self._idle_steps, self._idle_since = 0, 0.0
        """Steps here since the last lane, and when the first of them was."""

    def begin(self, progress: GroupProgress, is_first: bool) -> None:
        """A micro-batch is asked for; `is_first`: of its lane. `progress`: where this thread waits for others."""
        self._began, self._idle_steps = None, 0
        if is_first:
            self._spans = []
        if self._spans is not None:
            self._thread, progress.waiting = threading.get_ident(), self._paused
            self._began = self._device.moment()

    def end(self, is_last: bool) -> None:
        """Its backward is over; `is_last`: of its lane."""
        if self._spans is None or self._began is None:
            return
        self._spans.append((self._began, self._device.moment()))
        self._began = None
        if is_last:
            self._pending.append((self._spans, 1))
            self._spans = None

    def end_rehearsal(self, micro_batches: int) -> None:
        """The script is through with one micro-batch of so many of a lane, which counts for nothing else."""
        if self._spans and self._began is None:
            self._pending.append((self._spans * micro_batches, LATEST_LANES))
        self.drop()

    def on_idle_step(self) -> None:
        """A step is made without a lane here."""
        if not self._idle_steps:
            self._idle_since = self._now()
        self._idle_steps += 1

    @property
    def is_stale(self) -> bool:
        """Whether a lane is to be rehearsed: one was measured, which is too long ago. The others may wait for it."""
        steps, seconds = self._idle_steps, self.lane_seconds
        if not seconds or steps < REHEARSAL_STEPS:
            return False
        elapsed = self._now() - self._idle_since
        return elapsed >= REHEARSAL_STEPS * (seconds - elapsed / steps)

    _now = staticmethod(time.monotonic)

    def drop(self) -> None:
        """The lane at hand is none like others."""
        self._began = self._spans = None

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """A context in which this thread waits."""
        if self._spans is None or self._began is None or threading.get_ident() != self._thread:
            yield
            return
        self._spans.append((self._began, self._device.moment()))
        try:
            yield
        finally:
            self._began = self._device.moment()

    @property
    def lane_seconds(self) -> float:
        """The median of the last lanes that the device is through with, in seconds; 0: too few are."""
        while self._pending:
            found, stands_for = self._pending[0]
            spans = [self._device.seconds_between(*span) for span in found]
            known = [seconds for seconds in spans if seconds is not None]
            if len(known) < len(spans):
                break
            self._latest.extend([sum(known)] * stands_for)
            self._pending.popleft()
        return median(self._latest) if len(self._latest) >= FEWEST_LANES else 0.0


PHASES = ("read", "forward", "backward", "step")


class StepTimes:
    """Seconds by phase since they were last taken."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._forward_began: float | None = None

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """A context whose time is that phase's."""
        if not self._wanted:
            yield
            return
        began = time.monotonic()
        if self._forward_began is not None:
            self._seconds["forward"] += began - self._forward_began
            self._forward_began = None
        try:
            yield
        finally:
            self._seconds[phase] += time.monotonic() - began

    def reading(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """The same batches."""
        if not self._wanted:
            yield from batches
            return
        try:
            while True:
                with self.measure("read"):
                    try:
                        batch = next(batches)
                    except StopIteration:
                        return
                self._forward_began = time.monotonic()
                yield batch
        finally:
            batches.close()

    def take(self) -> dict[str, float]:
        """Seconds by phase; from now on they begin at zero. Empty where nobody wants them."""
        taken, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return taken if self._wanted else {}


class ChangeClock:
    """Seconds per phase of the change at hand."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """No change is at hand."""
        self._began: float | None = None
        self._mark = 0.0
        self._phases: dict[str, float] = {}
        self._promoted = 0
        self._bytes = 0
        self._checkpoint_bytes = 0

    def _lap(self, phase: str) -> None:
        now = time.monotonic()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._mark
        self._mark = now

    def start(self) -> None:
        if self._began is None:
            self._began = self._mark = time.monotonic()

    def end_prepare(self) -> None:
        self._lap("prepare")

    def end_plan(self, group_seconds: float) -> None:
        self._lap("plan")
        self._phases["group"] = self._phases.get("group", 0.0) + group_seconds
        self._phases["plan"] = max(0.0, self._phases["plan"] - group_seconds)

    def end_promote(self) -> None:
        self._lap("promote")

    def note_promoted(self, blocks: int) -> None:
        self._promoted = blocks

    def note_bytes(self, count: int) -> None:
        self._bytes = count

    def note_checkpoint(self, count: int) -> None:
        self._checkpoint_bytes = count

    def end(self, generation: int, step: int, recovered: bool) -> Change:
        if self._began is None:
            self._began = self._mark = time.monotonic()
        self._lap("open" if recovered else "switch")
        pause = time.monotonic() - self._began
        change = Change(generation, step, pause, dict(self._phases), self._promoted, self._bytes,
                        checkpoint_bytes=self._checkpoint_bytes)  # fmt: skip
        self.forget()
        return change
