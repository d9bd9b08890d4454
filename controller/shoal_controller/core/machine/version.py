"""The version of a job: a number that grows with whatever is asked of it, and with nothing that merely happens to it.

Its size, whether it pauses, whether it is to end or is over: two people who change a job at a time notice each other by
this number (`If-Match`). Steps, losses and workers that come and go leave it as it is, or nobody could ever change a
job that trains. Called by `machine.step` once for each batch. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal_controller.core.machine.durable import Durable
from shoal_controller.core.machine.events import Event, OperatorRequest
from shoal_controller.core.machine.spec import Phase, WorkerBounds
from shoal_controller.core.machine.turn import Turn


def count_version(turn: Turn, events: Sequence[Event]) -> None:
    """One more where this batch has changed what is asked of the job."""
    before, after = turn.before.durable, turn.durable
    if before is after:
        return
    carried_out = any(isinstance(event, OperatorRequest) for event in events)
    if carried_out or _asked_of(before) != _asked_of(after):
        turn.keep(version=before.version + 1)


def _asked_of(durable: Durable) -> tuple[int, WorkerBounds, bool, bool, Phase | None]:
    over = durable.phase if durable.phase.is_over else None
    return durable.wanted, durable.bounds, durable.paused, durable.stopping, over
