"""How far the job is and how fast, what it took to get there, and what people see of it.

A step counts once every member has passed it, so no survivor reports fewer. Goodput and the sample counter come from
these counts. A worker reports the bytes that its process has received since it began; its record says how much of that
is counted, so another controller continues from there. Bytes enter the generation's history and the job's counter at
the same moment, so report and metric agree, and only where something is written anyway, not with every slice.

A change of the world has its place in the job's history here, its figures, its metrics and its sentences.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from statistics import median

from shoal_protos.messages import MOST_REPORTS, Change
from shoal_protos.plan import Plan, Reason, WorkerId
from shoal_protos.text import plural

from shoal_controller.core.machine.durable import HISTORY, Durable, Resize
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.figures import CHANGE_PHASES
from shoal_controller.core.machine.job import Job, Process
from shoal_controller.core.machine.phases.worker_seconds import settle
from shoal_controller.core.machine.turn import Turn

SHOW_SECONDS = 1.0
"""How often the step that people are shown moves: workers say theirs with their heartbeats."""
KEEP_SECONDS = 60.0
"""How often the figures are written where nothing else is, the shown step with them: a store has better to do than to
follow every job's steps. A controller that is started again shows a step that is so old at most, until the members have
said theirs.
"""
FEWEST_AHEAD = 16
"""Steps that may be shown beyond those written, at least."""
MOST_NAMES = 16
"""How many workers a sentence names; of more it gives the count."""


def known_step(turn: Turn) -> int:
    """The highest step that any worker is known to have committed in this life of the job."""
    floor = max(turn.durable.first_valid_generation, 1)
    steps = (p.status.step for p in turn.job.processes.values() if p.status.generation >= floor)
    return max(steps, default=turn.durable.step)


def update(turn: Turn) -> None:
    """Notice the step that every member has committed, and count it."""
    job, world = turn.job, turn.world
    if world is None:
        return
    processes = (job.processes.get(member.worker) for member in world.members)
    steps = [p.status.step if p is not None and p.status.generation == world.generation else -1 for p in processes]
    step = min(steps)
    if step < 0:
        return
    count_steps(turn, step)
    if not turn.job.figures_known:
        turn.change(figures_known=True)
    if step > turn.durable.step and turn.now - job.step_shown_at >= SHOW_SECONDS:
        turn.keep(step=step)
        turn.change(step_shown_at=turn.now)


def as_of_now(job: Job) -> Durable:
    """The state to write where a controller ends in good order: with the steps that were not written yet."""
    return job.durable if job.durable.phase.is_over else replace(job.durable, figures=job.figures)


def shown_loss(job: Job) -> float | None:
    """The loss at the furthest member of the current world that knows it."""
    world = job.durable.current
    reported = [
        (process.status.step, process.telemetry.loss)
        for process in (job.processes.get(member.worker) for member in (world.members if world is not None else ()))
        if process is not None and process.telemetry.loss is not None and job.durable.roster[process.worker].serves
    ]
    return max(reported)[1] if reported else job.durable.loss


def shown_reports(job: Job) -> Mapping[str, float]:
    """Return the reported numbers by name; those of the furthest member win, among equals those of the lowest rank."""
    world = job.durable.current
    members = world.members if world is not None else ()
    known = [(rank, job.processes.get(member.worker)) for rank, member in enumerate(members)]
    reported = [
        (process.status.step, -rank, process.telemetry.reports) for rank, process in known if process is not None
    ]
    found: dict[str, float] = {}
    for _, _, reports in sorted(reported, key=lambda one: one[:2]):
        found.update(reports)
    return dict(sorted(found.items())[:MOST_REPORTS]) or job.durable.reports


def step_seconds_median(job: Job) -> float | None:
    """Over the run's workers, the median of what each says of its last steps; what was kept once they are gone."""
    reported = (process.telemetry.step_seconds_median for process in job.processes.values())
    seconds = [one for one in reported if one > 0]
    return median(seconds) if seconds else job.durable.step_seconds_median


# ---- what is counted: committed steps with their times, and bytes that fills have moved


def count_steps(turn: Turn, step: int) -> None:
    """Every member has committed `step`."""
    figures = turn.job.figures
    steps = step - figures.step
    if steps <= 0:
        return
    seconds = _step_seconds(turn.job) or (figures.trained_seconds / figures.steps if figures.steps else 0.0)
    if seconds > 0:
        figures = figures.observed("shoal_step_seconds", seconds, {}, times=steps)
    figures = settle(turn.durable, figures, steps, seconds)
    turn.change(
        figures=replace(
            figures,
            step=step,
            steps=figures.steps + steps,
            trained_seconds=figures.trained_seconds + steps * seconds,
            training_began=turn.now - steps * seconds if figures.training_began is None else figures.training_began,
            first_commit=turn.now if figures.first_commit is None else figures.first_commit,
            last_commit=turn.now,
        )
    )
    keep_counted(turn, steps)


