"""The catalogue: which checkpoints the job's workers have reported, and which one a world may begin from.

A worker's status names the newest whole one that it knows of; the catalogue remembers them over every worker's and the
controller's death. One that a worker could not read is never named again. Only recorded here; `recovery` and
`lost_blocks` conclude.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_protos.checkpoint import CheckpointRef, SaveOutcome, SaveReport, UnreadableCheckpoint, superfluous
from shoal_protos.messages import Status
from shoal_protos.plan import WorkerId
from shoal_protos.runs import Runs

from shoal_controller.core.machine.durable import Durable, SaveRequest
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.job import Attempt
from shoal_controller.core.machine.phases import claims
from shoal_controller.core.machine.phases.progress import known_step
from shoal_controller.core.machine.turn import Turn

REMEMBERED = 512
"""Checkpoints in the catalogue, and paths that cannot be read."""
MOST_SPANS = 1_000
"""Most gaps between opened generations; the oldest gaps are forgotten beyond it."""


def latest(durable: Durable) -> CheckpointRef | None:
    """What a world may begin from. Where copies differ it is one that is known to be sound, if any can be read."""
    sound = [one for one in durable.checkpoints if one.verified] if durable.corruption.restoring else []
    return max(sound or durable.checkpoints, default=None)


def _is_given_up(durable: Durable, reference: CheckpointRef) -> bool:
    """Whether all have gone back behind it."""
    back = durable.restored_from
    return back is not None and back < reference and reference.generation < durable.restored_in


def give_up_after(turn: Turn, path: str, generation: int) -> None:
    """All begin at that checkpoint in this generation: what earlier ones have saved after it counts no more."""
    back = next((one for one in turn.durable.checkpoints if one.path == path), None)
    turn.keep(restored_from=back, restored_in=generation)
    turn.keep(checkpoints=tuple(one for one in turn.durable.checkpoints if not _is_given_up(turn.durable, one)))


def on_status(turn: Turn, worker: WorkerId, status: Status, before: Status) -> None:
    """A worker says which one it knows of, and which number the next generation must exceed. `before`: what it said
    last.
    """
    _exceed(turn, status.highest_saved)
    claimed = status.checkpoint
    if claimed is None or claimed.path in turn.durable.unreadable_checkpoints or _is_given_up(turn.durable, claimed):
        return
    saved_at = turn.now if _was_just_saved(claimed, before) else None
    known = next((one for one in turn.durable.checkpoints if one.path == claimed.path), None)
    if known is not None:
        _learn_more(turn, worker, known, replace(claimed, saved_at=saved_at))
        return
    if why := claims.false_checkpoint(turn, worker, claimed):
        claims.refuse_claim(turn, worker, why, "checkpoints")
        return
    _keep(turn, (*turn.durable.checkpoints, replace(claimed, saved_at=saved_at)))
    _exceed(turn, claimed.generation)
    if all(one.path != claimed.path for one in turn.durable.checkpoints):
        return  # retention deletes it; whoever has no part in saves hears of no newer one, and tells of it again
    if saved_at is not None:
        turn.keep_figures(turn.job.figures.checkpointed(saved_at))
    if status.generation:
        _note_saved(turn, worker, claimed)
    else:
        _note(turn, EventKind.CHECKPOINT_FOUND, worker, claimed)


def _learn_more(turn: Turn, worker: WorkerId, known: CheckpointRef, claimed: CheckpointRef) -> None:
    """Of one that is in the catalogue. Who found it in the folder may have told of it before who has just saved it."""
    saved = known.saved_at is None and claimed.saved_at is not None
    better = replace(
        known,
        bytes=max(known.bytes, claimed.bytes),
        verified=known.verified or claimed.verified,
        saved_at=claimed.saved_at if saved else known.saved_at,
    )
    if saved or (better.bytes, better.verified) != (known.bytes, known.verified):
        _keep(turn, (*(one for one in turn.durable.checkpoints if one is not known), better))
    if saved and claimed.saved_at is not None:
        turn.keep_figures(turn.job.figures.checkpointed(claimed.saved_at))
        _note_saved(turn, worker, claimed)


def _note_saved(turn: Turn, worker: WorkerId, saved: CheckpointRef) -> None:
    """A member says so; whoever asked for it has it."""
    _note(turn, EventKind.CHECKPOINT_SAVED, worker, saved)
    turn.keep(failed_save="")
    _close_request(turn, saved.step)


def _note(turn: Turn, kind: EventKind, worker: WorkerId, one: CheckpointRef) -> None:
    verb = "saved" if kind is EventKind.CHECKPOINT_SAVED else "found"
    foreign = one.run and one.run != turn.spec.run
    whose = f"; run {one.run} has saved it, this is run {turn.spec.run}" if foreign else ""
    sentence = f"a checkpoint of step {one.step} was {verb} at {one.path}{whose}"
    turn.note(kind, sentence, worker, step=one.step, path=one.path, run=one.run)


def _was_just_saved(claimed: CheckpointRef, before: Status) -> bool:
    """Whether it was saved since the worker that tells of it was last heard. One that a worker found at its start, or
    instead of one that it could not read, or that was saved while no controller was there, may be of any age.
    """
    known = before.checkpoint
    return before.generation > 0 and (
        known is None or (known.generation, known.step) < (claimed.generation, claimed.step)
    )


def _exceed(turn: Turn, generation: int) -> None:
    """The next generation comes after this one: what it saves is newer than all that lies there."""
    if turn.durable.last_generation < generation <= turn.durable.last_generation + claims.GREATEST_LEAP:
        turn.keep(last_generation=generation)


def _keep(turn: Turn, found: tuple[CheckpointRef, ...]) -> None:
    """Newest first, without those that the workers' retention deletes."""
    newest = sorted(found, reverse=True)[:REMEMBERED]
    description = turn.durable.description
    if description is not None and description.keep:
        gone = set(superfluous([one.step for one in newest], description.keep, description.keep_every))
        newest = [one for place, one in enumerate(newest) if place not in gone]
    turn.keep(checkpoints=tuple(newest))


