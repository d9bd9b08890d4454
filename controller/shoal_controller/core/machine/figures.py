"""What is counted of a job for Prometheus: part of its durable state, so that no counter goes down over a restart.

`COUNTERS` and `HISTOGRAMS` name every counted figure with the values of its labels, so each exists as 0 from the job's
start. `Turn.count` and `Turn.observe` write here; `metrics.py` shows it. Gauges are read from `JobView` and are not
here. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import product

from shoal_protos.plan import Reason

from shoal_controller.core.machine.pending import Notice

MOST_BUCKETS = 6
"""Of any histogram, the one without end included: every bucket is a series for each combination of its labels."""

PAUSE_SECONDS = (0.03, 0.3, 1.0, 5.0, 30.0)
"""Upper bounds of buckets: a switch between two steps, a recovery in memory, one that is felt, one that waited for a
heartbeat, one that restored a checkpoint or compiled, and whatever is worse.
"""
STEP_SECONDS = (0.1, 0.5, 2.0, 10.0, 60.0)
SAVE_SECONDS = (0.03, 0.3, 3.0, 30.0, 300.0)
"""From the copy that training waits for to writing all state."""

Labels = Mapping[str, tuple[str, ...]]
"""Values that each label can have, by name."""


@dataclass(frozen=True, slots=True)
class CounterKind:
    """A counter of a job."""

    text: str
    labels: Labels = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HistogramKind:
    """A histogram of a job. `bounds`: the buckets' upper ends, ascending; one more has no end."""

    text: str
    bounds: tuple[float, ...] = PAUSE_SECONDS
    labels: Labels = field(default_factory=dict)


class Use(StrEnum):
    """For what a worker's seconds are used (`phases/worker_seconds.py`)."""

    TRAINING = "training"
    STANDBY = "standby"
    STARTING = "starting"
    PAUSED = "paused"
    IDLE_LANE = "idle_lane"
    LOST_STEP = "lost_step"
    MISSING = "missing"


WORKER_SECONDS, WANTED_SECONDS = "shoal_worker_seconds_total", "shoal_job_wanted_seconds_total"
NOTICES = tuple(notice.value for notice in Notice)
REASONS = tuple(reason.value for reason in Reason)
CHANGE_PHASES = ("detect", "prepare", "plan", "group", "promote", "open", "first_step", "fill", "switch")

COUNTERS: Mapping[str, CounterKind] = {
    "shoal_job_lost_steps_total": CounterKind("Committed steps lost by going back."),
    WORKER_SECONDS: CounterKind(
        "Seconds of the workers that a job wants, by their use.", {"use": tuple(use.value for use in Use)}
    ),
    WANTED_SECONDS: CounterKind("Seconds of the workers that a job wants."),
    "shoal_resizes_total": CounterKind(
        "Changes of the world.", {"reason": REASONS, "outcome": ("done", "superseded", "failed")}
    ),
    "shoal_repartition_bytes_total": CounterKind(
        "Bytes of state moved by changes of the world.", {"source": ("peer", "checkpoint")}
    ),
    "shoal_blocks_promoted_total": CounterKind("Blocks whose mirror became their owner, without moving bytes."),
    "shoal_job_rebalances_total": CounterKind("Times that lanes were shared anew because of the workers' speed."),
    "shoal_checkpoint_bytes_total": CounterKind("Bytes of checkpoints written."),
    "shoal_checkpoint_failures_total": CounterKind("Checkpoints that could not be saved."),
    "shoal_corrupt_blocks_total": CounterKind("Blocks whose copies differed: silent corruption."),
    "shoal_skipped_micro_batches_total": CounterKind("Micro-batches that the script skipped with engine.skip()."),
    "shoal_void_lanes_total": CounterKind("Lanes of workers of cells that were begun and trained again."),
    "shoal_preemptions_total": CounterKind(
        "Workers whose end was announced, by what announced it first.", {"signal": NOTICES}
    ),
    "shoal_checkpoints_skipped_total": CounterKind("Scheduled checkpoints skipped because another was being written."),
}
HISTOGRAMS: Mapping[str, HistogramKind] = {
    "shoal_resize_seconds": HistogramKind(
        "Duration of the phases of a change of the world, from its cause to its first step.",
        labels={"phase": CHANGE_PHASES},
    ),
    "shoal_resize_pause_seconds": HistogramKind(
        "Pause of training by a change, from the first stopped worker to the first lane begun.",
        labels={"reason": REASONS},
    ),
    "shoal_step_seconds": HistogramKind("Wall time of a committed step. Renewed once a minute.", STEP_SECONDS),
    "shoal_checkpoint_seconds": HistogramKind(
        "Duration of the phases of a save; training waits for the copy phase only.",
        SAVE_SECONDS,
        {"phase": ("copy", "write", "commit")},
    ),
}