def return_to(turn: Turn, step: int) -> None:
    """The job goes on from an earlier step. Of steps made while no controller watched, and that no worker is left to
    report, as many count as may have been shown.
    """
    figures = turn.job.figures
    steps = figures.steps if turn.job.figures_known else max(figures.steps, turn.durable.figures.steps_bound)
    turn.keep_figures(replace(figures, step=step, steps=steps))
    turn.change(figures_known=True)


def keep_counted(turn: Turn, steps: int = 0) -> None:
    """Now and then the figures are written, with a bound on how many steps are shown until they are written again.
    Workers' seconds pass without steps too. `steps`: that were just counted.
    """
    figures, written = turn.job.figures, turn.durable.figures
    if not (turn.job.figures_written_at or steps):  # of a job that only was taken over nothing is written
        turn.change(figures_written_at=turn.now)
    due = turn.now - turn.job.figures_written_at >= KEEP_SECONDS
    if due or figures.steps > written.steps_bound:
        ahead = max(FEWEST_AHEAD, 2 * (figures.steps - written.steps), steps)
        bound = figures.steps + ahead if steps or turn.job.figures_known else written.steps_bound
        count_fills(turn)
        turn.keep_figures(replace(turn.job.figures, steps_bound=bound))
        turn.keep(step=max(turn.durable.step, figures.step))
        turn.change(figures_written_at=turn.now, step_shown_at=turn.now)


def _step_seconds(job: Job) -> float:
    """A step's time between this heartbeat and the one before, over the world's members that have reported: the median.
    What the dead have said last was another world's pace. Of the steps that were made while no controller was there it
    is the usual time of a step.
    """
    world = job.durable.current
    of_world = [one for one in job.processes.values() if world is None or one.worker in world.workers]
    each = [seconds for process in of_world if (seconds := _last_step_seconds(process)) > 0]
    return median(each) if each else 0.0


def _last_step_seconds(process: Process) -> float:
    before, now = process.pace_before, (process.status.step, process.telemetry.training_seconds)
    if before is not None and now[0] > before[0] and now[1] > before[1]:
        return (now[1] - before[1]) / (now[0] - before[0])
    usual = process.telemetry.step_seconds_median if before is None else 0.0
    return usual or process.telemetry.step_seconds


def count_fills(turn: Turn) -> None:
    """Count the bytes that workers have reported since the last time: the present generation has moved them."""
    history = turn.durable.history
    if not history:
        return
    moved = 0
    for worker, process in turn.job.processes.items():
        received, counted = process.telemetry.fill_bytes, turn.record(worker).fill_bytes_counted
        if received > counted:
            moved += received - counted
            turn.mark(worker, fill_bytes_counted=received)
    if moved:
        newest = replace(history[-1], fill_bytes=history[-1].fill_bytes + moved)
        turn.keep(history=(*history[:-1], newest))
        turn.count("shoal_repartition_bytes_total", moved, source="peer")


# ---- the history of the changes of the world


def on_planned(turn: Turn, plan: Plan, newest: Plan) -> None:
    """A planned change was made; `newest` is the plan that it goes on from, or takes the place of."""
    before, after = {m.worker for m in newest.members}, {m.worker for m in plan.members}
    moves = [f"add {names_or_count(after - before)}"] * bool(after - before)
    moves += [f"remove {names_or_count(before - after)}"] * bool(before - after)
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
    _enter_history(turn, plan, known_step(turn), 0)
    turn.note(EventKind.BEGUN, f"generation {plan.generation} has begun with {_names(plan)}", reason=plan.reason.value)


def on_opened(turn: Turn, plan: Plan, lost_steps: int, waited: str) -> None:
    """A world made from inventories may train. `waited`: the workers that were waited for, as a sentence's end."""
    step = plan.recovery.step if plan.recovery is not None else 0
    _enter_history(turn, plan, step, lost_steps + turn.durable.returned_steps)
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


def count_lost_steps(turn: Turn, steps: int) -> None:
    """The job begins again from an earlier step, in a world that is not there yet."""
    turn.keep(returned_steps=turn.durable.returned_steps + steps)
    turn.count("shoal_job_lost_steps_total", steps)


def count_resize(turn: Turn, reason: Reason, outcome: str) -> None:
    turn.count("shoal_resizes_total", reason=reason.value, outcome=outcome)


def on_first_commit(turn: Turn, worker: WorkerId) -> None:
    """The first step of a generation was committed."""
    turn.note(EventKind.TRAINS, f"the first step of generation {turn.durable.committed_in} is committed", worker)


def names_or_count(workers: Collection[WorkerId]) -> str:
    """Their ids, or how many they are."""
    return ", ".join(sorted(workers)) if len(workers) <= MOST_NAMES else f"{len(workers)} workers"


def _names(plan: Plan) -> str:
    if plan.world_size > MOST_NAMES:
        return f"{plan.world_size} workers"
    lanes = (f"{worker} {len(lanes)}" for worker, lanes in plan.lanes_by_worker.items())
    return f"{plural(plan.world_size, 'worker')} (lanes: {', '.join(lanes)})"


def _enter_history(turn: Turn, plan: Plan, step: int, lost_steps: int) -> None:
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
