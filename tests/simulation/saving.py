"""Saving and taking up, as one simulated worker does it: worker/shoal/training/checkpoint_saving.py,
checkpoint_loading.py and checkpoint/saver.py.

All decide alike by what the votes say: who asks, whose save is under way, which step is saved. The leader completes a
save once nobody in the vote is writing any more; the others hear of it in a later vote. Writing goes on beside steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from shoal_protos.checkpoint import CheckpointRef, SaveOutcome, SaveReport, UnreadableCheckpoint
from shoal_protos.plan import Plan
from shoal_protos.runs import NO_BLOCKS, Runs

if TYPE_CHECKING:
    from .checkpoints import Part
    from .worker import SimWorker
    from .world import World

WRITE_SECONDS = 0.6
COMMIT_SECONDS = 0.1
PATIENCE_SECONDS = 2.0
LOOK_SECONDS = 0.1


class Word(StrEnum):
    """What a ballot says of its member's part in a save."""

    IDLE = ""
    WRITING = "writing"
    WRITTEN = "written"
    FAILED = "failed"


BUSY = Word.WRITING, Word.WRITTEN


@dataclass(frozen=True, slots=True)
class Ballot:
    """What a member's vote says of saves."""

    asks: int
    """The first step at which a checkpoint is what it asks for; -1: it asks for none."""
    word: Word
    saved: int


@dataclass(eq=False, slots=True)
class Save:
    """One save as one member sees it. `writers[0]` leads."""

    sighting: CheckpointRef
    writers: tuple[str, ...]
    part: Part
    leads: bool
    in_use: str
    written: bool = False
    verdict: bool = False
    gone: frozenset[str] = frozenset()
    leader_heard: bool = False
    failure: str = ""
    sound: bool = False
    """Whether all copies of what is saved agreed."""


