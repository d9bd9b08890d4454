"""Going on from a checkpoint: which one this worker knows of, and taking one up when a plan says so.

At its start a worker looks where the config (or the job) tells it to; what it finds is in its status, and the
controller, which hears all workers, names one in a plan. What is concluded from it is in core/loading.py. Called by
`initialize` and by resize.py.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.errors import JobFailed, NotFound, UserError
from shoal_protos.training_log import get_logger

from shoal.checkpoint.catalogue import Found, Own, at, highest_generation, resolve, saves
from shoal.checkpoint.failure import NeedsFreshProcess
from shoal.checkpoint.named import has_averages
from shoal.checkpoint.place_marks import host_of
from shoal.checkpoint.restore import (
    fits,
    has_scheduler_of,
    keeps_averages,
    load_blocks,
    load_model,
    load_small_state,
    record_of,
    schedules_that_go_on,
)
from shoal.checkpoint.storage import open_storage
from shoal.core.checkpoint_errors import CheckpointDamaged, NoneReadable, TransientStorageFailure
from shoal.core.loading import Loading, StepZero
from shoal.core.manifest_parts import Lineage, gone_on
from shoal.exchange.hand_out import HandOut
from shoal.exchange.world import World
from shoal.group.group import WorldChanged
from shoal.optim.hyper import without_turn
from shoal.optim.schedules import class_of
from shoal.optim.several import PLUS, schedulers_by_optimizer
from shoal.state.given_values import OtherValues
from shoal.training.context import TrainingContext
from shoal.training.initial_state import agree_on_misses, agree_on_the_start, check_made

FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.5, 15.0
"""Between two looks at a place where no checkpoint can be read: later and later."""
PATIENCE = 0.9
"""The part of `stall_seconds` after which a member says what it waits for in vain: a little later the controller evicts
it, and knows no better reason than that it is late."""

log = get_logger("shoal.checkpoint")


class CheckpointLoading:
    """This worker's knowledge of checkpoints. `known` is in its status."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._config = context.config.checkpoint
        self.known = Loading()
        self.highest_saved = 0
        """The highest generation of any save in `checkpoint.path` when it was last looked into."""
        self.skipped: list[str] = []
        """Why folders newer than the reference are not checkpoints."""
        self.changed = ""
        """What script or config give otherwise than to the run of the checkpoint that was taken up last."""

    # ---- what is there

    @property
    def _resume(self) -> int | str | bool:
        """What to go on from: the job's word goes before the config's."""
        asked = self._context.link.job.resume
        return self._config.resume if asked is None else asked

    def begin(self, publish: Callable[[], None]) -> None:
        """Finds what to go on from, and holds weights back until the loop where the job's may be others. Raises as
        `_find`.
        """
        self._find(publish)
        reference = self.known.reference
        if reference is not None:
            self._context.first_weights.hold_back(f"this job goes on from {reference.path}, at step {reference.step}")
        elif not self._context.link.alone:
            self._context.first_weights.hold_back("with a controller any worker may join a job that trains already")

    def _find(self, publish: Callable[[], None]) -> None:
        """Finds what to go on from, as `look` does, and waits while there is something and none of it can be read: a
        mount may be late, or another version of Shoal on its way. `publish`: says meanwhile why.

        Raises `NoneReadable` where that lasts for `stall_seconds`; alone at once, for then nobody mends it meanwhile.
        """
        link, reasons = self._context.link, list[str]()

        def tell(why: str) -> None:
            self.skipped = [f"this worker waits, and does not begin at step 0: {why}"]
            if reasons[-1:] != [why]:
                log.error("checkpoints_unread", reason=why, waits_seconds=link.job.stall_seconds)
                publish()
            reasons.append(why)

        why = self._look_again(self.look, 1.0, tell)
        if why and (link.alone or not link.stopping):
            raise NoneReadable(why)  # else the job has changed its mind; where it trains, its plan names a checkpoint
        if reasons:
            publish()

    def _look_again(self, look: Callable[[], str], part: float, tell: Callable[[str], None]) -> str:
        """Looks while that returns why it finds nothing, which is told, for a part of `stall_seconds`, or until the job
        has another item for this worker; alone once, for then nothing changes meanwhile. Returns what it did last.
        """
        link, pause, began = self._context.link, FIRST_LOOK_SECONDS, time.monotonic()
        while (why := look()) and not (link.alone or link.stopping):
            if time.monotonic() - began >= part * link.job.stall_seconds:
                break
            tell(why)
            link.pause(pause)
            pause = min(2 * pause, LONGEST_LOOK_SECONDS)
        return why

    def look(self) -> str:
        """Finds what to go on from. Returns why that cannot be told, where there is something that cannot be read, or
        where the job's store knows of something and none is there; else empty.

        Raises `UserError` where a checkpoint is of another model, or was named and is not there, or where other workers
        save to another place; `StorageFailed` where the place cannot be read.
        """
        job, resume, place = self._context.link.job, self._resume, self._config.path
        self.skipped, self._context.found = [], (0, None)
        self.highest_saved = highest_generation(place) if place is not None else 0
        own = Own(job.run, job.opened_generations) if job.opened_generations else None
        try:
            found = resolve(place, resume, self._skip, own, self.known.unreadable)
        except NoneReadable as error:
            self.known.on_found(None)
            return str(error)
        self.known.on_found(self._reference(found) if found is not None else None)
        if place is None:
            return ""
        if found is None and resume == "latest" and job.checkpoint:
            there = open_storage(place).url
            anew = "To begin at step 0 all the same, cancel the job and start it again."
            return f"the job has saved {job.checkpoint}, and {there} has no checkpoint. {anew}"
        elsewhere = self._why_elsewhere(place)
        if elsewhere and not job.checkpoint:
            raise UserError(elsewhere)
        return elsewhere  # what the job has saved may come yet: a mount is late

    def _why_elsewhere(self, place: str) -> str:
        """Why this worker would save to another place than the others; empty where it sees what they have left."""
        link, storage = self._context.link, open_storage(place)
        marks, saved = link.job.checkpoint_marks, link.job.checkpoint.rpartition("/")[2]
        if not marks or {*marks, saved} & storage.list().keys():
            return ""
        return (
            f"worker {link.worker} on {socket.gethostname()} saves checkpoints to {storage.url} and does not see "
            f"{marks[0]} there, which a worker on {host_of(marks[0])} has left in its {storage.url}: they are two "
            "places. Give all workers one that each of them reaches: a shared folder, or a URL."
        )

    def _reference(self, found: Found) -> CheckpointRef:
        """Raises `UserError` where it is of another model."""
        same = fits(found.manifest, self._context.state, self._config.allow, found.path)
        step = found.manifest.step if same else 0
        manifest = found.manifest
        if same:
            self._context.found = (step, _loss_of(found))
        log.info("checkpoint_found", path=found.path, step=found.manifest.step,
                 means="training goes on from it" if same else "its tensors are taken by name")  # fmt: skip
        return CheckpointRef(
            manifest.generation, step, found.path, manifest.data_bytes, manifest.run, manifest.verified
        )

    def _skip(self, sentence: str) -> None:
        log.warning("checkpoint_skipped", reason=sentence)
        self.skipped.append(sentence)

    # ---- taking one up

    def take_up(self, world: World) -> int:
        """All that a plan with a checkpoint asks of this worker; returns the bytes read. Raises `WorldChanged`."""
        recovery, state, context = world.plan.recovery, self._context.state, self._context
        assert recovery is not None
        has_left = (context.is_over and context.left_loop) or context.is_through
        if has_left and recovery.step < max(state.step, state.last_step):
            raise NeedsFreshProcess(
                f"the job goes back to step {recovery.step}, and this script has left its loop at step {state.step}."
            )
        found = self._found(recovery.checkpoint)
        self.known.on_take_up(found.path)
        state.forget_gradients()
        context.done = False
        if fits(found.manifest, state, self._config.allow, found.path):
            return self._restore(found, world)
        if state.originals is None:
            raise NeedsFreshProcess(
                f"the job begins at step 0 with tensors of {found.path}, and this process has trained; start a new one."
            )
        log.info("tensors_taken", path=found.path, what=str(load_model(found.reader(), state, self._config.allow)))
        agree_on_the_start(world, state)
        state.begin_anew(world.kept)
        agree_on_misses(world, state)
        check_made(world, state)
        return found.manifest.data_bytes

    def _found(self, path: str) -> Found:
        """The plan's checkpoint. Where its place fails or has none at all, it is away: this waits for it, and for as
        long as the other members and the controller do. Raises `WorldChanged` where another plan is on its way.
        """
        link, found = self._context.link, list[Found]()

        def tell(why: str) -> None:
            log.error("checkpoints_away", path=path, reason=why)

        why = self._look_again(lambda: self._away(path, found), PATIENCE, tell)
        if found:
            return found[0]
        if link.stopping and not link.alone:
            raise WorldChanged(f"another plan is on its way, and {path} is not there")
        raise CheckpointDamaged(f"{path} is gone: {why}.")

    def _away(self, path: str, found: list[Found]) -> str:
        """Why the place is thought to be away: it fails, or has no checkpoint at all. Empty: it is `found`."""
        place = path.rstrip("/").rpartition("/")[0] or "/"
        try:
            with suppress(NotFound):
                found.append(at(path, self._skip))
                return ""
            if not saves(open_storage(place)):
                return f"{place} has no checkpoint at all"
            try:
                found.append(at(path, self._skip))  # the place may have come back since the first look
                return ""
            except NotFound as error:
                raise CheckpointDamaged(f"{path} is gone: {error}") from error
        except TransientStorageFailure as error:
            return str(error).rstrip(".")

    def _restore(self, found: Found, world: World) -> int:
        """Everything as it was at the checkpoint's step: owners read their blocks and hand out what others need."""
        state, owned, recovery = self._context.state, world.owned, world.plan.recovery
        assert recovery is not None
        reader = found.reader(state.layout.part.coordinate)
        if self._context.loop_has_begun:  # else nothing more is read
            self._warn_of_other_data(found)
        self._warn_of_another_scheduler(found)
        self._tell_of_averages(found)
        self._tell_of_other_values(found, load_small_state(reader, state, state.registered))
        self._context.has_saved_turn = bool(without_turn(state.optimizer))
        state.lineage = self._lineage(found, world.plan.generation)
        load_blocks(reader, state, owned)
        self._context.faults.at("restore", state.step)
        HandOut(world.group, state.weights, world.traffic, world.traffic.brought(recovery.stale)).finish()
        state.current = state.everything
        log.info("restored", path=found.path, step=state.step, bytes=reader.bytes_read)
        return reader.bytes_read

    def _lineage(self, found: Found, began: int) -> Lineage:
        """Another job's saves are never this one's to delete, though it goes on from one of them."""
        manifest = found.manifest
        if manifest.job != self._context.link.job.name:
            return ()
        return gone_on(manifest.run, manifest.generation, manifest.step, manifest.lineage, began)

    def _warn_of_other_data(self, found: Found) -> None:
        """Other lanes, batches or seeds than the checkpoint's: training goes on, with other samples."""
        theirs, ours = found.manifest.data, self._context.data_position
        if theirs is not None and theirs != ours:
            fields = [name for name in type(ours).model_fields if getattr(ours, name) != getattr(theirs, name)]
            log.warning("other_data_order", checkpoint=found.path, differs=fields,
                        means="the next samples are not those that the checkpoint's run would have read")  # fmt: skip

    def _tell_of_other_values(self, found: Found, outcome: OtherValues | None) -> None:
        self.changed = ""
        if outcome is None:
            means = "it does not say what its run was given, so rates and the like stay as they were saved"
            log.warning("given_values_unknown", checkpoint=found.path, means=means)
        elif str(outcome):
            self.changed = str(outcome)
            log.warning("other_values", checkpoint=found.path, means=self.changed)

    def _warn_of_another_scheduler(self, found: Found) -> None:
        """The script has another schedule than the checkpoint's run had: it begins anew, with the rates as saved."""
        if not has_scheduler_of(found.manifest, self._context.state):
            state, saved = self._context.state, found.manifest.scheduler_class or "none"
            goes_on = schedules_that_go_on(found.manifest, state)
            own = schedulers_by_optimizer(state.scheduler).items()
            anew = PLUS.join(class_of(one) for number, one in own if number not in goes_on)
            kept = "the rates of optimizers without a schedule stay" if goes_on else "the rates stay"
            means = f"{anew} begins anew, with the rates as" if anew else f"{kept} as"
            means += " they were saved" + ("; the others go on" if anew and goes_on else "")
            log.warning("other_scheduler", checkpoint=found.path, saved=saved, means=means)

    def _tell_of_averages(self, found: Found) -> None:
        """Only the checkpoint has averages, or only this job."""
        saved, rule = has_averages(found.manifest), self._context.config.average
        if saved and not keeps_averages(rule, found.manifest):
            own = "this job keeps none" if rule is None else f"this job begins its own after step {rule.from_step}"
            means = f"{own} (`shoal.average`), so the checkpoint's averages are left out"
            log.warning("averages_left_out", checkpoint=found.path, means=means)
        elif rule is not None and not saved and rule.is_past(found.manifest.step):
            means = "it has no averages of weights; they begin with the weights of the next step that is averaged"
            log.warning("averages_begin", checkpoint=found.path, means=means)

    def on_unreadable(self, path: str, error: CheckpointDamaged) -> None:
        """The plan's checkpoint cannot be read: say so, and look for the one before. Raises `JobFailed` where there is
        none to be taken instead.
        """
        log.error("checkpoint_damaged", path=path, reason=str(error))
        if self.known.is_the_only_one(path, self._resume):
            raise JobFailed(f"{error} It was named by `resume`; name another one.") from error
        self.known.on_unreadable(path, str(error))
        self.look()

    def check_initial(self) -> None:
        """Raises where this process cannot begin at step 0 any more: `JobFailed` where no other can either."""
        step_zero = self.known.step_zero(has_trained=self._context.state.originals is None)
        if step_zero is StepZero.UNREADABLE:
            raise JobFailed(
                f"{max(self.known.unreadable)} cannot be read, and there is no other checkpoint to resume from. To "
                "begin at step 0, remove it or set `resume: false`."
            )
        if step_zero is StepZero.WITH_A_FRESH_PROCESS:
            raise NeedsFreshProcess("the job begins at step 0, and this process has trained before; start a new one.")


def _loss_of(found: Found) -> float | None:
    """Of its step; None where it has none. A record that cannot be read is refused where it is taken up."""
    try:
        record = record_of(found.manifest, found.path)
    except CheckpointDamaged:
        return None
    return record.loss if record is not None else None
