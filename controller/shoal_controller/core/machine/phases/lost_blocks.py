"""Blocks without a living copy: waiting for whoever may still have one, and starting anew when nobody can.

It is decided when every process that may hold such a block is confirmed dead, at the latest after `stall_seconds`.
Until then all keep what they have: a thawed sole holder saves the day. Then the newest checkpoint is the other source
of lost blocks, and all go back to it (`Recovery.checkpoint`). Without one the job begins anew at step 0, in processes
that have not trained: a launcher starts them, else `shoal worker` does, or they have come already.
"""

from __future__ import annotations

from shoal_protos.messages import Ending
from shoal_protos.plan import WorkerId
from shoal_protos.runs import NO_BLOCKS, Runs
from shoal_protos.text import plural

from shoal_controller.core.machine.durable import Anew, Standing, WorkerRecord
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.job import Attempt
from shoal_controller.core.machine.phases import checkpoints, corruption, ending, failures, fencing, places, progress
from shoal_controller.core.machine.phases.next_message import send_if_due
from shoal_controller.core.machine.phases.progress import known_step
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.turn import Turn


def stall(turn: Turn, attempt: Attempt) -> None:
    """The planner has found blocks of which no inventory has a copy."""
    sentence, holders = _sentence(turn, attempt.lost_blocks), _possible_holders(turn, attempt)
    turn.enter(Phase.STALLED, f"{sentence}{fencing.advice_if_gone(turn, holders)}")
    turn.note(EventKind.STALLED, sentence, blocks=len(attempt.lost_blocks))


def may_come_back(turn: Turn, attempt: Attempt) -> bool:
    """Whether somebody may still have a copy, for at most `stall_seconds`. Of a world that this controller never heard
    whole there may be others than the store knows: whoever lives comes back by itself.
    """
    members = turn.world.members if turn.world is not None else ()
    if fencing.may_others_come(turn) and any(turn.process(member.worker) is None for member in members):
        return True
    return bool(_possible_holders(turn, attempt)) and turn.now - attempt.since <= turn.spec.stall_seconds


def give_up(turn: Turn, attempt: Attempt) -> bool:
    """End the job, or begin it anew, where nothing else is left. Returns whether whoever is left has to go back to the
    newest checkpoint instead.
    """
    if _all_done(turn):
        ending.succeed(turn)
        return False
    no_more = _why_no_more(_possible_holders(turn, attempt), turn.now - attempt.since)
    why = f"{_sentence(turn, attempt.lost_blocks)}; {no_more}"
    progress.count_resize(turn, attempt.reason, "failed")
    found = checkpoints.latest(turn.durable)
    if found is not None:
        turn.keep(reason=why)
        return True
    start_anew(turn, why)
    if not turn.spec.traits.starts and not turn.durable.phase.is_over:
        turn.keep(anew=Anew(turn.now, why))
    return False


def give_up_waiting(turn: Turn, anew: Anew, ready: int) -> None:
    """End a job that begins anew, and to which too few workers come."""
    least, seconds = turn.durable.bounds.least, turn.spec.stall_seconds
    if ready < least and turn.now - max(anew.since, turn.job.started_at) > seconds:
        came = f"{ready} of {plural(least, 'worker')} came to begin anew within {seconds:g} s (stall_seconds)"
        ending.fail(turn, f"{anew.why}; {came}. Set checkpoint.path or more mirrors.")


def _sentence(turn: Turn, blocks: Runs) -> str:
    spans = ", ".join(f"{a}" if b == a + 1 else f"{a} to {b - 1}" for a, b in blocks.spans[:8])
    more = f" and {len(blocks.spans) - 8} more runs" if len(blocks.spans) > 8 else ""
    made_of = turn.durable.description
    homes = made_of.homes if made_of is not None else ()
    lost = [turn.durable.cell.named(coordinate) for coordinate, home in enumerate(homes) if home & blocks]
    where = f", at home at {plural(len(lost), 'coordinate')}, {lost[0]} first" if len(lost) > 1 else ""
    where = f", at home at {lost[0]}" if len(lost) == 1 else where
    count = made_of.blocks if made_of is not None else 0
    return f"no living copy of {len(blocks)} of {count} blocks ({spans}{more}){where}"


