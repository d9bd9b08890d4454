"""Who is asked to stop for a recovery, and whether every world has: [Note: no two worlds] in `may_still_train`."""

from __future__ import annotations

from shoal_protos.plan import Plan, WorkerId

from shoal_controller.core.machine.durable import Standing
from shoal_controller.core.machine.job import Attempt
from shoal_controller.core.machine.phases.next_message import inventory_for, is_member, may_hold
from shoal_controller.core.machine.turn import Turn


def fenced_workers(turn: Turn) -> list[WorkerId]:
    """Who is to stop and tell what it holds: alive as far as is known, and it may hold something."""
    attempt, durable = turn.job.attempt, turn.durable
    assert attempt is not None
    serving = [record for record in durable.roster.values() if record.serves and record.incarnation]
    if attempt.start:
        return [record.worker for record in serving if record.worker in attempt.starters]
    return [record.worker for record in serving if _may_hold(turn, record.worker)]


def missing_answers(turn: Turn, attempt: Attempt) -> list[WorkerId]:
    """Whose inventory is waited for. A joiner of a planned change stops too, but holds nothing worth a wait."""
    waiting = (
        worker for worker in fenced_workers(turn) if inventory_for(turn.process(worker), attempt.generation) is None
    )
    return [worker for worker in waiting if not turn.record(worker).quarantined and not _holds_nothing(turn, worker)]


def _holds_nothing(turn: Turn, worker: WorkerId) -> bool:
    world, process = turn.world, turn.process(worker)
    return world is not None and process is not None and not process.status.generation and not is_member(world, worker)


def _may_hold(turn: Turn, worker: WorkerId) -> bool:
    process = turn.process(worker)
    if process is None:  # not heard of since the controller started
        return any(is_member(plan, worker) for plan in worlds(turn))
    return may_hold(turn.durable, process)


def worlds(turn: Turn) -> list[Plan]:
    """Every generation that may still train: the current one, and each planned one that is not void."""
    durable = turn.durable
    return [plan for plan in (durable.current, *durable.planned) if plan is not None]


def may_still_train(turn: Turn) -> Plan | None:
    """● [Note: no two worlds] The first world that may still train, None where all have stopped.

    A vote needs all members, so a world has stopped when one living member of it has answered PREPARE, or when all of
    its members are confirmed dead. No generation opens before.
    """
    return next((plan for plan in worlds(turn) if not _has_stopped(turn, plan)), None)


def _has_stopped(turn: Turn, plan: Plan) -> bool:
    attempt = turn.job.attempt
    assert attempt is not None
    members = [member.worker for member in plan.members]
    if any(inventory_for(turn.process(worker), attempt.generation) is not None for worker in members):
        return True
    return all(is_dead(turn, worker) for worker in members)


def is_dead(turn: Turn, worker: WorkerId) -> bool:
    record = turn.durable.roster.get(worker)
    return record is None or record.standing is Standing.DEAD
