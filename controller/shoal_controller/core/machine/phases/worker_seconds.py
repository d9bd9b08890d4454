"""Where a job's machine-seconds go: what is wanted, and for what it was used. Goodput is the part that trained.

Time is counted at the beginning of a batch, for the workers as they were since the last one. That of trainers is only
known when a step is committed: until then it is unsettled. Where a job ends, what is unsettled came to no step. What a
controller was away for is counted by the next one, from the time that it finds stored. Steps that are made again are
`lost_step`, however long ago they were lost.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_protos.messages import MemberState
from shoal_protos.plan import Plan

from shoal_controller.core.machine.durable import Durable, Standing, WorkerRecord
from shoal_controller.core.machine.figures import Figures, Use
from shoal_controller.core.machine.job import Job
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.turn import Turn
from shoal_controller.core.planning.lanes import seconds_of_step

EVERY_SECONDS = 0.1
"""How often the workers are looked at, at most."""


def count_time(turn: Turn) -> None:
    """Count the time since the last look, as it was used by the workers that are known."""
    figures = turn.job.figures
    since = figures.counted_until
    if turn.durable.phase.is_over or (since is not None and 0 <= turn.now - since < EVERY_SECONDS):
        return
    seconds = 0.0 if since is None else max(0.0, turn.now - since)
    if seconds > 0:
        figures = _used(turn.job, figures, seconds)
    turn.change(figures=replace(figures, counted_until=turn.now))


def _used(job: Job, figures: Figures, seconds: float) -> Figures:
    durable, world = job.durable, job.durable.current
    trainers = {world.members[rank].worker for rank in world.trainers} if world is not None else set()
    found = dict.fromkeys(("trains", Use.STANDBY, Use.STARTING), 0)
    for record in durable.roster.values():
        if record.standing is Standing.HERE and record.ending is None and record.worker not in job.pending:
            found["trains" if record.worker in trainers else _before_training(job, record)] += 1
    missing = max(0, durable.wanted - sum(found.values()))
    figures = figures.used(Use.MISSING, missing * seconds).wanted_for(durable.wanted * seconds)
    for use in (Use.STANDBY, Use.STARTING):
        figures = figures.used(use, found[use] * seconds)
    training = found["trains"] * seconds
    if durable.phase is Phase.RUNNING and world is not None and world.steps:
        return replace(figures, unsettled_seconds=figures.unsettled_seconds + training)
    return figures.used(Use.PAUSED, training)


def _before_training(job: Job, record: WorkerRecord) -> Use:
    """What a worker without lanes does: it starts until its model is built and warm, then it stands by. One that has
    said hello to an earlier controller only is taken to be warm.
    """
    process = job.processes.get(record.worker)
    is_warm = process.status.state is not MemberState.WARMING_UP if process is not None else bool(record.incarnation)
    return Use.STANDBY if is_warm else Use.STARTING


def settle(durable: Durable, figures: Figures, steps: int, seconds: float) -> Figures:
    """Return the figures with the trainers' time up to the commit of `steps` steps of `seconds` each, which end with
    `figures.step + steps`: what was in steps, of that what idled for lack of lanes, and what was not. Workers say their
    steps with heartbeats, which come in the middle of another one: the time of that one stays unsettled.
    """
    world = durable.current
    if world is None or not world.trainers:
        return figures
    of_a_step = seconds * len(world.trainers)
    in_steps = min(figures.unsettled_seconds, steps * of_a_step)
    under_way = min(figures.unsettled_seconds - in_steps, of_a_step)
    worked = in_steps * _part_in_lanes(durable, world)
    made_again = min(steps, max(0, figures.highest_step - figures.step)) / steps
    figures = figures.used(Use.LOST_STEP, worked * made_again).used(Use.TRAINING, worked * (1 - made_again))
    figures = figures.used(Use.IDLE_LANE, in_steps - worked)
    figures = figures.used(Use.PAUSED, figures.unsettled_seconds - in_steps - under_way)
    highest = max(figures.highest_step, figures.step + steps)
    return replace(figures, unsettled_seconds=under_way, highest_step=highest)


def _part_in_lanes(durable: Durable, world: Plan) -> float:
    """Return the part of a step for which its trainers are in lanes: the others' are longer, or more."""
    counts, made_of = [len(world.lanes_of(rank)) for rank in world.trainers], durable.description
    if not durable.sharing.seconds or made_of is None:
        return sum(counts) / (len(counts) * max(counts))
    paces = [durable.lane_seconds(world.members[rank].worker) for rank in world.trainers]
    in_lanes = sum(count * pace for count, pace in zip(counts, paces, strict=True))
    return in_lanes / (len(counts) * seconds_of_step(counts, paces, made_of.adds_by_rounds))


def end(figures: Figures) -> Figures:
    """Return the figures of a job that is over: the trainers' time since its last step is settled without one."""
    return replace(figures.used(Use.PAUSED, figures.unsettled_seconds), unsettled_seconds=0.0)
