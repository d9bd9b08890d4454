"""What a simulated worker's heartbeat tells of its training thread and of the groups that it builds."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from shoal_protos.activity import Activity, StepPhase
from shoal_protos.messages import MemberState
from shoal_protos.plan import Plan

if TYPE_CHECKING:
    from .training import Training
    from .worker import SimWorker
    from .world import World

PHASES = {
    "": StepPhase.LANES,
    "cell": StepPhase.LANES,
    "gather": StepPhase.LANES,
    "round": StepPhase.LANES,
    "reduce": StepPhase.REDUCTION,
    "fills": StepPhase.FILLS,
    "vote": StepPhase.VOTE,
    "hand out": StepPhase.HAND_OUT,
    "join": StepPhase.HAND_OUT,
    "compare": StepPhase.VOTE,
    "catch up": StepPhase.CATCHING_UP,
}


def activity(worker: SimWorker) -> Activity:
    """Of the training thread."""
    training, membership = worker.training, worker.membership
    seconds = worker.clock.now - training.step_phase_since
    recovery = membership.recovery
    if recovery is not None and membership.state is MemberState.READY:
        return Activity(recovery.generation, 1, StepPhase.LANES, 0, (), seconds)
    if training.step_phase == "catch up" and recovery is not None:
        waits = _ids(missing(training))
        return Activity(recovery.generation, 0, StepPhase.CATCHING_UP, 0, waits, seconds)
    if training.world is None or training.world.plan.generation != membership.generation:
        return Activity(membership.generation)
    phase = PHASES.get(training.step_phase, StepPhase.LANES)
    boundary = 0 if training.step_phase == "join" else training.boundary + 1
    bucket = training.lanes.place if phase is StepPhase.LANES and not training.idle else 0
    return Activity(membership.generation, boundary, phase, bucket, _ids(missing(training)), seconds)


def missing(training: Training) -> list[SimWorker]:
    """For whom it waits in its phase of the step."""
    world = training.world
    if world is None or not training.step_phase:
        return []
    late = [training.peer(rank) for rank, there in _expected(training, world) if training.peer(rank) not in there]
    return [peer for peer in late if peer is not None and peer is not training.worker]


def _expected(training: Training, world: World) -> list[tuple[int, Collection[SimWorker]]]:
    """The ranks that send it something in its phase of the step, and from whom that has come."""
    rank, boundary = training.rank, training.boundary
    if training.step_phase == "catch up":
        recovery = world.plan.recovery
        stale = frozenset(recovery.stale[rank]) if recovery is not None else frozenset()
        there = training.box.get((world.plan.generation, "r", 0), {})
        return [(owner, there) for owner in range(world.size) if world.owned[owner] & stale]
    if training.step_phase in ("cell", "gather", "round", "reduce"):
        return training.lanes.expected()
    if training.step_phase == "vote":
        return [(member, training.got("v")) for member in range(world.size)]
    if training.step_phase == "compare":
        return [(member, training.got("c")) for member in range(world.size)] if training.copies.going else []
    if training.step_phase == "hand out":
        return [(owner, training.got("h")) for owner in world.owners if world.parts(owner, rank, boundary)[1]]
    if training.step_phase == "join":
        return [(owner, training.got("p")) for owner in world.owners if world.handed_to(owner, rank)]
    sources = sorted({source for source, target, _ in world.fills(boundary) if target == rank})
    owners = [] if training.idle else [owner for owner in world.owners if world.parts(owner, rank, boundary)[0]]
    return [(source, training.got("f")) for source in sources] + [(owner, training.got("m")) for owner in owners]


def builds(worker: SimWorker) -> tuple[Activity, ...]:
    """Of the groups that are being built, or wait for their world."""
    return tuple(_build(worker, number, since) for number, since in sorted(worker.training.building.items()))


def _build(worker: SimWorker, generation: int, since: float) -> Activity:
    training = worker.training
    seconds = worker.clock.now - since
    plan = worker.simulation.watch.plans[generation]
    if generation in training.built:
        waits = _ids(_first_speaker(training, plan)) if worker.membership.is_joiner else ()
        return Activity(generation, 0, StepPhase.BUILT, 0, waits, seconds)
    return Activity(generation, 0, StepPhase.BUILDING, 0, _ids(training.groups.missing(worker, plan)), seconds)


def _first_speaker(training: Training, plan: Plan) -> list[SimWorker]:
    """Who sends a joiner its first message: the first member that was one before."""
    base = training.simulation.watch.plans.get(plan.base)
    old = [member for member in plan.members if base is not None and member in base.members]
    process = training.simulation.process_of(old[0]) if old else None
    return [process] if process is not None else []


def _ids(workers: list[SimWorker]) -> tuple[str, ...]:
    return tuple(worker.membership.worker for worker in workers)