class Saving:
    """See the module's text."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker, self.place = worker, worker.simulation.checkpoints
        self.word = Word.IDLE
        self.saved = -1
        self._asked_at = -1
        self.told: tuple[SaveReport, ...] = ()
        self._save: Save | None = None
        self._over: Save | None = None
        """Over, and not heard of yet."""
        # what it knows of checkpoints
        self.knows: CheckpointRef | None = None
        self.damage: UnreadableCheckpoint | None = None
        self.generations: Runs = NO_BLOCKS
        self._unreadable: set[str] = set()
        self.taken = ""
        """The last checkpoint that it began to read: the initial state is gone from then on."""

    @property
    def taken_is_unreadable(self) -> bool:
        return self.taken in self._unreadable

    def look(self) -> None:
        """For the latest, at the start or after one that could not be read."""
        self.knows = self.place.newest(self._unreadable, self.generations)

    def ask(self) -> None:
        training = self.worker.training
        self._asked_at = training.step + (0 if training.done else 1)

    def restored(self, step: int) -> None:
        """All have gone back to a checkpoint, or to the start: what was saved after it counts no more."""
        self.saved, self._asked_at = step, min(self._asked_at, step + 1)

    # ---- in the vote

    def ballot(self) -> Ballot:
        word = self.word
        self._hear()
        return Ballot(self._asked_at, word, self.saved)

    def voted(self, ballots: dict[SimWorker, Ballot], world: World, stepped: bool) -> None:
        """At the boundary after a vote; all have the same ballots."""
        if not self.place.every:
            return
        step, said = self.worker.training.step, {peer.incarnation: ballot.word for peer, ballot in ballots.items()}
        self._heed(said, world.plan.recovery is None)
        self._hear()
        saved = max(ballot.saved for ballot in ballots.values())
        due = stepped and step % self.place.every == 0
        asked = any(ballot.asks > saved for ballot in ballots.values())
        if saved != step and (asked or due) and not any(word in BUSY for word in said.values()):
            self.worker.training.copies.save_begins()
            self._begin(world)
        if saved >= self._asked_at or saved == step:
            self._asked_at = -1

    def _heed(self, said: dict[str, Word], planned: bool) -> None:
        save = self._save
        if save is None or self.word is Word.IDLE:
            return
        leader = said.get(save.writers[0])
        if save.leads:
            self._decide(save, said, planned)
        elif leader is Word.WRITING:
            save.leader_heard = True
        elif self.word is not Word.WRITING:
            if leader is None or leader is Word.FAILED or not save.leader_heard:
                save.failure = save.failure or "its leader is gone, or says that it failed"
            save.sighting = replace(save.sighting, verified=self.worker.training.copies.sound)
            self._save, self._over, self.word = None, save, Word.IDLE

    def _decide(self, save: Save, said: dict[str, Word], planned: bool) -> None:
        """The leader: complete it, give it up, or wait for another vote."""
        if save.verdict:
            return
        others = {writer: said[writer] for writer in save.writers[1:] if writer in said}
        if Word.FAILED in others.values():
            save.failure = "another one could not write"
        elif Word.WRITING in others.values():
            return
        copies = self.worker.training.copies
        if copies.saved is not None:
            return
        save.sound = copies.sound
        save.gone = frozenset(save.writers[1:]) - others.keys() if planned else frozenset()
        save.verdict = True
        self._complete(save, PATIENCE_SECONDS)

    # ---- a save begins, and is written

    def _begin(self, world: World) -> None:
        plan, training = world.plan, self.worker.training
        writers = tuple(plan.members[rank].incarnation for rank in sorted({0, *world.owners}))
        if self.worker.incarnation not in writers:
            return
        path = f"{training.step}-{plan.generation}-{training.boundary}"
        part = {block: training.blocks[block] for block in world.owned[training.rank]}
        in_use = plan.recovery.checkpoint if plan.recovery is not None else ""
        sighting = CheckpointRef(plan.generation, training.step, path)
        self._save = save = Save(sighting, writers, part, training.rank == 0, in_use)
        self.word, self._over = Word.WRITING, None
        self.worker.after(WRITE_SECONDS * self.place.chance.random(), self._written, save)

    def _written(self, save: Save) -> None:
        if self.place.chance.random() < self.place.failing:
            return self._fails(save, "the disk is full")
        self.place.parts.setdefault(save.sighting.path, {})[self.worker.incarnation] = save.part
        save.written = True
        if save.leads:
            self._complete(save, PATIENCE_SECONDS)
        elif save is self._save:
            self.word = Word.WRITTEN
        return None

    def _complete(self, save: Save, patience: float) -> None:
        """The leader, once its part is written and the votes have decided: those who have left may still write."""
        if not (save.written and save.verdict) or save is not self._save or self.word is Word.FAILED:
            return
        there = self.place.parts[save.sighting.path].keys()
        if save.failure:
            self._fails(save, save.failure)
        elif save.gone <= there or patience <= 0:
            self.worker.after(COMMIT_SECONDS * self.place.chance.random(), self._commit, save)
        else:
            self.worker.after(LOOK_SECONDS, self._complete, save, patience - LOOK_SECONDS)

    def _commit(self, save: Save) -> None:
        if save is self._save and self.word is Word.WRITING:
            save.sighting = replace(save.sighting, verified=save.sound)
            if self.place.publish(save.sighting, save.writers, save.in_use):
                self.word, self._save, self._over = Word.IDLE, None, save
            else:
                self._fails(save, "a part is not there")

    def _fails(self, save: Save, why: str) -> None:
        save.failure = why
        if save is self._save:
            self.word = Word.FAILED
            if save.leads:
                self._save, self._over = None, save
                self.place.failed += 1
                self.worker.simulation.promises.saved(save.sighting.step)

    def closes_in(self) -> float:
        """How long a process that is to end still writes."""
        save = self._save
        if save is None or self.word not in BUSY:
            return 0.0
        if save.leads and not save.verdict:
            save.gone, save.verdict = frozenset(save.writers[1:]), True
            self._complete(save, PATIENCE_SECONDS)
        return WRITE_SECONDS + COMMIT_SECONDS

    # ---- a save is over

    def _hear(self) -> None:
        save, self._over = self._over, None
        if save is None:
            return
        if not save.failure:
            self.saved, self.knows = save.sighting.step, save.sighting
        elif save.sighting.generation == self.worker.training.generation:
            self._asked_at = -1
        if save.leads:
            outcome = SaveOutcome.FAILED if save.failure else SaveOutcome.DONE
            number = self.told[-1].number + 1 if self.told else 1
            self.told = (*self.told[-7:], SaveReport(number, save.sighting.step, outcome, why=save.failure))

    # ---- taking up

    def begins(self, plan: Plan) -> None:
        """A plan is being carried out; what was said of another one's checkpoint is over."""
        path = plan.recovery.checkpoint if plan.recovery is not None else ""
        if self.damage is not None and self.damage.path != path:
            self.damage = None

    def take_up(self, path: str) -> Part | None:
        """What is in a checkpoint, or None where it cannot be read: that is said, and another one is looked for."""
        content = self.place.read(path)
        if content is not None:
            self.taken = path
        meets_it = self.worker.training.rank == 0 or self.place.chance.random() < 0.5  # the blocks with the flipped bit
        if content is None or (path in self.place.damaged and meets_it):
            self._unreadable.add(path)
            self.damage = UnreadableCheckpoint(path, f"{path} {'is damaged' if content else 'is not there'}.")
            self.look()
            return None
        return content
