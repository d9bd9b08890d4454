"""One member's part in one save: what it decides by the votes, and what is to be done next.

A save begins at one boundary, on rank 0, which leads it, and on all that own blocks. Each writes a file beside
training, and every ballot says how far its member is. Once nobody in the vote is writing any more, the leader completes
the save or gives it up; the others see it in a later vote. What is to be done where the checkpoint lies comes out as an
act, and the driver (checkpoint/saver.py, the simulator) reports how it went, with one lock around all calls. Pure: it
holds no file, no thread, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from shoal_protos.checkpoint import SaveOutcome, SaveReport
from shoal_protos.plan import Member, Plan


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
    """A save, alike on all its writers. The first of them leads."""

    step: int
    generation: int
    writers: tuple[Member, ...]

    @classmethod
    def of(cls, step: int, plan: Plan) -> SharedSave:
        """Rank 0 writes, whatever it owns, and every owner."""
        ranks = enumerate(zip(plan.members, plan.shares, strict=True))
        return cls(step, plan.generation, tuple(member for rank, (member, share) in ranks if rank == 0 or share.owned))


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
