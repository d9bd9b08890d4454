"""Who is asked to stop for a recovery, and whether every world has: [Note: no two worlds] in `may_still_train`."""

from __future__ import annotations

from shoal_protos.plan import Plan, WorkerId

from shoal_controller.core.machine.durable import Standing, WorkerRecord
from shoal_controller.core.machine.job import Attempt
from shoal_controller.core.machine.phases.next_message import inventory_for, is_member, may_hold
from shoal_controller.core.machine.phases.older_store import is_succeeded
from shoal_controller.core.machine.turn import Turn


def fenced_workers(turn: Turn) -> list[WorkerId]:
    """Who is to stop and tell what it holds: alive as far as is known, and it may hold something."""
    return [worker for worker, record in turn.durable.roster.items() if record.serves and _is_asked(turn, record)]


def _is_asked(turn: Turn, record: WorkerRecord) -> bool:
    """Whether a worker that serves is."""
    attempt = turn.job.attempt
    assert attempt is not None
    if attempt.start:
        return record.worker in attempt.starters and bool(record.incarnation)
    return bool(record.incarnation) and _may_hold(turn, record.worker)


def missing_answers(turn: Turn, attempt: Attempt) -> list[WorkerId]:
    """Whose inventory is waited for. A joiner of a planned change stops too, but holds nothing worth a wait."""
    number = attempt.generation
    silent = (
        record
        for worker, record in turn.durable.roster.items()
        if record.serves and inventory_for(turn.process(worker), number) is None
    )
    waiting = [record for record in silent if _is_asked(turn, record) and not record.quarantined]
    return [record.worker for record in waiting if not _holds_nothing(turn, record.worker)]


def _holds_nothing(turn: Turn, worker: WorkerId) -> bool:
    world, process = turn.world, turn.process(worker)
    return world is not None and process is not None and not process.status.generation and not is_member(world, worker)


def _may_hold(turn: Turn, worker: WorkerId) -> bool:
    process = turn.process(worker)
    if process is None:  # not heard of since the controller started
        return any(is_member(plan, worker) for plan in worlds(turn) if not is_succeeded(turn, plan))
    return may_hold(turn.durable, process)


def worlds(turn: Turn) -> list[Plan]:
    """Every generation that may still train: the current one, and each planned one that is not void."""
    durable = turn.durable
    return [plan for plan in (durable.current, *durable.planned) if plan is not None]


def may_still_train(turn: Turn) -> Plan | None:
    """● [Note: no two worlds] The first world that may still train, None where all have stopped.

    A vote needs all members, so a world has stopped when one living member of it has answered PREPARE, or when all of
    its members are confirmed dead, or when a living member of a later one has answered. No generation opens before.
    """
    return next((plan for plan in worlds(turn) if not _has_stopped(turn, plan)), None)


def _has_stopped(turn: Turn, plan: Plan) -> bool:
    attempt = turn.job.attempt
    assert attempt is not None
    members = [member.worker for member in plan.members]
    if any(inventory_for(turn.process(worker), attempt.generation) is not None for worker in members):
        return True
    if all(is_dead(turn, worker) for worker in members):
        return True
    answers = [inventory_for(process, attempt.generation) for process in turn.serving()]
    later = any(answer is not None and answer.generation > plan.generation for answer in answers)
    return later and is_succeeded(turn, plan)


def is_dead(turn: Turn, worker: WorkerId) -> bool:
    record = turn.durable.roster.get(worker)
    return record is None or record.standing is Standing.DEAD
