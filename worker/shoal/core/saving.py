"""Saves as one member sees them, one after another: when one begins, and what those that are over have come to.

All members conclude alike, by what a vote says: who asks, whose save is under way, which step is saved already. Each
save by itself is save_part.py. Called by the training side (training/checkpoint_saving.py) and the simulator, from one
thread. Pure: it holds no file, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from shoal_protos.checkpoint import SaveOutcome, SaveReport

from shoal.core.save_part import BUSY, SavePart

RECENT_SAVES = 8
QUIET_VOTES = 2
"""So many votes without a save end the last step. After the first one rank 0 knows that no member writes, and asks for
the save that is owed, if any is; a worker that has just joined knows of neither.
"""


@dataclass(frozen=True, slots=True)
class SaveVote:
    """What a passed vote says of saves."""

    rank: int
    """This member's."""
    step: int
    """The last committed one."""
    saved: int
    """The step of the newest whole checkpoint that any member knows of; -1: none."""
    statuses: Mapping[str, str]
    """How far each member is with the save at hand, by incarnation."""
    asked: Sequence[int]
    """For each request: the first step whose checkpoint fulfils it."""
    stepped: bool
    """It committed a step."""
    scheduled: bool = False
    """Rank 0's clock says that a save is due."""
    owed: bool = False
    """It settles a boundary that the world before did not come to."""
    over: bool = False
    """The step is the last one."""


class SaveChoice(StrEnum):
    """What follows from a vote, on all members alike."""

    NOTHING = "nothing"
    BEGIN = "begin"
    SAVED = "saved"
    """Due, and there is a checkpoint of this step."""
    SKIP = "skip"
    """Due, and the one before is still being written."""
    POSTPONE = "postpone"
    """The same at a boundary that is owed. The one before is most likely lost with a member: as soon as it is over."""


