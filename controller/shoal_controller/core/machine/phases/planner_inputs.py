"""The planner's inputs: who counts, what each holds, and what the job wants, taken from what the workers have said.

Two rules that bits depend on live here: what an inventory is worth at the step where a recovery begins (`worth`), and
what a planned change may count on (`kept`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

from shoal_protos.description import Description
from shoal_protos.messages import Inventory, Status
from shoal_protos.plan import Member, Plan, Reason, WorkerId
from shoal_protos.runs import NO_BLOCKS, Runs, every, union

from shoal_controller.core.machine.job import Attempt
from shoal_controller.core.machine.phases import checkpoints, link_faults
from shoal_controller.core.machine.turn import Turn
from shoal_controller.core.planning.planner import Candidate, PlanRequest, Terms
from shoal_controller.core.planning.question import ChangeQuestion, RecoveryQuestion, StartQuestion

FILL_SHARE = 0.1
"""The part of a step's time that fills may take."""
FILL_BYTES_PER_SECOND = 250e6
"""What is assumed of a network that nobody has measured: the number in the plan must not depend on who measures."""
LEAST_FILL_BYTES = 1 << 20
"""What a step's fills may move at least."""


# ---- questions about inventories


def start_question(turn: Turn, workers: list[WorkerId], attempt: Attempt) -> StartQuestion:
    """A world in which nobody holds anything: all begin from the newest checkpoint, or with the initial state."""
    candidates = tuple(_joiner_candidate(turn, worker, trains=True) for worker in workers)
    reason = Reason.RESTORE if attempt.reason is Reason.RESTORE else Reason.START
    request = _request(turn, candidates, attempt.generation, reason, attempt.avoided_builders)
    return StartQuestion(request, candidates, *_beginning(turn))


def begins_where_all_would(turn: Turn, question: StartQuestion) -> bool:
    """Whether nobody has told of a better checkpoint since it was asked, nor of one that cannot be read."""
    return (question.step, question.checkpoint) == _beginning(turn)


def _beginning(turn: Turn) -> tuple[int, str]:
    """The step at which a world that holds nothing begins, and its checkpoint."""
    found = checkpoints.latest(turn.durable)
    return (found.step, found.path) if found is not None else (0, "")


def recovery_question(turn: Turn, counting: Mapping[WorkerId, Inventory], attempt: Attempt) -> RecoveryQuestion | None:
    """What the inventories allow: of those who are trusted, otherwise of all. None: nobody holds anything."""
    step = max((inventory.step for inventory in counting.values()), default=-1)
    if step < 0:
        return None
    of_all = _recovery_question(turn, counting, attempt, counting)
    trusted = {worker: inventory for worker, inventory in counting.items() if not turn.record(worker).quarantined}
    if len(trusted) in (0, len(counting)):
        return of_all
    return replace(_recovery_question(turn, trusted, attempt, counting), otherwise=of_all)


def _recovery_question(
    turn: Turn, members: Mapping[WorkerId, Inventory], attempt: Attempt, counting: Mapping[WorkerId, Inventory]
) -> RecoveryQuestion:
    """A world of some of those whose inventories count."""
    assert turn.world is not None
    step = max(inventory.step for inventory in counting.values())
    candidates = tuple(_stopped_candidate(turn, worker, inventory, step) for worker, inventory in members.items())
    behind = any(candidate.counted and members[candidate.member.worker].step < step for candidate in candidates)
    record = _record_of(counting, step) if behind else b""
    request = _request(turn, candidates, attempt.generation, attempt.reason, attempt.avoided_builders)
    return RecoveryQuestion(request, candidates, turn.world, step, record)


def can_spare(turn: Turn, counting: Mapping[WorkerId, Inventory], worker: WorkerId) -> bool:
    """Whether the others hold every block at the step where a recovery begins."""
    assert turn.durable.description is not None
    trusted = [name for name in counting if not turn.record(name).quarantined]
    others = {name: counting[name] for name in trusted if name != worker}
    step = max((inventory.step for inventory in counting.values()), default=-1)
    held = (value[0] for inventory in others.values() if (value := usable_blocks(inventory, step)) is not None)
    return bool(others) and every(turn.durable.description.blocks) <= union(held)


def usable_blocks(inventory: Inventory, step: int) -> tuple[Runs, Runs] | None:
    """● Which blocks it holds at that step, and whose parameters it has; None where it is too far behind.

    Who is one step behind rolls forward, but only the blocks whose gradient is in.
    """
    if inventory.step == step:
        return inventory.holds, inventory.current
    if inventory.step == step - 1:
        rolled = inventory.holds & inventory.pending
        return rolled, rolled
    return None


