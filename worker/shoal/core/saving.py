"""Saves as one member sees them: when one begins, this member's part in it, and when a failed one is tried again.

All members conclude alike, by what a vote says: who asks, whose save is under way, which step is saved already
(`Saving`). A save begins at one boundary, on rank 0, which leads it, and on all that own blocks (`SavePart`). Each
writes a file beside training, and every ballot says how far its member is. Once no member of the vote is writing any
more, the leader completes the save or gives it up; the others see it in a later vote. What is to be done where the
checkpoint lies comes out as an act, and the driver reports how it went, with one lock around all calls. `SaveRetries`
tries failed saves later and later, for a bounded time: an outage of a minute must cost no checkpoint, and at a job's
end the workers hold the only copy of what was trained.

Called by training/checkpoint_saving.py, checkpoint/saver.py and the simulator. Pure: no file, no thread; times are the
caller's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from shoal_protos.checkpoint import SaveOutcome, SaveReport
from shoal_protos.plan import Member, Plan

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


class SaveStatus(StrEnum):
    """A member's part in a save, as its ballot gives it."""

    IDLE = ""
    WRITING = "writing"
    WRITTEN = "written"
    """The own part; the manifest is not there yet, as far as this member knows."""
    FAILED = "failed"


BUSY = (SaveStatus.WRITING, SaveStatus.WRITTEN)


@dataclass(frozen=True, slots=True)
class SharedSave:
    """A save, alike on all its writers. The first of them leads; the first at each coordinate writes the buffers, which
    all members there have alike.
    """

    step: int
    generation: int
    writers: tuple[Member, ...]

    @classmethod
    def of(cls, step: int, plan: Plan) -> SharedSave:
        """The first at each coordinate writes, also where it owns nothing, and every owner."""
        coordinates = [member.coordinate for member in plan.members]
        first = [coordinates.index(one) for one in set(coordinates)]
        writers = (member for rank, member in enumerate(plan.members) if rank in first or plan.owned_by(rank))
        return cls(step, plan.generation, tuple(writers))

    def is_first_there(self, member: Member) -> bool:
        """Whether a writer is the first at its coordinate."""
        return member == next(writer for writer in self.writers if writer.coordinate == member.coordinate)


@dataclass(frozen=True, slots=True)
class SavePartVote:
    """What a vote says of the save at hand."""

    statuses: Mapping[str, str]
    """Of each present member, by incarnation."""
    planned: bool = True
    """Whoever is not present has left by a planned change, and its process writes on; otherwise it is dead."""
    sound: bool | None = False
    """Whether all copies of what is saved agree; None: they are still being compared."""
    saved: int = -1
    """The step of the newest whole checkpoint that any member knows of; -1: none."""
    given_up: bool = False
    """Whether all have gone back to a checkpoint since the save began: then `saved` says nothing of it."""
    owed: bool = False
    """Whether it settles a boundary that the world before did not come to: an evaluation right after the save's step
    may be under way then, and the script's own states that stand in the manifest follow from it.
    """


@dataclass(frozen=True, slots=True)
class WriteSave:
    """Write the own file: how every save begins."""


@dataclass(frozen=True, slots=True)
class CompleteSave:
    """The leader: make the checkpoint exist, once all parts are there."""

    gone: frozenset[str]
    """Incarnations whose parts may still come, though they take part in votes no more: those are waited for."""
    verified: bool
    """Whether all copies of what is saved agreed."""


@dataclass(frozen=True, slots=True)
class WithdrawSave:
    """Delete what was written of a save that has failed, before anybody knows of it."""

    everything: bool
    """All that is there, not the own part alone: nobody in the vote writes any more."""


SaveAct = WriteSave | CompleteSave | WithdrawSave