def _why_no_more(holders: list[WorkerId], waited: float) -> str:
    if holders:
        return f"{', '.join(holders)} did not come back within {waited:.0f} s"
    return "every process that held them is dead"


def _possible_holders(turn: Turn, attempt: Attempt) -> list[WorkerId]:
    """Who may hold such a block, has not reported what it holds, and is not known to be dead."""
    roster = turn.durable.roster.values()
    return [record.worker for record in roster if _unknown(record, attempt) and _might_hold(turn, record, attempt)]


def _unknown(record: WorkerRecord, attempt: Attempt) -> bool:
    """Evicted (perhaps after it had answered), unheard of since the controller was started, or yet to answer."""
    alive = record.standing is not Standing.DEAD and record.ending is None and bool(record.incarnation)
    return alive and record.worker not in attempt.respondents


def _might_hold(turn: Turn, record: WorkerRecord, attempt: Attempt) -> bool:
    """What a worker kept by any world it may have been in, or said that it holds."""
    worlds = [plan for plan in (turn.world, *turn.durable.planned) if plan is not None]
    ranks = [(plan, plan.rank_of(record.worker, record.incarnation)) for plan in worlds]
    kept = [plan.held_by(rank, plan.boundaries) for plan, rank in ranks if rank is not None]
    process = turn.process(record.worker)
    held = process.status.holds if process is not None else NO_BLOCKS
    unknown = process is None and not kept  # of a world before the current one: its blocks are not known any more
    return unknown or any(part & attempt.lost_blocks for part in (held, *kept))


def _all_done(turn: Turn) -> bool:
    """Whether the job has its digests and all who live are done: a death after the last step still ends well."""
    members = [process for process in turn.serving() if process.status.generation > 0]
    return bool(turn.durable.fingerprint) and all(process.status.done for process in members)


def start_anew(turn: Turn, why: str) -> None:
    """Nobody is left: every process of a world ends, and others begin, from the newest checkpoint or step 0."""
    failures.on_world_lost(turn)
    if turn.durable.phase.is_over:
        return
    durable, found = turn.durable, checkpoints.latest(turn.durable)
    step = found.step if found is not None else 0
    shown = max(durable.step, known_step(turn))
    lost_steps = max(0, shown - step)
    corruption.give_up_from(turn, shown)
    turn.enter(Phase.STALLED, why)
    turn.keep(
        current=None,
        planned=(),
        first_valid_generation=durable.last_generation + 1,
        step=step,
        fingerprint="",
        loss=None,
        final_drain=False,
    )
    checkpoints.on_return(turn, step)
    turn.change(attempt=None, goal=None, ready_since=None)
    when = "" if turn.spec.traits.starts else " when workers come"
    turn.note(
        EventKind.ANEW,
        f"{why}; starting again from step {step}{when}, losing {plural(lost_steps, 'step')}",
        lost_steps=lost_steps,
    )
    progress.return_to(turn, step)
    progress.count_lost_steps(turn, lost_steps)
    for record in tuple(turn.durable.roster.values()):
        process = turn.process(record.worker)
        joiner = process.status.generation == 0 if process is not None else not record.incarnation
        if record.ending is not None or (joiner and record.standing is Standing.HERE):
            continue
        how = Ending.REPLACED if record.launched or found is None else Ending.START_OVER
        needs = "" if record.launched or found is not None else "; the job begins anew, which takes a fresh process"
        reason = (record.why if record.standing is Standing.DEAD else "") or f"{why}{needs}"
        turn.mark(record.worker, ending=how, why=reason)
        send_if_due(turn, record.worker)
        if record.launched and record.standing is not Standing.DEAD:
            turn.expect_end(record.worker)
            places.kill(turn, record.worker)
