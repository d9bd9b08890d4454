"""Workers whose machine or pod is to go: drained within what is left, and kept where it does not go after all.

● Several signals for one worker are one drain, with the shortest of their graces; one that comes after the others were
taken back counts alone. A drain is cancelled only while every
world that may train has the worker: what a plan without it has begun is not taken back, its replacement goes on.
"""

from __future__ import annotations

from shoal_controller.core.machine.durable import Leaving, WorkerRecord
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.events import Endangered, Preempted, Spared
from shoal_controller.core.machine.phases import scaling
from shoal_controller.core.machine.phases.next_message import is_member
from shoal_controller.core.machine.turn import Turn


def on_preempted(turn: Turn, event: Preempted) -> None:
    """A worker is to go, whatever anybody wishes: even the last one is not refused its drain."""
    record = turn.durable.roster.get(event.worker)
    if record is None or not record.serves:
        return
    turn.mark(event.worker, spared=False)
    if not record.leaving:
        turn.count("shoal_preemptions_total", signal=event.notice.value)
        scaling.drain(turn, event.worker, Leaving.PREEMPTION, event.grace_seconds, event.why)
        return
    at = turn.now + event.grace_seconds
    if record.spared:
        turn.mark(event.worker, leaving_because=event.why)
    if record.spared or at < record.leaves_at:
        turn.mark(event.worker, leaves_at=at, grace_seconds=event.grace_seconds)


def on_spared(turn: Turn, event: Spared) -> None:
    """What announced its end is gone. `settle` lets it stay, as soon as that is possible."""
    record = turn.durable.roster.get(event.worker)
    if record is not None and record.serves and record.leaving is Leaving.PREEMPTION:
        turn.mark(event.worker, spared=True, leaving_because=event.why)


def on_endangered(turn: Turn, event: Endangered) -> None:
    """A hint: nobody is drained for it, and `scaling` asks for a spare."""
    record = turn.durable.roster.get(event.worker)
    if record is None or not record.serves or record.endangered == bool(event.why):
        return
    turn.mark(event.worker, endangered=bool(event.why))
    if event.why:
        turn.note(
            EventKind.PENDING, f"a spare is asked for: worker {event.worker} may have to go: {event.why}", event.worker
        )


def settle(turn: Turn) -> None:
    """Cancel the drains whose reason is gone."""
    spared = [record for record in turn.durable.roster.values() if record.spared and record.leaving and record.serves]
    for record in spared:
        if _can_stay(turn, record):
            why = record.leaving_because
            turn.mark(record.worker, leaving=Leaving.NO, leaves_at=0.0, leaving_because="", spared=False)
            turn.note(EventKind.STAYS, f"worker {record.worker} is not drained after all: {why}", record.worker)


def _can_stay(turn: Turn, record: WorkerRecord) -> bool:
    worlds = [plan for plan in (turn.durable.current, *turn.durable.planned) if plan is not None]
    return turn.job.attempt is None and bool(worlds) and all(is_member(plan, record.worker) for plan in worlds)