class Saving:
    """See the module's text. `every_steps`: None where steps make none due."""

    def __init__(self, every_steps: int | None) -> None:
        self._every_steps = every_steps
        self.saved = -1
        """The step of the newest whole checkpoint of this life of the job."""
        self.asked_at: int | None = None
        """From this step on a save fulfils what this member asks for; None: it asks for nothing."""
        self.recent: tuple[SaveReport, ...] = ()
        """The last few saves that this member has to report to the controller."""
        self._due = self._known = -1
        """The newest step at which a checkpoint was due, made or not; the newest that any member knew to be made."""
        self.is_under_way = False
        """Whether any member was busy with a save when all voted last."""
        self._number = 0
        self._quiet = 0
        """Votes of this world, one after the other, after the last step, without a save."""
        self.is_given_up = False
        """Whether the save at hand began before all went back."""
        self._begun = -1
        """The step of the last save that began."""

    def ask(self, step: int, over: bool) -> None:
        """This member brings the request into its votes from now on. `over`: a save of this step is what it asks for,
        as none comes after it, or its weights are at hand; else one of the next step.
        """
        self.asked_at = step + (0 if over else 1)

    def can_begin(self, step: int) -> bool:
        """Whether a save of that step, the last committed one, can begin before the next vote, as far as a member knows
        that has taken part in the vote before.
        """
        return not self.is_under_way and max(self._begun, self._known) < step

    def on_begun(self, step: int) -> None:
        """One has begun, on all members alike."""
        self._begun, self.is_given_up = step, False

    def ask_again(self, step: int) -> None:
        """The save of that step has failed and is to be made up for, by one of that step or of a later one."""
        if self.asked_at is None and not self.is_given_up:
            self.asked_at = step

    def on_end(self, step: int) -> None:
        """No step comes after this one, which was not known when the request was made."""
        if self.asked_at is not None:
            self.asked_at = min(self.asked_at, step)

    def on_return_to(self, step: int) -> None:
        """All have gone back to a checkpoint, or to the start: what was saved after it counts no more."""
        self.saved, self.is_given_up = step, True
        self._due, self._known = min(self._due, step), step
        self._quiet, self._begun = 0, min(self._begun, step)
        if self.asked_at is not None:
            self.asked_at = min(self.asked_at, step + 1)

    def on_world(self) -> None:
        """A world begins: those that join it and those that were there count its votes alike."""
        self._quiet = 0

    def on_vote(self, vote: SaveVote) -> SaveChoice:
        """After every vote, once it has heard of a save that is over."""
        self._known = max(self._known, vote.saved)
        self.is_under_way = any(status in BUSY for status in vote.statuses.values())
        choice = self._choice(vote)
        self._note_due(vote, choice)
        is_quiet = vote.over and choice is SaveChoice.NOTHING and not self.is_under_way
        self._quiet = self._quiet + 1 if is_quiet else 0
        if choice is SaveChoice.BEGIN:
            self.on_begun(vote.step)
        if self.asked_at is not None and (vote.saved >= self.asked_at or vote.saved == vote.step):
            self.asked_at = None
        if vote.rank == 0 and choice is SaveChoice.POSTPONE:
            self.ask(vote.step, vote.over)
        if vote.rank == 0 and choice is SaveChoice.SKIP:
            why = "the checkpoint before is still being written"
            self._remember(SaveReport(0, vote.step, SaveOutcome.SKIPPED, why=why))
        return choice

    def _choice(self, vote: SaveVote) -> SaveChoice:
        due = vote.stepped and (self._is_nth(vote.step) or vote.scheduled)
        if not due and not any(vote.saved < step for step in vote.asked):
            return SaveChoice.NOTHING
        if vote.saved == vote.step:
            return SaveChoice.SAVED if due else SaveChoice.NOTHING
        if not self.is_under_way:
            return SaveChoice.BEGIN
        if not due:
            return SaveChoice.NOTHING
        return SaveChoice.POSTPONE if vote.owed else SaveChoice.SKIP

    def _note_due(self, vote: SaveVote, choice: SaveChoice) -> None:
        """What a script asks for after its loop is not noted: it waits for it, and hears how it went. What falls due by
        steps is known by the step alone, also to who was not there.
        """
        nth = vote.step - vote.step % self._every_steps if self._every_steps is not None else 0
        asked = [step for step in vote.asked if step <= vote.step] if vote.stepped else []
        due = [vote.step] if vote.stepped and choice is not SaveChoice.NOTHING else []
        self._due = max([self._due, *([nth] if nth > 0 else []), *asked, *due])

    @property
    def has_settled(self) -> bool:
        """Whether no save is to be waited for after the last step, on all members alike: the one that was due is there,
        or has failed.
        """
        return self._quiet >= QUIET_VOTES

    @property
    def is_owed(self) -> bool:
        """Whether a checkpoint was due and neither that one is there nor a later one: it was skipped, or has failed, or
        was lost with its world. While training goes on the next one makes up for it; at the end nothing else does.
        """
        return self._due > max(self.saved, self._known)

    def _is_nth(self, step: int) -> bool:
        return self._every_steps is not None and step % self._every_steps == 0

    def on_over(self, part: SavePart, report: SaveReport, rank: int, generation: int) -> bool:
        """A save is over; `report` is the part's, with the figures of the disk. One that was lost with its world rank 0
        asks for again. Returns whether what this member asks for has failed with it.
        """
        if part.leads if not part.failure else rank == 0:
            self._remember(report)
        if not part.failure:
            self.saved = self.saved if self.is_given_up else part.save.step
        elif part.save.generation != generation:
            if rank == 0 and not self.is_given_up and self.asked_at is None:
                self.asked_at = part.save.step  # lost with its world: the next one need not be due for long
        elif self.asked_at is not None and part.save.step >= self.asked_at and not self.is_given_up:
            self.asked_at = None
            return True
        return False

    def _remember(self, report: SaveReport) -> None:
        self._number += 1
        self.recent = (*self.recent[1 - RECENT_SAVES :], replace(report, number=self._number))
