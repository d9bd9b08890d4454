"""What both sides know of checkpoints: where one is, and which ones stay. Pure: standard library only.

Workers write, read and delete them; the controller keeps a catalogue of what workers have reported, and names one in
a plan when training is to begin from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True, order=True)
class CheckpointRef:
    """A whole checkpoint that a worker knows of. Ordered by when it was made: generations only grow."""

    generation: int
    """The generation in which it was saved; the next one exceeds it."""
    step: int
    """The step at which training goes on from it; 0 where only its tensors are taken, by name."""
    path: str
    """Path or URL; all workers reach the same place by it."""
    bytes: int = 0
    run: str = field(default="", compare=False)
    """Which run of the job saved it; empty: not known."""
    verified: bool = field(default=False, compare=False)
    """Whether the copies of all its blocks were compared when it was saved, and agreed."""
    saved_at: float | None = field(default=None, compare=False)
    """When the controller heard that it had just been saved, in seconds since the epoch; None: not known, as of one
    that was found in its folder. Only the controller knows it: it does not travel."""


@dataclass(frozen=True, slots=True)
class UnreadableCheckpoint:
    """A checkpoint that a worker was told to begin from and could not read."""

    path: str
    sentence: str


class SaveOutcome(StrEnum):
    """How a save went."""

    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"
    """A scheduled one that fell due while the one before was still being written."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """One save as the member that led it tells it, for events and metrics."""

    number: int
    """Grows with every save of the process."""
    step: int
    outcome: SaveOutcome
    path: str = ""
    bytes: int = 0
    """Bytes of all its files."""
    copy_seconds: float = 0.0
    """What training waited for."""
    write_seconds: float = 0.0
    commit_seconds: float = 0.0
    why: str = ""
    """Why it failed or was skipped."""


def superfluous(steps: Sequence[int], newest: int, every: int | None) -> list[int]:
    """Places in `steps` (newest first) whose checkpoints may go: beyond the newest few, and none of every n-th step."""
    return [place for place, step in enumerate(steps) if place >= newest and not (every and step % every == 0)]
