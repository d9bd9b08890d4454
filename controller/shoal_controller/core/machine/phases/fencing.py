"""Which worlds may still train, and which generation numbers are taken: [Note: no two worlds] in `may_still_train`.

For a recovery workers are asked to stop, and no generation opens before every world has stopped.

A store may have been restored from an older state. A worker that is in generation 12 proves to a controller that has
forgotten it that every generation before is over: a world begins only when the one before has stopped. So members of
those are not waited for, and no number is given that the living have gone beyond. The claims of a worker about itself
are bounded by `claims.py`.
"""

from __future__ import annotations

from shoal_protos.messages import Hello
from shoal_protos.plan import Plan, WorkerId

from shoal_controller.core.machine.durable import Standing, WorkerRecord
from shoal_controller.core.machine.job import Attempt
from shoal_controller.core.machine.phases import failure_detector
from shoal_controller.core.machine.phases.next_message import inventory_for, is_member, may_hold
from shoal_controller.core.machine.turn import Turn


def fenced_workers(turn: Turn) -> list[WorkerId]:
    """The workers that are to stop and tell what they hold: alive as far as is known, and they may hold something."""
    return [worker for worker, record in turn.durable.roster.items() if record.serves and _is_asked(turn, record)]


def _is_asked(turn: Turn, record: WorkerRecord) -> bool:
    """Whether a worker that serves is."""
    attempt = turn.job.attempt
    assert attempt is not None
    if attempt.start:
        return record.worker in attempt.starters and bool(record.incarnation)
    return bool(record.incarnation) and _may_hold(turn, record.worker)


def missing_answers(turn: Turn, attempt: Attempt) -> list[WorkerId]:
    """Workers whose inventory is waited for. A joiner of a planned change stops too, but holds nothing worth a wait."""
    number = attempt.generation
    silent = (
        record
        for worker, record in turn.durable.roster.items()
        if record.serves and inventory_for(turn.process(worker), number) is None
    )
    waiting = [record for record in silent if _is_asked(turn, record) and not record.quarantined]
    return [record.worker for record in waiting if not _holds_nothing(turn, record.worker)]


def beginners(turn: Turn, attempt: Attempt) -> list[WorkerId]:
    """Who begins in a world in which nothing that is held counts: of those asked all but joiners that have not stopped,
    and would not take up a plan.
    """
    asked, number = fenced_workers(turn), attempt.generation
    return [
        worker
        for worker in asked
        if not _holds_nothing(turn, worker) or inventory_for(turn.process(worker), number) is not None
    ]


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
    """[Note: no two worlds] The first world that may still train, None where all have stopped.

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


# ---- a store that was restored from an older state


def unknown_generation(turn: Turn) -> int:
    """The highest generation that a living worker is in and the store does not know; 0: there is none."""
    highest = max((process.status.generation for process in turn.serving()), default=0)
    worlds = [plan for plan in (turn.world, *turn.durable.planned) if plan is not None]
    return highest if all(plan.generation < highest for plan in worlds) else 0


def may_others_come(turn: Turn) -> bool:
    """Whether there may be more workers than the store knows: all who live come back within `reconnect_seconds`."""
    return turn.now - turn.job.started_at < turn.spec.reconnect_seconds


def is_succeeded(turn: Turn, plan: Plan) -> bool:
    """Whether a living worker is in a generation after this one, which began only when this one had stopped."""
    return plan.generation < unknown_generation(turn) and not may_others_come(turn)


def ahead(turn: Turn, generation: int) -> str:
    """The worker in a later generation, or that has promised one after the next, as a sentence; empty: none is."""
    for process in turn.serving():
        status = process.status
        if status.generation > generation or (status.generation and status.promised > generation + 1):
            known = f"the store knows none after {generation}: it was restored from an older state"
            return f"worker {process.worker} is in generation {status.generation}, and {known}"
    return ""


def taken_number(turn: Turn, hello: Hello) -> int:
    """The number up to which none can be given any more, as a hello tells. Where it is that of the change under way,
    of which this worker cannot know, it was given twice: one more is taken, so that the change begins again.
    """
    attempt = turn.job.attempt
    return hello.next_generation + (attempt is not None and hello.next_generation == attempt.generation)


def outnumbered(turn: Turn, number: int) -> str:
    """Why a number that this controller has given is not beyond all that were given before; empty: it is."""
    highest = turn.durable.last_generation
    known = f"a worker knows a plan beyond generation {number - 1}, the last that the store knows"
    return ahead(turn, number - 1) or (f"{known}: it was restored from an older state" if highest > number else "")


def confirm_absent(turn: Turn) -> None:
    """A worker that the store takes for alive, and its launcher has no process of, has died after the store's state."""
    if not unknown_generation(turn):
        return
    for worker in turn.job.absent:
        if turn.process(worker) is None:
            why = "its launcher has no such process; the store was restored from an older state"
            failure_detector.confirm_death(turn, worker, why, noticed_by="the launcher")


def advice_if_gone(turn: Turn, workers: list[WorkerId]) -> str:
    """The advice about workers of which this controller has never heard, as the end of a sentence."""
    unheard = [worker for worker in workers if turn.process(worker) is None]
    command = f"shoal lost {turn.spec.job} {unheard[0] if len(unheard) == 1 else 'WORKER'}"
    return f'. If {"it is" if len(unheard) == 1 else "they are"} gone, say so: "{command}"' if unheard else ""
