"""Runs of one seed: faults for a while, then calm, and the job must go on."""

from __future__ import annotations

from collections.abc import Iterable

from shoal_controller.core.machine.spec import Phase
from shoal_protos.acts import Resume

from .cells import full_cells_of
from .faults import Faults
from .pods import NO_IMAGE
from .simulation import Simulation
from .speeds import without_lanes
from .watch import Violation
from .worker import SimWorker

RAGE_SECONDS = 14.0
CALM_SECONDS = 90.0
PATIENCE_SECONDS = 900.0
"""With a script that cannot come to its end: the back-offs between all of its tries."""
PROGRESS = 3
"""How many steps must be committed once everything is well."""


def run(seed: int, **shape: object) -> Simulation:
    """Raises `Violation` where an invariant breaks, or where the job does not go on."""
    return rage_and_calm(Simulation(seed, **shape))


def rage_and_calm(simulation: Simulation) -> Simulation:
    simulation.host.start()
    if simulation.spec.launcher == "none":
        for _ in range(simulation.spec.wanted + simulation.spec.spares):
            simulation.start_process()
    simulation.clock.run_until(simulation.chance.uniform(0.5, 3.0))
    faults = Faults(simulation)
    faults.rage(RAGE_SECONDS)
    simulation.clock.run_until(faults.until)
    faults.calm()
    _goes_on(simulation)
    simulation.faults = faults.count  # type: ignore[attr-defined]
    simulation.disasters = faults.disasters.count  # type: ignore[attr-defined]
    simulation.pod_faults = faults.pods.count  # type: ignore[attr-defined]
    return simulation


def _goes_on(simulation: Simulation) -> None:
    """● From any reachable state, if workers stay up, training resumes."""
    deadline = simulation.clock.now + (PATIENCE_SECONDS if simulation.script.kind else CALM_SECONDS)
    begin = simulation.watch.commits
    while simulation.clock.now < deadline:
        if simulation.spec.launcher == "none" and not simulation.host.job.durable.phase.is_over:
            _keep_enough(simulation)
        if simulation.host.job.durable.paused_because:
            simulation.host.request(Resume())
        simulation.clock.run_until(simulation.clock.now + 0.5)
        if settled(simulation, begin):
            return
    simulation.watch.violated("the job does not go on", *standing(simulation))


def _full_cells(simulation: Simulation, workers: Iterable[SimWorker]) -> int:
    return full_cells_of(((w.coordinate, simulation.host_of(w.pid)) for w in workers), simulation.cell)


def _keep_enough(simulation: Simulation) -> None:
    """People start processes where some are lacking: with cells also where a coordinate has none."""
    durable, processes = simulation.host.job.durable, simulation.cell.processes
    while len(simulation.workers()) < max(simulation.spec.wanted, durable.bounds.least):
        simulation.start_process()
    here = simulation.workers()
    while all(worker.is_seated for worker in here) and _full_cells(simulation, here) * processes < durable.bounds.least:
        here.append(simulation.start_process())


def settled(simulation: Simulation, begin: int) -> bool:
    """Everyone who lives is in one world that commits steps; or the job is over."""
    durable = simulation.host.job.durable
    if durable.phase.is_over and not simulation.promises.kept():
        return False
    if durable.phase.is_over:
        return over_for_a_reason(simulation, durable.phase, durable.reason)
    if _waits_for_an_operator(simulation) and not simulation.promises.cancelled:
        return True
    if simulation.script.kind:
        return False
    world = durable.current
    if world is None or not world.steps or simulation.watch.commits < begin + PROGRESS * world.world_size:
        return False
    roster = durable.roster
    each = simulation.spec.started_together
    launched = max(each, durable.wanted - durable.wanted % each) + durable.spares
    least = launched if simulation.spec.launcher != "none" else durable.bounds.least
    enough = world.world_size >= min(least, world.lanes * world.coordinates)
    processes = [simulation.processes[member.incarnation] for member in world.members]
    in_it = all(process.membership.generation == world.generation for process in processes)
    staying = [rank for rank, member in enumerate(world.members) if not roster[member.worker].leaving]
    gone = len(staying) == world.world_size
    trainers = sum(bool(world.shares[rank].lanes) for rank in staying)
    trainers += len(without_lanes(simulation.host.job, world))
    cells = _full_cells(simulation, [processes[rank] for rank in staying])
    busy = trainers == min(cells, world.lanes, durable.trainers or world.lanes) * world.coordinates
    possible = min(len(staying), durable.wanted) // world.coordinates
    even = simulation.spec.launcher == "none" or cells >= possible  # people are told which process to drain
    still = not durable.planned and not world.fills and durable.save is None
    all_train = in_it and enough and gone and busy and even
    return all_train and still and simulation.promises.kept() and simulation.bits.are_known()


def _waits_for_an_operator(simulation: Simulation) -> bool:
    """Every worker there is was to end and hangs: nobody is evicted where nobody is heard, and the job says so."""
    return simulation.host.job.doubt_shown and all(worker.hangs for worker in simulation.workers())


def over_for_a_reason(simulation: Simulation, phase: Phase, reason: str) -> bool:
    needs = (
        "came to begin anew",
        "cannot be read whole",
        "There is no other checkpoint",
        "and then every worker has failed",
        NO_IMAGE,
    )
    given_up = simulation.script.is_given_up_for(reason) or simulation.planner.is_given_up_for(reason)
    cancelled = phase is Phase.CANCELLED and simulation.promises.cancel_was_asked
    if cancelled or phase is Phase.SUCCEEDED or any(need in reason for need in needs) or given_up:
        return True
    simulation.watch.violated("the job ended without need", phase.value, reason)
    return False


def standing(simulation: Simulation) -> list[str]:
    """Where everybody stands, for people."""
    job = simulation.host.job
    words = [f"phase {job.durable.phase.value}"]
    if job.attempt is not None:
        words.append(f"attempt {job.attempt.generation} {job.attempt.phase.value} {job.attempt.waits_for}")
    if job.durable.current is not None:
        words.append(f"current {job.durable.current.generation}")
    words.append(f"planned {[plan.generation for plan in job.durable.planned]}")
    return [*words, *(f"[{worker} {worker.where()}]" for worker in simulation.workers())]


__all__ = ["Violation", "run"]
