"""What people see of a change of the world: its place in the job's history, its figures, its metrics, its sentences."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from shoal_protos.messages import Change
from shoal_protos.plan import Plan, Reason, WorkerId
from shoal_protos.text import plural

from shoal_controller.core.machine.durable import HISTORY, Resize
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.figures import CHANGE_PHASES
from shoal_controller.core.machine.phases.progress import known_step
from shoal_controller.core.machine.phases.step_figures import count_fills
from shoal_controller.core.machine.turn import Turn

MOST_NAMES = 16
"""How many workers a sentence names; of more it gives the count."""


def on_planned(turn: Turn, plan: Plan, newest: Plan) -> None:
    """A planned change was made; `newest` is the plan that it goes on from, or takes the place of."""
    before, after = {m.worker for m in newest.members}, {m.worker for m in plan.members}
    moves = [f"add {some(after - before)}"] * bool(after - before)
    moves += [f"remove {some(before - after)}"] * bool(before - after)
    filling = sum(len(fill.blocks) for fill in plan.fills)
    moves += [f"fill {plural(filling, 'block')}"] * bool(filling)
    purpose = "; ".join(moves) or "promote filled blocks, balance lanes"
    turn.note(
        EventKind.PLAN,
        f"generation {plan.generation} will replace {plan.base} ({plan.reason.value}): {purpose}",
        reason=plan.reason.value,
        base=plan.base,
        workers=len(after),
        fill_blocks=filling,
    )


def on_begun(turn: Turn, plan: Plan) -> None:
    """A planned change has begun, while training went on."""
    turn.change(detect_seconds=0.0)
    _enter(turn, plan, known_step(turn), 0)
    turn.note(EventKind.BEGUN, f"generation {plan.generation} has begun with {_names(plan)}", reason=plan.reason.value)


def on_opened(turn: Turn, plan: Plan, lost_steps: int, waited: str) -> None:
    """A world made from inventories may train. `waited`: for whom, as the end of a sentence."""
    step = plan.recovery.step if plan.recovery is not None else 0
    _enter(turn, plan, step, lost_steps + turn.durable.returned_steps)
    turn.note(
        EventKind.OPEN,
        f"generation {plan.generation} is open with {_names(plan)}, from step {step}{waited}",
        reason=plan.reason.value,
        lost_steps=lost_steps,
        detect_seconds=round(turn.job.detect_seconds, 3),
    )
    if lost_steps:
        turn.count("shoal_job_lost_steps_total", lost_steps)
    turn.change(figures_known=True)


def on_return(turn: Turn, steps: int) -> None:
    """The job begins again from an earlier step, in a world that is not there yet."""
    turn.keep(returned_steps=turn.durable.returned_steps + steps)
    turn.count("shoal_job_lost_steps_total", steps)


def count_resize(turn: Turn, reason: Reason, outcome: str) -> None:
    turn.count("shoal_resizes_total", reason=reason.value, outcome=outcome)


def on_first_commit(turn: Turn, worker: WorkerId) -> None:
    """The first step of a generation was committed."""
    turn.note(EventKind.TRAINS, f"the first step of generation {turn.durable.committed_in} is committed", worker)


def some(workers: Collection[WorkerId]) -> str:
    """Their ids, or how many they are."""
    return ", ".join(sorted(workers)) if len(workers) <= MOST_NAMES else f"{len(workers)} workers"


def _names(plan: Plan) -> str:
    if plan.world_size > MOST_NAMES:
        return f"{plan.world_size} workers"
    lanes = (f"{worker} {len(lanes)}" for worker, lanes in plan.lanes_by_worker.items())
    return f"{plural(plan.world_size, 'worker')} (lanes: {', '.join(lanes)})"


def _enter(turn: Turn, plan: Plan, step: int, lost_steps: int) -> None:
    """A generation enters the history, and the one before gets its last figures."""
    count_fills(turn)
    resize = Resize(plan.generation, plan.world_size, plan.reason, step, lost_steps=lost_steps, began_at=turn.now)
    turn.keep(history=(*turn.durable.history, resize)[-HISTORY:], returned_steps=0)
    if turn.durable.started_at is None:
        turn.keep(started_at=turn.now)
    turn.change(changes={})
    count_resize(turn, plan.reason, "done")


# ---- what the change cost its members


def on_telemetry(turn: Turn, worker: WorkerId) -> None:
    """A member reports what the present generation's change cost it; the figures are complete when all have."""
    world = turn.world
    if world is None or worker in turn.job.changes or _has_figures(turn, world):
        return
    reported = turn.job.processes[worker].telemetry.changes
    change = next((change for change in reported if change.generation == world.generation), None)
    if change is None:
        return
    turn.put("changes", worker, change)
    if len(turn.job.changes) >= world.world_size and world.workers <= turn.job.changes.keys():
        _record_figures(turn, world, turn.job.changes)


def _has_figures(turn: Turn, world: Plan) -> bool:
    """A controller that has started again hears the figures of the present world once more."""
    history = turn.durable.history
    return bool(history and history[-1].generation == world.generation and history[-1].phases)


def _record_figures(turn: Turn, world: Plan, changes: Mapping[WorkerId, Change]) -> None:
    slowest = max(changes, key=lambda worker: changes[worker].pause_seconds)
    change = changes[slowest]
    phases = dict(change.phases)
    if world.recovery is not None:
        phases = {"detect": turn.job.detect_seconds, **phases}
    promoted = sum(c.promoted_blocks for c in changes.values())
    moved = sum(c.pause_bytes for c in changes.values())
    read = sum(c.checkpoint_bytes for c in changes.values())
    history = tuple(
        replace(
            resize,
            from_step=change.from_step,
            pause_seconds=change.pause_seconds,
            phases=phases,
            promoted_blocks=promoted,
            pause_bytes=moved,
            checkpoint_bytes=read,
        )
        if resize.generation == world.generation
        else resize
        for resize in turn.durable.history
    )
    turn.keep(history=history)
    for phase in CHANGE_PHASES:
        if phase in phases:
            turn.observe("shoal_resize_seconds", phases[phase], phase=phase)
    turn.observe("shoal_resize_pause_seconds", change.pause_seconds, reason=world.reason.value)
    turn.count("shoal_blocks_promoted_total", promoted)
    turn.count("shoal_repartition_bytes_total", moved, source="peer")
    turn.count("shoal_repartition_bytes_total", read, source="checkpoint")
    turn.note(
        EventKind.RESIZED,
        f"generation {world.generation} ({world.reason.value}) paused training for {change.pause_seconds:.3f} s, "
        f"{promoted} blocks promoted, {moved} bytes moved in the pause; {plural(world.world_size, 'worker')} "
        f"{'trains' if world.world_size == 1 else 'train'} from step {change.from_step}",
        slowest,
        reason=world.reason.value,
        pause_seconds=change.pause_seconds,
        phases=phases,
        promoted_blocks=promoted,
        pause_bytes=moved,
    )
