"""Saving, as one member sees it: when a save falls due, beginning it at a boundary, learning how it went.

All members decide alike, because they decide by the vote's record alone: it says who asks, whose save is still being
written, and which step is saved already. The copy is made here, on the training thread; the rest is the saver's, on its
own (checkpoint/saver.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal_protos.checkpoint import CheckpointRef, SaveOutcome, SaveReport
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.checkpoint.catalogue import SaveName
from shoal.checkpoint.draft import Origin, draft_of
from shoal.checkpoint.errors import StorageFailed
from shoal.checkpoint.layout_entry import LayoutEntry
from shoal.checkpoint.named import tied_names
from shoal.checkpoint.plain import encode
from shoal.checkpoint.retention import Keep, Ours
from shoal.checkpoint.saver import Lead, Saver, SaveResult, SaveStatus, SaveTask
from shoal.checkpoint.snapshot import take_snapshot
from shoal.checkpoint.storage import open_storage
from shoal.checkpoint.writer import Author
from shoal.config.training import agreement
from shoal.exchange.vote import Record, Request
from shoal.logs import get_logger
from shoal.numerics import identity
from shoal.training.checkpoint_loading import CheckpointLoading
from shoal.training.context import TrainingContext
from shoal.training.corruption_watch import CorruptionWatch
from shoal.training.state import frozen_parameters
from shoal.world import World

SAVE = Request("save")
SCHEDULED = Request("scheduled")
RECENT_SAVES = 8
BUSY = (SaveStatus.WRITING, SaveStatus.WRITTEN)

log = get_logger("shoal.checkpoint")


class CheckpointSaving:
    """Saves of one worker. Without `shoal.checkpoint.path` it does nothing but refuse."""

    def __init__(self, context: TrainingContext, corruption: CorruptionWatch, loading: CheckpointLoading) -> None:
        self._context, self._corruption, self._loading = context, corruption, loading
        self._config = context.config.checkpoint
        self._saver: Saver | None = None
        if self._config.path is not None:
            storage = open_storage(self._config.path)
            storage.prepare()
            self._saver = Saver(storage, Keep(self._config.keep, self._config.keep_every))
        self._origin: Origin | None = None
        self.saved = -1
        """The step of the newest whole checkpoint of this life of the job."""
        self._asked_at: int | None = None
        """From this step on a save fulfils what this worker asks for; None: it asks for nothing."""
        self._clock = time.monotonic()
        self._generation = 0
        """The generation in which the current save began."""
        self.failure: StorageFailed | None = None
        """Why the last save that this worker asked for failed, until raised."""
        self.recent: tuple[SaveReport, ...] = ()
        """The last few saves that this worker led, for the controller."""
        self._number = 0

    # ---- what the script and the controller ask

    def check_configured(self) -> None:
        """Raises `UserError` where there is no place to save to."""
        if self._saver is None:
            raise UserError("engine.save_checkpoint needs a place; set `shoal.checkpoint.path` in the config.")

    def remember_request(self) -> None:
        """This worker brings the request into its votes from now on."""
        self._asked_at = self._context.state.step + (0 if self._context.over else 1)

    @property
    def pending(self) -> Request | None:
        """What this worker asks for and is still to be done, as its ballot says it."""
        return replace(SAVE, step=self._asked_at) if self._asked_at is not None else None

    def register(self, name: str, of: Any) -> None:
        """An object of the user's whose state is saved with the job's, and given to joiners."""
        if not (callable(getattr(of, "state_dict", None)) and callable(getattr(of, "load_state_dict", None))):
            raise UserError(
                f'engine.register_state("{name}", …) got a {type(of).__name__}; '
                "it needs state_dict and load_state_dict."
            )
        if name in self._context.state.registered:
            raise UserError(f'engine.register_state was called twice for "{name}"; give each state its own name.')
        if self._context.world is not None:
            raise UserError(f'engine.register_state("{name}", …) was called in the loop; call it before.')
        encode(of.state_dict(), {}, f'the state registered as "{name}"')
        self._context.state.registered[name] = of

    # ---- in the vote

    @property
    def status(self) -> SaveStatus:
        """This member's part in the save at hand."""
        return self._saver.status if self._saver is not None else SaveStatus.IDLE

    @property
    def busy(self) -> bool:
        """Whether a save is under way here."""
        return self.status in BUSY

    def scheduled_requests(self) -> tuple[Request, ...]:
        """Rank 0's clock, in the ballot of a step."""
        minutes = self._config.every_minutes
        if self._saver is None or minutes is None or self._context.rank != 0:
            return ()
        return (SCHEDULED,) if time.monotonic() - self._clock >= 60 * minutes else ()

    def on_vote(self, record: Record, world: World, stepped: bool, owed: bool) -> None:
        """After every vote, on every member with the same record. `stepped`: it committed a step; `owed`: it settles a
        boundary that the world before did not come to.
        """
        if self._saver is None:
            return
        statuses = {m.incarnation: status for m, status in zip(world.plan.members, record.saving, strict=True)}
        self._saver.on_vote(statuses, world.plan.recovery is None, self._corruption.saved_is_sound)
        self.take_in_outcome()
        asked = any(request.kind == "save" and record.saved < request.step for request in record.requests)
        due = stepped and self._is_due(record)
        if due:
            self._clock = time.monotonic()
        if record.saved != record.step and (asked or due):
            if not any(status in BUSY for status in record.saving):
                self._corruption.on_save()
                self._begin(self._saver, world)
            elif due and owed:
                self._ask_for_the_owed()
            elif due:
                self._skip(record.step)
        if self._asked_at is not None and (record.saved >= self._asked_at or record.saved == record.step):
            self._asked_at = None

    def _is_due(self, record: Record) -> bool:
        steps = self._config.every_steps
        return (steps is not None and record.step % steps == 0) or SCHEDULED in record.requests

    def _ask_for_the_owed(self) -> None:
        """The one before is still being written and is most likely lost with a member: as soon as it is over."""
        if self._context.rank == 0:
            self.remember_request()

    def _skip(self, step: int) -> None:
        """All skip it; rank 0 reports it."""
        if self._context.rank == 0:
            why = "the checkpoint before is still being written"
            log.warning("save_skipped", step=step, reason=why)
            self._remember(SaveReport(0, step, SaveOutcome.SKIPPED, why=why))

    # ---- a save begins

    def _begin(self, saver: Saver, world: World) -> None:
        """Copies what this member owns; writing goes on beside training."""
        context, plan = self._context, world.plan
        began = self._clock = time.monotonic()
        leader, run = plan.members[0].incarnation, context.link.job.run
        name = SaveName.of(context.state.step, plan.generation, context.boundaries, leader, run)
        self._generation = plan.generation
        authors = {
            rank: Author(member.worker, member.incarnation)
            for rank, (member, share) in enumerate(zip(plan.members, plan.shares, strict=True))
            if rank == 0 or share.owned
        }
        if world.rank not in authors:
            return None
        context.faults.at("save", context.state.step)
        lead: Lead | None = None
        beside: dict[str, Tensor] = {}
        if world.rank == 0:
            try:
                draft, beside = draft_of(context.state, self.origin, plan.generation, context.state.registered)
            except UserError as error:
                log.error("save_failed", step=name.step, reason=str(error))
                return saver.refuse(name, str(error))
            buffers, frozen = context.state.buffers.committed.copy(), frozen_parameters(context.state.module)
            lead = Lead(draft, buffers, frozen, _in_use(world))
        owned, state = plan.shares[world.rank].owned, context.state
        snapshot = take_snapshot(state.layout, state.flats, state.held, owned, beside, saver.ready())
        save = SaveTask(name, authors[world.rank], tuple(authors.values()), snapshot, lead, Ours(run, state.lineage))
        saver.begin(save, copy_seconds=time.monotonic() - began)
        return None

    @property
    def origin(self) -> Origin:
        """Made once; nothing of it changes."""
        if self._origin is None:
            context = self._context
            layout = LayoutEntry.of(context.state.layout, tied_names(context.state.module))
            link, position = context.link, context.data_position
            self._origin = Origin(link.job.name, link.job.run, layout, position, agreement(context.config), identity())
        return self._origin

    def on_world(self, world: World) -> None:
        """A world begins: where saves are scheduled, their memory is taken before the first of them needs it."""
        config = self._config
        if self._saver is None or (config.every_steps is None and config.every_minutes is None):
            return
        state = self._context.state
        blocks = len(world.plan.shares[world.rank].owned)
        parameters = max(bucket.dtype.itemsize for bucket in state.layout.buckets) * state.layout.block_elements
        self._saver.reserve(blocks * (parameters + state.held.state_bytes_of_a_block()))

    def on_return_to(self, step: int) -> None:
        """All have gone back to a checkpoint, or to the start: what was saved after it counts no more."""
        self.saved = step
        if self._asked_at is not None:
            self._asked_at = min(self._asked_at, step + 1)

    # ---- a save is over

    def take_in_outcome(self) -> None:
        """Learn how the save at hand went, once it is over."""
        outcome = self._saver.take_outcome() if self._saver is not None else None
        if outcome is None:
            return
        if not outcome.failure:
            self.saved = outcome.name.step
            name, run = outcome.name, self._context.link.job.run
            size = outcome.manifest.data_bytes if outcome.manifest is not None else 0
            ref = CheckpointRef(name.generation, name.step, outcome.path, size, run, outcome.verified)
            self._loading.on_saved(ref)
        elif self.pending and self._generation == self._context.generation:
            self._asked_at = None
            self.failure = StorageFailed(f"the checkpoint of step {outcome.name.step} failed: {outcome.failure}")
        if outcome.manifest is not None or (outcome.failure and self._context.rank == 0):
            self._remember(_as_message(outcome))

    def _remember(self, saved: SaveReport) -> None:
        self._number += 1
        self.recent = (*self.recent[1 - RECENT_SAVES :], replace(saved, number=self._number))

    @property
    def saver_end(self) -> Callable[[], None]:
        """What ends the saving of an engine that is no more."""
        return self._saver.close if self._saver is not None else _nothing

    def close(self) -> None:
        """At the process's end: what has begun comes to its end."""
        if self._saver is not None:
            self._saver.close()


def _nothing() -> None:
    """Nothing is being saved."""


def _in_use(world: World) -> str:
    """The folder that this generation came from."""
    recovery = world.plan.recovery
    return recovery.checkpoint.rstrip("/").rpartition("/")[2] if recovery is not None else ""


def _as_message(outcome: SaveResult) -> SaveReport:
    seconds = outcome.seconds
    return SaveReport(
        number=0,
        step=outcome.name.step,
        outcome=SaveOutcome.FAILED if outcome.failure else SaveOutcome.DONE,
        path=outcome.path,
        bytes=outcome.manifest.data_bytes if outcome.manifest is not None else 0,
        copy_seconds=seconds.get("copy", 0.0),
        write_seconds=seconds.get("write", 0.0),
        commit_seconds=seconds.get("commit", 0.0),
        why=outcome.failure,
    )