class SavePart:
    """See the module's text. The driver begins with `WriteSave`. `member`: one of the writers."""

    def __init__(self, save: SharedSave, member: Member) -> None:
        self.save, self.member, self.leads = save, member, member == save.writers[0]
        self.status = SaveStatus.WRITING
        self.failure = ""
        self.verified = False
        """Whether all copies of what is saved agreed; known once it is over."""
        self.is_over = False
        """Whether this member knows how it went."""
        self._written = False
        self._decision: SaveAct | None = None
        """The leader's, which waits for its own file."""
        self._leader_has_begun = False
        self._dead: frozenset[str] = frozenset()
        """Writers that a loss has taken since: a planned change after it makes nobody of them write on."""

    @property
    def report(self) -> SaveReport:
        """How it went, for the controller."""
        outcome = SaveOutcome.FAILED if self.failure else SaveOutcome.DONE
        return SaveReport(number=0, step=self.save.step, outcome=outcome, why=self.failure)

    # ---- from the driver

    def refuse(self, why: str) -> None:
        """This member cannot even begin."""
        self.status, self.failure, self.is_over = SaveStatus.FAILED, why, True

    def on_written(self) -> SaveAct | None:
        """The own file is there."""
        self._written = True
        if not self.leads:
            self.status = SaveStatus.WRITTEN
        return self._decision

    def on_failure(self, why: str) -> SaveAct:
        """The own file could not be written, or the checkpoint could not be completed."""
        self.failure = why
        return WithdrawSave(everything=self._decision is not None)

    def on_withdrawn(self) -> None:
        """What was to be deleted is gone."""
        if not self.is_over:
            self.status, self.is_over = SaveStatus.FAILED, self.leads

    def on_completed(self) -> None:
        """The leader: the checkpoint exists."""
        assert isinstance(self._decision, CompleteSave)
        self.status, self.is_over, self.verified = SaveStatus.IDLE, True, self._decision.verified

    @property
    def is_decided(self) -> bool:
        """The leader: whether it is known what becomes of the save."""
        return self._decision is not None

    def close(self) -> SaveAct | None:
        """The process ends after this, and so do all others of the job: no vote will decide any more."""
        if not self.leads or self.is_over or self._decision is not None:
            return None
        return self._decide(CompleteSave(frozenset(writer.incarnation for writer in self.save.writers[1:]), False))

    # ---- in the vote

    def on_vote(self, vote: SavePartVote) -> SaveAct | None:
        """After a vote. One that was torn some members do not hear."""
        if self.is_over:
            return None
        if self.leads:
            return self._lead(vote.statuses, vote.planned, None if vote.owed else vote.sound)
        leader = vote.statuses.get(self.save.writers[0].incarnation)
        if leader == SaveStatus.WRITING:
            self._leader_has_begun = True
        elif self.status is not SaveStatus.WRITING:
            return self._settle(leader, vote)
        return None

    def _lead(self, statuses: Mapping[str, str], planned: bool, sound: bool | None) -> SaveAct | None:
        """Complete it, give it up, or wait for another vote: what somebody is about to write would be left behind."""
        others = {writer.incarnation: writer.worker for writer in self.save.writers[1:]}
        present = {incarnation: statuses[incarnation] for incarnation in others if incarnation in statuses}
        if not planned:
            self._dead = frozenset(others.keys() - present.keys())
        if self._decision is not None or SaveStatus.WRITING in present.values() or sound is None:
            return None
        failed = [others[incarnation] for incarnation, status in present.items() if status == SaveStatus.FAILED]
        if failed:
            self.failure = f"the save was given up: {', '.join(failed)} could not write; the log of each says why."
            return self._decide(WithdrawSave(everything=True))
        return self._decide(CompleteSave(frozenset(others) - present.keys() - self._dead, sound))

    def _decide(self, decision: SaveAct) -> SaveAct | None:
        self._decision = decision
        return decision if self._written else None

    def _settle(self, leader: str | None, vote: SavePartVote) -> SaveAct | None:
        """The leader is through, or gone. One that is gone may have completed it all the same."""
        self.status, self.is_over, self.verified = SaveStatus.IDLE, True, bool(vote.sound)
        worker = self.save.writers[0].worker
        if vote.saved >= self.save.step:
            return None
        if leader is None:
            self.failure = f"{worker}, which led it, is gone"
        elif not self.failure and not (self._leader_has_begun and leader != SaveStatus.FAILED):
            if vote.given_up and leader != SaveStatus.FAILED:
                self.failure = "all went back to a checkpoint before this member heard how it went"
                return None  # it may be whole
            led = "which led it, says that it failed"
            self.failure = f"{worker}, {led if self._leader_has_begun else 'which was to lead it, did not begin'}"
            return WithdrawSave(everything=False)
        return None


FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


class SaveRetries:
    """See the module's text."""

    def __init__(self) -> None:
        self._since: float | None = None
        """When the first save of a row failed; None: the last one did not."""
        self._pause, self._not_before = FIRST_PAUSE_SECONDS, 0.0

    def on_saved(self) -> None:
        """The place works: the next failure is the first one of a row."""
        self._since, self._pause, self._not_before = None, FIRST_PAUSE_SECONDS, 0.0

    def on_end(self) -> None:
        """All steps are done: what failed before is tried at once, and has its whole time again."""
        self.on_saved()

    def on_failed(self, now: float, patience_seconds: float) -> bool:
        """Return whether the save is to be tried again: for so long after the first failure of a row."""
        self._since = now if self._since is None else self._since
        if now - self._since >= patience_seconds:
            return False
        self._not_before = min(now + self._pause, self._since + patience_seconds)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return True

    def is_waiting(self, now: float) -> bool:
        """Return whether the next try is still to wait."""
        return now < self._not_before