@dataclass(frozen=True, slots=True)
class Observed:
    """One series of a histogram: how many observations fell into each bucket (the last one is without end)."""

    buckets: tuple[int, ...]
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """The counted figures of one job. A series that is missing is 0. Times are seconds since the epoch."""

    created: float = 0.0
    counters: Mapping[str, float] = field(default_factory=dict)
    """Values by `series_key`."""
    histograms: Mapping[str, Observed] = field(default_factory=dict)
    """Values by `series_key`."""
    step: int = 0
    """The step up to which steps are counted; it goes back with the job."""
    steps: int = 0
    """Steps committed, those that the job went back and made again included."""
    steps_bound: int = 0
    """Never more steps than this are shown; written before they are, so that no later life shows fewer."""
    trained_seconds: float = 0.0
    """Time spent in those steps."""
    training_began: float | None = None
    """When the first step began."""
    first_commit: float | None = None
    last_commit: float | None = None
    last_checkpoint: float | None = None
    """When the newest checkpoint was saved that workers have told of as they saved it."""
    checkpoint_interval: float | None = None
    """Seconds between the two newest ones."""
    counted_until: float | None = None
    """Until when workers' seconds are counted; None: a version of Shoal that counted none has written this."""
    unsettled_seconds: float = 0.0
    """Seconds of trainers since the last commit: their use is known with the next one."""
    highest_step: int = 0
    """The highest step that was ever committed: steps up to it are made again."""

    def used(self, use: Use, seconds: float) -> Figures:
        """Seconds of workers have been used so."""
        return self.counted(WORKER_SECONDS, seconds, {"use": use.value}) if seconds > 0 else self

    def wanted_for(self, seconds: float) -> Figures:
        """Seconds of workers that were wanted."""
        return self.counted(WANTED_SECONDS, seconds, {})

    @property
    def worker_seconds(self) -> dict[Use, float]:
        """Return the seconds of workers by their use."""
        return {use: self.counters.get(series_key(WORKER_SECONDS, {"use": use.value}), 0.0) for use in Use}

    @property
    def wanted_seconds(self) -> float:
        return self.counters.get(WANTED_SECONDS, 0.0)

    @property
    def goodput_ratio(self) -> float:
        """Return the part of the seconds of wanted workers that trained, from 0 to 1."""
        return min(1.0, self.worker_seconds[Use.TRAINING] / self.wanted_seconds) if self.wanted_seconds else 0.0

    def checkpointed(self, now: float) -> Figures:
        """A checkpoint has become known."""
        interval = None if self.last_checkpoint is None else now - self.last_checkpoint
        return replace(self, last_checkpoint=now, checkpoint_interval=interval)

    def at(self, now: float) -> Figures:
        """As another life finds them: where the clock was set back meanwhile, no time is left in the future, and what
        was measured stays as long as it was.
        """
        early = max(0.0, self.created - now)
        late = max(0.0, (self.last_commit or now) - now)
        return replace(
            self,
            created=self.created - early,
            first_commit=None if self.first_commit is None else self.first_commit - early,
            training_began=None if self.training_began is None else self.training_began - late,
            last_commit=None if self.last_commit is None else self.last_commit - late,
            last_checkpoint=None if self.last_checkpoint is None else min(self.last_checkpoint, now),
            counted_until=None if self.counted_until is None else min(self.counted_until, now),
        )

    def series(self, metric: str, key: str) -> Observed | None:
        """What one of a histogram's series has seen; None: nothing, or a version of Shoal with other buckets has."""
        found = self.histograms.get(key)
        return found if found is not None and len(found.buckets) == len(HISTOGRAMS[metric].bounds) + 1 else None

    def counted(self, metric: str, value: float, labels: Mapping[str, str]) -> Figures:
        key = _checked_key(metric, COUNTERS[metric].labels, labels)
        return replace(self, counters={**self.counters, key: self.counters.get(key, 0.0) + value})

    def observed(self, metric: str, value: float, labels: Mapping[str, str], times: int = 1) -> Figures:
        kind = HISTOGRAMS[metric]
        key = _checked_key(metric, kind.labels, labels)
        before = self.series(metric, key) or Observed((0,) * (len(kind.bounds) + 1))
        place = bisect_left(kind.bounds, value)
        buckets = tuple(count + times * (number == place) for number, count in enumerate(before.buckets))
        return replace(self, histograms={**self.histograms, key: Observed(buckets, before.total + times * value)})


def series_of(labels: Labels) -> Iterator[dict[str, str]]:
    """Every combination of a figure's labels."""
    return (dict(zip(labels, values, strict=True)) for values in product(*labels.values()))


def series_key(metric: str, labels: Mapping[str, str]) -> str:
    """The name of one series in `Figures`."""
    return "|".join([metric, *(f"{name}={labels[name]}" for name in sorted(labels))])


def _checked_key(metric: str, allowed: Labels, labels: Mapping[str, str]) -> str:
    assert labels.keys() == allowed.keys(), f"{metric} has the labels {sorted(allowed)}, not {sorted(labels)}"
    assert all(value in allowed[name] for name, value in labels.items()), f"{metric} has no series {dict(labels)}"
    return series_key(metric, labels)