def _stopped_candidate(turn: Turn, worker: WorkerId, inventory: Inventory, step: int) -> Candidate:
    value = usable_blocks(inventory, step)
    holds, current = value if value is not None else (NO_BLOCKS, NO_BLOCKS)
    record = turn.record(worker)
    return Candidate(
        Member(worker, record.incarnation, record.address),
        record.domain,
        record.join_order,
        holds=holds,
        current=current,
        counted=value is not None,
        leaving=bool(record.leaving),
        lane=inventory.lane if inventory.step == step else -1,
    )


def _record_of(inventories: Mapping[WorkerId, Inventory], step: int) -> bytes:
    return next(inventory.record for inventory in inventories.values() if inventory.step == step)


# ---- planned changes


def change_question(turn: Turn, world: Plan, joiners: list[WorkerId], number: int, reason: Reason) -> ChangeQuestion:
    """What the world should be next, from what its members keep and have been filled with."""
    members = (_member_candidate(turn, world, rank) for rank in range(world.world_size))
    trains = joiners_train(turn)
    candidates = (*members, *(_joiner_candidate(turn, worker, trains) for worker in joiners))
    return ChangeQuestion(_request(turn, candidates, number, reason), candidates, world)


def kept_blocks(world: Plan, rank: int, status: Status) -> Runs:
    """● What a planned change may count on: what its base keeps for a member or has filled, and it says it holds.

    What the base releases may still be there, and be freed before the change begins.
    """
    return status.holds & world.held_by(rank, status.boundaries)


def can_train(turn: Turn, world: Plan, rank: int) -> bool:
    """Whether a member has all parameters: whoever has lanes, and a standby that has had a hand-out; or needs none."""
    if world.lanes_of(rank) or joiners_train(turn):
        return True
    return turn.job.processes[world.members[rank].worker].can_train


def joiners_train(turn: Turn) -> bool:
    """Whether whoever joins trains at once: where parameters are gathered by those who train."""
    return turn.durable.description is not None and turn.durable.description.shards_parameters


def _member_candidate(turn: Turn, world: Plan, rank: int) -> Candidate:
    worker = world.members[rank].worker
    process = turn.job.processes[worker]
    record = turn.record(worker)
    return Candidate(
        world.members[rank],
        record.domain,
        record.join_order,
        holds=kept_blocks(world, rank, process.status),
        can_train=can_train(turn, world, rank),
        leaving=bool(record.leaving),
    )


def _joiner_candidate(turn: Turn, worker: WorkerId, trains: bool) -> Candidate:
    """A joiner."""
    record = turn.record(worker)
    member = Member(worker, record.incarnation, record.address)
    return Candidate(member, record.domain, record.join_order, can_train=trains, leaving=bool(record.leaving))


# ---- terms


def steps_run(turn: Turn, members: int) -> bool:
    """Not while the job is paused, is being saved for the last time, or has fewer members than it needs."""
    return not turn.durable.paused and not turn.durable.final_drain and members >= turn.durable.bounds.least


def _request(
    turn: Turn, candidates: Sequence[Candidate], number: int, reason: Reason, avoid: frozenset[WorkerId] = frozenset()
) -> PlanRequest:
    description = turn.durable.description
    assert description is not None
    terms = Terms(
        description.lanes,
        description.blocks,
        description.mirrors,
        description.mirror_partners,
        fill_rate(turn, description, candidates),
        steps_run(turn, len(candidates)),
        rounds=description.adds_by_rounds,
        sharded=description.shards_parameters,
    )
    suspects = frozenset(c.member.worker for c in candidates if link_faults.has_fault(turn, c.member.worker))
    return PlanRequest(terms, number, reason, avoid | suspects)


def fill_rate(turn: Turn, description: Description, candidates: Sequence[Candidate]) -> int:
    """Blocks that one source sends per step: a tenth of a step's time, more where a drain's clock runs."""
    step_seconds = max((process.telemetry.step_seconds for process in turn.serving()), default=0.0)
    wanted = description.fill_bytes_per_step or max(LEAST_FILL_BYTES, FILL_SHARE * step_seconds * FILL_BYTES_PER_SECOND)
    rate = max(1, int(wanted // max(1, description.state_bytes)))
    for candidate in candidates:
        if candidate.leaving:
            grace = turn.record(candidate.member.worker).leaves_at - turn.now
            boundaries = max(1, int(grace / 2 / step_seconds)) if step_seconds else 1
            rate = max(rate, ceil(len(candidate.holds) / boundaries))
    return rate
