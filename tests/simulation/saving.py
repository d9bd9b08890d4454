"""Saves of a simulated worker: a driver of the real `Saving` and `SavePart`, as training/checkpoint_saving.py and
checkpoint/saver.py are one.

What follows from a vote is theirs. Here are the disk and its time: a file is written, or cannot be; a checkpoint is
made; what was written is deleted. That goes on beside steps, and ends with the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shoal.core.saving import (
    CompleteSave,
    SaveAct,
    SaveChoice,
    SavePart,
    SavePartVote,
    SaveStatus,
    SaveVote,
    Saving,
    SharedSave,
    WithdrawSave,
    WriteSave,
)
from shoal_protos.checkpoint import CheckpointRef, SaveReport

if TYPE_CHECKING:
    from .checkpoints import Part
    from .worker import SimWorker
    from .world import World

WRITE_SECONDS = 0.6
COMMIT_SECONDS = WITHDRAW_SECONDS = 0.1
PATIENCE_SECONDS = 2.0
LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Ballot:
    """What a member's vote says of saves."""

    asks: int | None
    """The first step at which a checkpoint is what it asks for."""
    status: SaveStatus
    saved: int


@dataclass(eq=False, slots=True)
class Task:
    """What this member writes of one save."""

    part: SavePart
    path: str
    content: Part
    in_use: str

    @property
    def ref(self) -> CheckpointRef:
        save = self.part.save
        return CheckpointRef(save.generation, save.step, self.path, verified=self.part.verified)


class Saves:
    """See the module's text."""

    def __init__(self, worker: SimWorker) -> None:
        self.worker, self.place = worker, worker.simulation.checkpoints
        self.saving = Saving(self.place.every or None)
        self._task: Task | None = None
        self._unheard: Task | None = None
        """Whose outcome `saving` has not heard yet."""
        self._acts = 0
        """Being carried out."""
        self._then: Callable[[], None] | None = None
        """Once none is."""

    @property
    def reported(self) -> tuple[SaveReport, ...]:
        return self.saving.recent

    def ask(self) -> None:
        self.saving.ask(self.worker.training.step, self.worker.training.done)

    # ---- in the vote

    def ballot(self) -> Ballot:
        status = self._task.part.status if self._task is not None else SaveStatus.IDLE
        self._hear()
        return Ballot(self.saving.asked_at, status, self.saving.saved)

    def on_vote(self, ballots: dict[SimWorker, Ballot], world: World, stepped: bool) -> None:
        """At the boundary after a vote; all have the same ballots."""
        if not self.place.every:
            return
        training = self.worker.training
        statuses = {peer.incarnation: ballot.status for peer, ballot in ballots.items()}
        saved = max(ballot.saved for ballot in ballots.values())
        if self._task is not None:
            planned, sound = world.plan.recovery is None, training.copies.saved_is_sound
            act = self._task.part.on_vote(SavePartVote(statuses, planned, sound, saved, self.saving.is_given_up))
            self._check(self._task, act, [peer.training.saves for peer in ballots])
            self._start(self._task, act)
        self._hear()
        choice = self.saving.on_vote(
            SaveVote(
                training.rank, training.step, saved, statuses,
                asked=[ballot.asks for ballot in ballots.values() if ballot.asks is not None],
                stepped=stepped, over=training.done,
            )
        )  # fmt: skip
        if choice is SaveChoice.BEGIN:
            training.copies.save_begins()
            self._begin(world)

    def _check(self, task: Task, act: SaveAct | None, members: list[Saves]) -> None:
        """What is written of a save that was given up before would be left behind."""
        writing = [one.worker for one in members if one._task is not None and one._task.path == task.path
                   and one._task.part.status is SaveStatus.WRITING and one is not self]  # fmt: skip
        if isinstance(act, WithdrawSave) and act.everything and writing:
            self.worker.simulation.watch.violated("a save is given up while others write it", *writing)

    def _begin(self, world: World) -> None:
        plan, training = world.plan, self.worker.training
        save, member = SharedSave.of(training.step, plan), plan.members[training.rank]
        if member in save.writers:
            content = {block: training.blocks[block] for block in world.owned[training.rank]}
            in_use = plan.recovery.checkpoint if plan.recovery is not None else ""
            path = f"{save.step}-{save.generation}-{training.boundary}"
            self._task = self._unheard = Task(SavePart(save, member), path, content, in_use)
            self._start(self._task, WriteSave())

    def _hear(self) -> None:
        task = self._unheard
        if task is None or not task.part.is_over:
            return
        self._unheard = None
        training, part, before = self.worker.training, task.part, self.reported
        if not part.failure:
            training.loading.known.on_found(task.ref)
        self.saving.on_over(part, part.report, training.rank, training.generation)
        if part.failure and self.reported != before:
            self.place.failed += 1
            self.worker.simulation.promises.saved(part.save.step)

    # ---- the disk

    def _start(self, task: Task, act: SaveAct | None) -> None:
        """Whatever it is, it takes its time."""
        after, chance = self.worker.after, self.place.chance
        if isinstance(act, WithdrawSave) and act.everything and self.place.is_whole(task.path):
            self.worker.simulation.watch.violated("a whole checkpoint is withdrawn", self.worker, task.path)
        match act:
            case WriteSave():
                after(WRITE_SECONDS * chance.random(), self._write, task)
            case CompleteSave():
                self._wait_for_parts(task, act, PATIENCE_SECONDS)
            case WithdrawSave():
                after(WITHDRAW_SECONDS * chance.random(), self._withdraw, task, act)
        self._acts += act is not None

    def _follow(self, task: Task, act: SaveAct | None) -> None:
        """One is carried out."""
        self._acts -= 1
        self._start(task, act)
        self._end()

    def _end(self) -> None:
        then = self._then
        if then is not None and not self._acts:
            self._then = None
            then()

    def _write(self, task: Task) -> None:
        if self.place.chance.random() < self.place.failing:
            self._follow(task, task.part.on_failure("the disk is full"))
        else:
            self.place.parts.setdefault(task.path, {})[task.part.member.incarnation] = task.content
            self._follow(task, task.part.on_written())

    def _wait_for_parts(self, task: Task, act: CompleteSave, patience: float) -> None:
        """Those who have left may still write."""
        if act.gone <= self.place.parts[task.path].keys() or patience <= 0:
            self.worker.after(COMMIT_SECONDS * self.place.chance.random(), self._complete, task, act)
        else:
            self.worker.after(LOOK_SECONDS, self._wait_for_parts, task, act, patience - LOOK_SECONDS)

    def _complete(self, task: Task, act: CompleteSave) -> None:
        writers = [writer.incarnation for writer in task.part.save.writers]
        if self.place.publish(replace(task.ref, verified=act.verified), writers, task.in_use):
            task.part.on_completed()
            self._follow(task, None)
        else:
            self._follow(task, task.part.on_failure("a part is not there"))

    def _withdraw(self, task: Task, act: WithdrawSave) -> None:
        self.place.withdraw(task.path, None if act.everything else task.part.member.incarnation)
        task.part.on_withdrawn()
        self._follow(task, None)

    def close(self, then: Callable[[], None]) -> None:
        """The process is to end: what has begun comes to its end, then that."""
        self._then = then
        if self._task is not None:
            self._start(self._task, self._task.part.close())
        self._end()