def request_save(turn: Turn) -> None:
    """Ask the world for one. Workers act on a number once, so none is given twice, in whichever controller's life."""
    number = turn.durable.saves_requested + 1
    turn.keep(saves_requested=number, save=SaveRequest(number, known_step(turn)))


def on_restart(turn: Turn) -> None:
    """What was asked for is asked for again, by a number of its own: it may have failed while nobody was there to hear
    of it.
    """
    if turn.durable.save is not None:
        number = turn.durable.saves_requested + 1
        turn.keep(saves_requested=number, save=replace(turn.durable.save, number=number))


def _close_request(turn: Turn, step: int) -> None:
    """A save of that step was made, or failed: what was asked for before is done."""
    request = turn.durable.save
    if request is not None and step >= request.step:
        turn.keep(save=None)


def on_return(turn: Turn, step: int) -> None:
    """All begin at an earlier step: a checkpoint of that one or a later one is what was asked for, and a save that
    failed was of a step that is given up.
    """
    turn.keep(failed_save="")
    request = turn.durable.save
    if request is not None and request.step > step:
        turn.keep(save=replace(request, step=step))


def unreadable(turn: Turn, attempt: Attempt) -> tuple[WorkerId, UnreadableCheckpoint] | None:
    """Which member could not read the checkpoint of the plan under way, and what it says of it."""
    plan = attempt.plan
    path = plan.recovery.checkpoint if plan is not None and plan.recovery is not None else ""
    for member in plan.members if plan is not None and path else ():
        process = turn.process(member.worker)
        found = process.status.unreadable_checkpoint if process is not None else None
        if found is not None and found.path == path:
            return member.worker, found
    return None


def drop_unreadable(turn: Turn, worker: WorkerId, found: UnreadableCheckpoint) -> None:
    """It is never named again; the one before it is."""
    turn.keep(
        checkpoints=tuple(one for one in turn.durable.checkpoints if one.path != found.path),
        unreadable_checkpoints=(*turn.durable.unreadable_checkpoints, found.path)[-REMEMBERED:],
    )
    turn.note(EventKind.CHECKPOINT_DAMAGED, found.sentence, worker, path=found.path)
    _see_the_one_before(turn)


def _see_the_one_before(turn: Turn) -> None:
    """What workers have found instead of it."""
    for process in tuple(turn.serving()):
        on_status(turn, process.worker, process.status, process.status)


def on_opened(turn: Turn, generation: int) -> None:
    """This store knows the generation: its checkpoints are the job's."""
    known = turn.durable.opened_generations | Runs(((generation, generation + 1),))
    spans = known.spans
    if len(spans) > MOST_SPANS:
        known = Runs(((spans[0][0], spans[-MOST_SPANS][1]), *spans[1 - MOST_SPANS :]))
    turn.keep(opened_generations=known)


# ---- how saves went


def on_telemetry(turn: Turn, worker: WorkerId) -> None:
    """Saves that a worker led and has not reported before; what folders it skipped at its start, and which values are
    others than a checkpoint's run was given, once for all.
    """
    process = turn.job.processes[worker]
    sentence = process.telemetry.skipped_folders
    if sentence and sentence != turn.job.skipped_folders and turn.durable.current is None:
        turn.change(skipped_folders=sentence)
        turn.note(EventKind.CHECKPOINT_PASSED_OVER, sentence, worker)
    changed = process.telemetry.changed_values
    if changed and changed != turn.job.changed_values:
        turn.change(changed_values=changed)
        turn.note(EventKind.OTHER_VALUES, changed, worker)
    record = turn.record(worker)
    news = [saved for saved in process.telemetry.saves if saved.number > record.saves_told]
    if news:
        turn.enlist(replace(record, saves_told=news[-1].number))
    for saved in news:
        _record_save(turn, worker, saved)
        if saved.outcome is SaveOutcome.FAILED:
            _close_request(turn, saved.step)


def _record_save(turn: Turn, worker: WorkerId, saved: SaveReport) -> None:
    match saved.outcome:
        case SaveOutcome.DONE:
            turn.keep(failed_save="")
            turn.count("shoal_checkpoint_bytes_total", saved.bytes)
            for phase in ("copy", "write", "commit"):
                turn.observe("shoal_checkpoint_seconds", getattr(saved, f"{phase}_seconds"), phase=phase)
        case SaveOutcome.FAILED:
            turn.count("shoal_checkpoint_failures_total")
            sentence = f"the checkpoint of step {saved.step} failed: {saved.why}"
            turn.note(EventKind.CHECKPOINT_FAILED, sentence, worker, step=saved.step)
            turn.change(failed_save_step=saved.step)
            if saved.step <= known_step(turn):  # else all have gone back behind it before anybody told of it
                turn.keep(failed_save=sentence)
        case SaveOutcome.SKIPPED:
            turn.count("shoal_checkpoints_skipped_total")
            sentence = f"no checkpoint of step {saved.step}: {saved.why}"
            turn.note(EventKind.CHECKPOINT_SKIPPED, sentence, worker, step=saved.step)
