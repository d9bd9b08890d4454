"""Saving, as one member sees it: when a save falls due, beginning it at a boundary, learning how it went.

What follows from a vote's record is decided in core/saving.py, on all members alike. The copy is made here, on the
training thread; the rest is the saver's, on its own (checkpoint/saver.py). The script's own states come later
(registered_states.py). `SavePatience` says how long a write is waited for once all steps are done: one that does not
come back must not hold a job for ever. Each member asks it for what it writes; the others wait for it so long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from shoal_protos.checkpoint import CheckpointRef, SaveReport
from shoal_protos.errors import ShoalError, UserError
from shoal_protos.training_log import get_logger
from torch import Tensor

from shoal.checkpoint.catalogue import Keep, Ours, SaveName
from shoal.checkpoint.failure import SaveFailed
from shoal.checkpoint.named import tied_names
from shoal.checkpoint.saver import Lead, Saver, SaveResult, SaveTask
from shoal.checkpoint.snapshot import streamed_state, take_snapshot
from shoal.checkpoint.storage import open_storage
from shoal.checkpoint.writer import Author, Origin, draft_of, tensors_of_coordinate
from shoal.config.out_of_memory import is_out_of_memory
from shoal.config.training import agreement
from shoal.core.manifest_parts import LayoutEntry
from shoal.core.plain import encode
from shoal.core.saving import (
    BUSY,
    SaveChoice,
    SavePart,
    SavePartVote,
    SaveRetries,
    SaveStatus,
    SaveVote,
    Saving,
    SharedSave,
)
from shoal.core.units import named_parameters
from shoal.exchange.ballot import Request
from shoal.exchange.vote import Record
from shoal.exchange.world import World
from shoal.group.group import WorldChanged
from shoal.optim.schedules import is_made_of_numbers
from shoal.process.numerics import identity
from shoal.state.training_state import frozen_in_blocks, frozen_parameters
from shoal.training.checkpoint_loading import CheckpointLoading
from shoal.training.context import TrainingContext
from shoal.training.corruption_watch import CorruptionWatch
from shoal.training.parameters import Parameters
from shoal.training.registered_states import SavedStates

SAVE = Request("save")
SCHEDULED = Request("scheduled")

log = get_logger("shoal.checkpoint")


class CheckpointSaving:
    """Saves of one worker. Without `shoal.checkpoint.path` it does nothing but refuse."""

    def __init__(
        self, context: TrainingContext, corruption: CorruptionWatch, loading: CheckpointLoading, parameters: Parameters
    ) -> None:
        self._context, self._corruption, self._loading = context, corruption, loading
        self._parameters = parameters
        self._config = context.config.checkpoint
        self._saver: Saver | None = None
        if self._config.path is not None:
            storage = open_storage(self._config.path)
            storage.prepare()
            self._saver = Saver(storage, Keep(self._config.keep, self._config.keep_every), context.state.device)
        self._origin: Origin | None = None
        self._saving = Saving(self._config.every_steps)
        self.states = SavedStates(context, parameters, self._saver, self._saving)
        self._clock = time.monotonic()
        self._retries = SaveRetries()
        self._failure: SaveFailed | None = None
        """Why the last save that this worker asked for failed, and is not tried again."""
        self.patience = SavePatience(context, self._saver)

    # ---- what the script and the controller ask

    def check_configured(self) -> None:
        """Raises `UserError` where there is no place to save to."""
        if self._saver is None:
            raise UserError("engine.save_checkpoint needs a place; set `shoal.checkpoint.path` in the config.")

    def remember_request(self, at_hand: bool = False) -> None:
        """This worker brings the request into its votes from now on. `at_hand`: the weights of now are to be saved."""
        self._saving.ask(self._context.state.step, at_hand or self._context.is_over)

    @property
    def pending(self) -> Request | None:
        """What this worker asks for and is still to be done, as its ballot says it."""
        return replace(SAVE, step=self._saving.asked_at) if self._saving.asked_at is not None else None

    @property
    def in_ballot(self) -> Request | None:
        """`pending`, unless it has failed and its next try is still to wait."""
        return None if self._retries.is_waiting(time.monotonic()) else self.pending

    @property
    def is_settled(self) -> bool:
        """Whether no save is under way here, or still to begin: what the end of a job waits for."""
        return not (self.busy or self._saving.asked_at is not None or (self._saver and self._saving.is_owed))

    @property
    def has_settled(self) -> bool:
        """Whether the loop may end, on all members alike: none writes, and the save that was owed is over."""
        return self._saver is None or self._saving.has_settled

    def on_end(self) -> None:
        """The loop has come to its end, or the script: a save that is owed is tried at once, and for the whole time."""
        self._failure = None
        self.patience.begin()
        self._saving.on_end(self._context.state.step)
        self._retries.on_end()

    def ask_for_what_is_owed(self) -> None:
        """After the last step, on rank 0 for all: a checkpoint that was due and is not there is saved now, unless that
        has failed for as long as it is tried.
        """
        self.take_in_outcome()
        if self._is_to_ask and self._failure is None:
            self.remember_request()

    def check_owed(self) -> None:
        """At the job's end: raises `SaveFailed` where the save that is owed has failed for as long as it is tried."""
        self.patience.check()
        self.take_in_outcome()
        failure = self.take_failure() if self._is_to_ask else None
        if failure is not None:
            before = f"goes on from step {self.saved}" if self.saved >= 0 else "begins anew"
            raise SaveFailed(
                f"all steps are done, but the last checkpoint that was due is missing: {str(failure).rstrip('.')}. "
                f"Started again, the job {before}."
            )

    @property
    def _is_to_ask(self) -> bool:
        waits = self.busy or self._saving.is_under_way or self._saving.asked_at is not None
        return self._context.rank == 0 and not waits and not self.is_settled

    def take_failure(self) -> SaveFailed | None:
        """Why the last save that this worker asked for failed, once."""
        failure, self._failure = self._failure, None
        return failure

    @property
    def saved(self) -> int:
        """The step of the newest whole checkpoint of this life of the job; -1: none."""
        return self._saving.saved

    @property
    def recent(self) -> tuple[SaveReport, ...]:
        """The last few saves that this worker has to report to the controller."""
        return self._saving.recent

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
        planned, sound = world.plan.recovery is None, self._corruption.saved_is_sound
        self._saver.on_vote(SavePartVote(statuses, planned, sound, record.saved, self._saving.is_given_up, owed))
        self.take_in_outcome()
        choice = self._saving.on_vote(
            SaveVote(
                world.rank, record.step, record.saved, statuses,
                asked=[request.step for request in record.requests if request.kind == "save"],
                stepped=stepped, scheduled=SCHEDULED in record.requests, owed=owed, over=self._context.is_over,
            )
        )  # fmt: skip
        if choice is not SaveChoice.NOTHING:
            self._clock = time.monotonic()
        if choice is SaveChoice.BEGIN:
            self.begin(world)
        if choice is SaveChoice.SKIP and world.rank == 0:
            log.warning("save_skipped", step=record.step, reason=self.recent[-1].why)

    # ---- a save begins

    def begin(self, world: World) -> None:
        """At one boundary, on all members alike. Copies what this member owns; writing goes on beside training, unless
        the config says to write at once. Raises `WorldChanged`.
        """
        saver = self._saver
        if saver is None:
            return None
        self._saving.on_begun(self._context.state.step)
        if not is_made_of_numbers(self._context.state.scheduler):
            self._parameters.settle()  # its state may be one of parameters
        self._corruption.on_save()
        context, plan, state = self._context, world.plan, self._context.state
        began = time.monotonic()
        save, member = SharedSave.of(state.step, plan), plan.members[world.rank]
        if member not in save.writers:
            return None
        leader, run = save.writers[0].incarnation, context.link.job.run
        name, part = SaveName.of(save.step, save.generation, context.boundaries, leader, run), SavePart(save, member)
        context.faults.at("save", state.step)
        ours = Ours(run, state.lineage)
        lead: Lead | None = None
        beside = tensors_of_coordinate(state) if save.is_first_there(member) and not part.leads else {}
        if part.leads:
            try:
                draft, beside = draft_of(state, self.origin, plan.generation, {})
                frozen = self._frozen(saver, name, Author.of(member), ours)
            except (ShoalError, WorldChanged) as error:  # a world that has changed is found by whoever waits next
                log.error("save_failed", step=name.step, reason=str(error))
                return saver.refuse(part, name, str(error) or "the world changed meanwhile")
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                log.error("save_failed", step=name.step, reason=f"no memory to read frozen parameters ({error})")
                return saver.refuse(part, name, f"no memory to read frozen parameters ({error})")
            lead = Lead(draft, frozen, _in_use(world))
        owned = state.held_layout.without_frozen(world.owned)
        held = state.layout, state.weights, state.held, owned, beside
        if self._config.stream:
            saver.write(SaveTask(part, name, streamed_state(*held), lead, ours))
            return None
        try:
            snapshot = take_snapshot(*held, saver.ready())
        except (MemoryError, OSError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            why = f"no memory for a copy of what this worker writes ({error}); set `shoal.checkpoint.stream: true`."
            log.error("save_failed", step=name.step, reason=why)
            return saver.refuse(part, name, why)
        saver.begin(SaveTask(part, name, snapshot, lead, ours), copy_seconds=time.monotonic() - began)
        return None

    def _frozen(self, saver: Saver, name: SaveName, author: Author, ours: Ours) -> dict[str, Tensor]:
        """What is to be written beside training; what is in blocks is written here and now."""
        state = self._context.state
        whole, in_blocks = frozen_parameters(state), frozen_in_blocks(state)
        if not in_blocks:
            return whole
        together = {**whole, **in_blocks}
        named = {name: together[name] for name, _ in named_parameters(state.module) if name in together} | whole
        saver.write_frozen_now(name, author, ours, named, self._parameters.reading)
        return {}

    @property
    def origin(self) -> Origin:
        """Made once; nothing of it changes."""
        if self._origin is None:
            context = self._context
            layout = LayoutEntry.of(context.state.layout, tied_names(context.state.modules))
            link, position = context.link, context.data_position
            kind, config = context.state.device.kind, context.config
            on_host, in_cells = config.updates_on_host, config.cell.processes > 1
            numerics = identity(kind, updates_on_host=on_host, in_cells=in_cells)
            self._origin = Origin(link.job.name, link.job.run, layout, position, agreement(context.config), numerics)
        return self._origin

    def on_world(self, world: World) -> None:
        """A world begins: where saves are scheduled, their memory is taken before the first of them needs it."""
        self._saving.on_world()
        config = self._config
        if self._saver is None or config.stream or (config.every_steps is None and config.every_minutes is None):
            return
        state = self._context.state
        blocks = len(world.traffic.owned[world.rank])
        parameters = max(bucket.dtype.itemsize for bucket in state.layout.buckets) * state.layout.block_elements
        self._saver.reserve(blocks * (parameters + state.held.state_bytes_of_a_block()))

    def on_return_to(self, step: int) -> None:
        """All have gone back to a checkpoint, or to the start: what was saved after it counts no more."""
        self._saving.on_return_to(step)
        self.patience.forget()
        self.states.on_return()

    # ---- a save is over

    def take_in_outcome(self) -> None:
        """Learn how the save at hand went, once it is over."""
        outcome = self._saver.take_outcome() if self._saver is not None else None
        if outcome is None:
            return
        part, name = outcome.part, outcome.name
        if not part.failure:
            size = outcome.manifest.data_bytes if outcome.manifest is not None else 0
            run = self._context.link.job.run
            self._loading.known.on_found(
                CheckpointRef(name.generation, name.step, outcome.path, size, run, part.verified)
            )
        rank, generation = self._context.rank, self._context.generation
        has_failed_asker = self._saving.on_over(part, _report(outcome), rank, generation)
        if not part.failure:
            self._failure = None
            self._retries.on_saved()
        elif has_failed_asker or (rank == 0 and part.save.generation == generation):
            self._try_again(part, has_failed_asker)

    def _try_again(self, part: SavePart, has_failed_asker: bool) -> None:
        """By whoever asked for the save that has failed, else by rank 0; not for ever."""
        patience = self._context.link.job.stall_seconds
        if not self.states.are_broken and self._retries.on_failed(time.monotonic(), patience):
            self._saving.ask_again(part.save.step)
        elif has_failed_asker:
            self._failure = SaveFailed(f"the checkpoint of step {part.save.step} failed: {part.failure}")

    @property
    def saver_end(self) -> Callable[[], None]:
        """What ends the saving of an engine that is no more."""
        return partial(self._saver.close, self.patience.seconds) if self._saver is not None else _nothing

    def close(self) -> None:
        """At the process's end: what has begun comes to its end."""
        self.states.on_left()
        if self._saver is not None:
            self._saver.close(self.patience.seconds)


def _nothing() -> None:
    """Nothing is being saved."""


def _in_use(world: World) -> str:
    """The folder that this generation came from."""
    recovery = world.plan.recovery
    return recovery.checkpoint.rstrip("/").rpartition("/")[2] if recovery is not None else ""


def _report(outcome: SaveResult) -> SaveReport:
    seconds = outcome.seconds
    return replace(
        outcome.part.report,
        path=outcome.path,
        bytes=outcome.manifest.data_bytes if outcome.manifest is not None else 0,
        copy_seconds=seconds.get("copy", 0.0),
        write_seconds=seconds.get("write", 0.0),
        commit_seconds=seconds.get("commit", 0.0),
    )


LEAST_SECONDS = 60.0
"""However impatient the job is."""


class SavePatience:
    """Of one worker. `saver`: None where nothing is saved."""

    def __init__(self, context: TrainingContext, saver: Saver | None) -> None:
        self._context, self._saver = context, saver
        self._since: float | None = None
        """When all steps were done; None: they are not."""
        self._is_over = False

    def begin(self) -> None:
        """All steps are done."""
        self._since = self._since or time.monotonic()

    def forget(self) -> None:
        """All have gone back, and make steps again."""
        self._since = None

    @property
    def seconds(self) -> float:
        """For how long a write may be waited for; 0 once one was waited for in vain."""
        return 0.0 if self._is_over else max(LEAST_SECONDS, self._context.link.job.stall_seconds)

    def check(self) -> None:
        """Raises `SaveFailed` where what this worker writes takes longer."""
        if self._saver is None or self._since is None or self._saver.outcome is None:
            return
        waited = min(self._saver.seconds_at_work, time.monotonic() - self._since)
        if waited >= self.seconds:
            self._is_over = True
            raise SaveFailed(
                f"all steps are done, but a checkpoint is not whole: a write to {self._saver.outcome.path} has not "
                f"come back for {waited:.0f} s (stall_seconds). See what holds its place up; where it is only slow, "
                "give the job a greater stall_seconds."
            )
