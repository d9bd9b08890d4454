"""The meter: numbers for people. Nothing is decided by them, no bit depends on them."""

from __future__ import annotations

import resource
import time
from collections import deque
from pathlib import Path
from statistics import median

from shoal_protos.checkpoint import Saved
from shoal_protos.messages import Change, Telemetry

from shoal.state import TrainingState

LATEST_CHANGES = 8
LATEST_STEPS = 1000


class Meter:
    """Counts what this worker has done since it started. `samples_per_lane`: samples of one lane of one step."""

    def __init__(self, samples_per_lane: int) -> None:
        self._samples_per_lane = samples_per_lane
        self._samples = 0
        self._fill_bytes = 0
        self._step_seconds = 0.0
        self._latest_steps: deque[float] = deque(maxlen=LATEST_STEPS)
        self._training_seconds = 0.0
        self._step_began = time.monotonic()
        self._changes: list[Change] = []

    def step_done(self, lanes: int) -> None:
        """A step is committed and handed out."""
        now = time.monotonic()
        self._step_seconds = now - self._step_began
        self._latest_steps.append(self._step_seconds)
        self._training_seconds += self._step_seconds
        self._step_began = now
        self._samples += lanes * self._samples_per_lane

    def resumed(self) -> None:
        """A pause is over: the step's clock starts now."""
        self._step_began = time.monotonic()

    def filled(self, count: int) -> None:
        """Bytes of state were received by a fill."""
        self._fill_bytes += count

    def changed(self, change: Change) -> None:
        self._changes = [*self._changes[-LATEST_CHANGES + 1 :], change]

    def telemetry(self, loss: float | None, state: TrainingState, saves: tuple[Saved, ...]) -> Telemetry:
        parameters = sum(flat.numel() * flat.element_size() for flat in state.flats)
        return Telemetry(
            loss=loss,
            step_seconds=self._step_seconds,
            step_seconds_median=median(tuple(self._latest_steps) or (0.0,)),
            training_seconds=self._training_seconds,
            samples=self._samples,
            fill_bytes=self._fill_bytes,
            memory_bytes={
                "parameters": parameters,
                "gradients": parameters * state.sums.copies,
                "state": state.held.state_bytes(),
                "rss": resident_bytes(),
            },
            changes=tuple(self._changes),
            saves=saves,
        )


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; its peak where the system does not say (macOS)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * resource.getpagesize()
