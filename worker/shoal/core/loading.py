"""Going on from a checkpoint as one member sees it: which one it knows of, which it could not read, and whether its
process can still begin at step 0.

What lies in a place and what is in it, the driver finds (training/checkpoint_loading.py, the simulator) and says here.
Pure: it holds no file.
"""

from __future__ import annotations

from enum import StrEnum

from shoal_protos.checkpoint import CheckpointRef, UnreadableCheckpoint


class StepZero(StrEnum):
    """Whether a member can begin at step 0."""

    POSSIBLE = "possible"
    WITH_A_FRESH_PROCESS = "with a fresh process"
    """This one has trained, or has begun to read a checkpoint: its initial state is gone."""
    UNREADABLE = "unreadable"
    """What it was to begin from cannot be read, and nobody has another one: a fresh process would fare alike."""


class Loading:
    """See the module's text. `reference` and `unreadable_checkpoint` are in the member's status."""

    def __init__(self) -> None:
        self.reference: CheckpointRef | None = None
        self.unreadable_checkpoint: UnreadableCheckpoint | None = None
        """Of the plan that is being carried out."""
        self.unreadable: set[str] = set()
        """Paths that are not looked at again."""
        self.taken = ""
        """The last checkpoint that was begun to be read."""

    def on_found(self, reference: CheckpointRef | None) -> None:
        """What it goes on from: the driver has looked for the latest that can be read, or for the one that is named; or
        a save that this member took part in was completed.
        """
        self.reference = reference

    def on_recovery(self, path: str) -> None:
        """A plan is being carried out; what was said of another one's checkpoint is over. `path`: empty where it has
        none.
        """
        if self.unreadable_checkpoint is not None and self.unreadable_checkpoint.path != path:
            self.unreadable_checkpoint = None

    def on_take_up(self, path: str) -> None:
        """It is there, and is begun to be read."""
        self.taken = path

    def on_unreadable(self, path: str, sentence: str) -> None:
        """The plan's checkpoint cannot be read; the driver looks for the one before."""
        self.unreadable.add(path)
        self.unreadable_checkpoint = UnreadableCheckpoint(path, sentence)

    def is_the_only_one(self, path: str, resume: int | str | bool) -> bool:
        """Whether no other checkpoint may be taken in its place: it is the one that `resume` names."""
        return resume != "latest" and self.reference is not None and self.reference.path == path

    def step_zero(self, has_trained: bool) -> StepZero:
        """Whether this process can begin at step 0."""
        if self.unreadable:
            return StepZero.UNREADABLE
        return StepZero.WITH_A_FRESH_PROCESS if self.taken or has_trained else StepZero.POSSIBLE
