"""A store that was restored from an older state: what living workers prove to a controller that has forgotten it.

A worker that is in generation 12 proves that every generation before it is over: a world begins only when the one
before has stopped. So nobody waits for members of those, and no number is given that the living have gone beyond. What
a worker says of itself is bounded by `claims.py`.
"""

from __future__ import annotations

from shoal_protos.messages import Hello
from shoal_protos.plan import Plan, WorkerId

from shoal_controller.core.machine.phases import failure_detector
from shoal_controller.core.machine.turn import Turn


def unknown_generation(turn: Turn) -> int:
    """The highest generation that a living worker is in and the store does not know; 0: there is none."""
    highest = max((process.status.generation for process in turn.serving()), default=0)
    worlds = [plan for plan in (turn.world, *turn.durable.planned) if plan is not None]
    return highest if all(plan.generation < highest for plan in worlds) else 0


def may_others_come(turn: Turn) -> bool:
    """● Whether there may be more workers than the store knows: all who live come back within `reconnect_seconds`."""
    return turn.now - turn.job.started_at < turn.spec.reconnect_seconds


def is_succeeded(turn: Turn, plan: Plan) -> bool:
    """● Whether a living worker is in a generation after this one, which began only when this one had stopped."""
    return plan.generation < unknown_generation(turn) and not may_others_come(turn)


def ahead(turn: Turn, generation: int) -> str:
    """Who is in a later generation, or has promised one after the next, as a sentence; empty: nobody is."""
    for process in turn.serving():
        status = process.status
        if status.generation > generation or (status.generation and status.promised > generation + 1):
            known = f"the store knows none after {generation}: it was restored from an older state"
            return f"worker {process.worker} is in generation {status.generation}, and {known}"
    return ""


def taken(turn: Turn, hello: Hello) -> int:
    """● The number up to which none can be given any more, as a hello tells. Where it is that of the change under way,
    which nobody can have told this worker, it was given twice: one more is taken, so that the change begins again.
    """
    attempt = turn.job.attempt
    return hello.next_generation + (attempt is not None and hello.next_generation == attempt.generation)


def outnumbered(turn: Turn, number: int) -> str:
    """Why a number that this controller has given is not beyond all that were given before; empty: it is."""
    highest = turn.durable.last_generation
    known = f"a worker knows a plan beyond generation {number - 1}, the last that the store knows"
    return ahead(turn, number - 1) or (f"{known}: it was restored from an older state" if highest > number else "")


def confirm_absent(turn: Turn) -> None:
    """Whom the store takes for alive, and of whom its launcher has no process, is dead: that came after its state."""
    if not unknown_generation(turn):
        return
    for worker in turn.job.absent:
        if turn.process(worker) is None:
            why = "its launcher has no such process; the store was restored from an older state"
            failure_detector.confirm_death(turn, worker, why, noticed_by="the launcher")


def if_gone(turn: Turn, workers: list[WorkerId]) -> str:
    """What to do about workers of whom this controller has never heard, as the end of a sentence."""
    unheard = [worker for worker in workers if turn.process(worker) is None]
    command = f"shoal lost {turn.spec.job} {unheard[0] if len(unheard) == 1 else 'WORKER'}"
    return f'. If {"it is" if len(unheard) == 1 else "they are"} gone, say so: "{command}"' if unheard else ""
