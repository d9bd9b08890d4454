"""How a simulated worker joins a planned world: the first message, then all parameters from their owners.

The real one waits for parameters in its first forward, this one before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal_protos.plan import Plan

if TYPE_CHECKING:
    from .training import Training


def welcome(training: Training, before: Plan, plan: Plan) -> None:
    """A member of both worlds gives those who join what they need of it, the second one having begun."""
    worker, worlds = training.worker, training.simulation.worlds
    rank = plan.rank_of(training.membership.worker, worker.incarnation)
    first = next((member for member in plan.members if member in before.members), None)
    for joiner, member in enumerate(plan.members):
        to = training.simulation.process_of(member)
        if member in before.members or to is None:
            continue
        if first is not None and first.incarnation == worker.incarnation:
            training.groups.send(worker, to, (plan.generation, "s", 0), (training.step, training.end.last_step))
        handed = worlds.of(plan).handed_to(rank, joiner) if rank is not None and not training.sharded else ()
        if handed:
            parameters = {block: training.blocks[block] for block in handed}
            training.groups.send(worker, to, (plan.generation, "p", 0), parameters)


def first_message(training: Training) -> bool:
    """A joiner waits in every group that it was asked to build."""
    m = training.membership
    plans = [plan for plan in (*m.kept.values(), m.next) if plan is not None and plan.generation in training.built]
    for plan in plans:
        parts = training.box.get((plan.generation, "s", 0), {})
        if parts:
            training.step, training.end.last_step = next(iter(parts.values()))
            training.blocks, training.pending = {}, frozenset()
            training.step_phase = ""
            training.begin(plan, joins=True)
            return bool(training.step_phase)
    return False


def parameters_come(training: Training) -> bool:
    """A joiner has all parameters: its first lane can begin."""
    assert training.world is not None
    handed = training.got("p")
    if sum(map(len, handed.values())) < len(training.world.model(training.rank)):
        return False
    for parameters in handed.values():
        training.parameters.update(parameters)
    training.begin_boundary()
    return False
