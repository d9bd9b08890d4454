"""The roster's own rules: ids are never used twice, its length is bounded, and whoever is to end is waited for."""

from __future__ import annotations

from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.durable import Standing
from shoal_controller.core.machine.turn import Turn

REMEMBERED = 256
"""How many workers that are gone stay in the roster."""


def unused_id(turn: Turn) -> WorkerId:
    """The next id that no process of this job has ever had."""
    number = turn.durable.next_id
    while f"w{number}" in turn.durable.roster:
        number += 1
    turn.keep(next_id=number + 1)
    return f"w{number}"


def forget_the_oldest(turn: Turn) -> None:
    """The roster is bounded: of those that are gone for good, the oldest are forgotten."""
    worlds = [plan for plan in (turn.world, *turn.durable.planned) if plan is not None]
    kept = {member.worker for plan in worlds for member in plan.members}
    gone = [
        record.worker
        for record in turn.durable.roster.values()
        if (record.ending is not None or record.standing is Standing.DEAD) and record.worker not in kept
    ]
    for worker in gone[: max(0, len(gone) - REMEMBERED)]:
        turn.keep(roster={name: record for name, record in turn.durable.roster.items() if name != worker})
        turn.keep(ending_since={name: at for name, at in turn.durable.ending_since.items() if name != worker})
        turn.change(
            processes={name: one for name, one in turn.job.processes.items() if name != worker},
            probed_at={name: at for name, at in turn.job.probed_at.items() if name != worker},
        )


# ---- processes that are to end


def expect_end(turn: Turn, worker: WorkerId) -> None:
    """A process of the launcher's is to end by itself, or it is killed."""
    turn.keep(ending_since={**turn.durable.ending_since, worker: turn.now})


def forget_ending(turn: Turn, worker: WorkerId) -> None:
    """Its process is gone: nobody waits for that any more."""
    if worker in turn.durable.ending_since:
        turn.keep(ending_since={name: at for name, at in turn.durable.ending_since.items() if name != worker})
