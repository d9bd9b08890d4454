"""A world trains: is it whole, is it done, is another one wanted, who is to be let go?"""

from __future__ import annotations

from shoal_protos.messages import MemberState
from shoal_protos.plan import Plan, WorkerId
from shoal_protos.text import at_step

from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.job import Process
from shoal_controller.core.machine.phases import (
    broken_links,
    ending,
    failure_detector,
    final_drain,
    link_faults,
    older_store,
    open_end,
    planned_changes,
    preemption,
    progress_watch,
    recovery,
    scaling,
    step_figures,
)
from shoal_controller.core.machine.phases.next_message import is_member
from shoal_controller.core.machine.phases.progress import known_step
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.turn import Turn


def settle(turn: Turn) -> None:
    world = turn.world
    assert world is not None
    if _at_its_end(turn, world):
        return _end(turn)
    if open_end.settle(turn, world):
        return None
    if _recover_if_broken(turn, world):
        return None
    preemption.settle(turn)
    _settle_last_ones(turn, world)
    if turn.world is None:
        return None  # the last ones have left
    planned_changes.settle(turn, world)
    scaling.release_leaving(turn)
    _dismiss_the_stale(turn, world)
    return None


# ---- the end


def _at_its_end(turn: Turn, world: Plan) -> bool:
    """Every member that lives has committed the last step, given its digests and ended its script.

    One that died after the last step leaves its digests with the others; the last one leaves them here.
    """
    if not turn.durable.fingerprint:
        return False  # a status may come before the digests that it speaks of
    living = [turn.process(m.worker) for m in world.members if turn.record(m.worker).serves]
    return all(process is not None and process.status.done and process.status.ended for process in living)


def _end(turn: Turn) -> None:
    turn.keep(step=max(turn.durable.step, known_step(turn)))
    step_figures.count_steps(turn, turn.durable.step)
    if turn.durable.stopping:
        return ending.finish(turn, Phase.CANCELLED, f"cancelled {at_step(turn.durable.step)}")
    return ending.succeed(turn)


# ---- is it whole?


def _recover_if_broken(turn: Turn, world: Plan) -> bool:
    """Begin a recovery where a member is gone, stopped, or cut off from another. Returns whether one has begun."""
    roster = turn.durable.roster
    gone = [member.worker for member in world.members if not roster[member.worker].serves]
    if gone:
        why = ", ".join(f"worker {worker} is lost ({turn.record(worker).why})" for worker in gone[:4])
        why += f" and {len(gone) - 4} more" if len(gone) > 4 else ""
        recovery.recover(turn, why, min(_last_sign(turn, worker) for worker in gone))
        return True
    if turn.durable.corruption.restoring:
        recovery.recover(turn, turn.durable.corruption.restoring, turn.now)
        return True
    if turn.durable.paused_because and world.steps:
        recovery.pause(turn, turn.durable.paused_because)
        return True
    reports = link_faults.reports(turn, world, building=False)
    if reports:
        for _, peer in reports:
            failure_detector.probe_peer(turn, peer)
        recovery.recover(turn, link_faults.sentence(reports), turn.now, reports)
        return True
    links = progress_watch.judge_training(turn, world) or planned_changes.judge_building(turn, world)
    if links:
        recovery.recover(turn, broken_links.sentence(links), turn.job.last_vote_at, links=links)
        return True
    stopped = next((member.worker for member in world.members if _has_stopped(turn, world, member.worker)), None)
    if stopped is not None:
        recovery.recover(turn, f"worker {stopped} has stopped", turn.now)
        return True
    ahead = next((process for process in turn.serving() if process.status.generation > world.generation), None)
    if ahead is not None:
        recovery.recover(turn, older_store.ahead(turn, world.generation), turn.now)
        return True
    back = _who_could_rejoin(turn, world)
    if back is not None:
        turn.mark(back, quarantined=False)
        recovery.recover(turn, f"worker {back} is back and holds blocks", turn.now)
    return back is not None


def _last_sign(turn: Turn, worker: WorkerId) -> float:
    process = turn.process(worker)
    if process is None:
        return turn.now
    return process.cut_at if process.cut_at is not None else process.last_message_at


def _has_stopped(turn: Turn, world: Plan, worker: WorkerId) -> bool:
    """Whether a member has stopped for a number that was given up."""
    process = turn.process(worker)
    if process is None or process.status.state is MemberState.TRAINING:
        return False
    status = process.status
    waits_for_open = status.state is MemberState.READY and status.promised == world.generation
    return status.state in (MemberState.STOPPED, MemberState.BUILDING, MemberState.READY) and not waits_for_open


def _who_could_rejoin(turn: Turn, world: Plan) -> WorkerId | None:
    """A thawed worker beside a world that commits no steps: nothing makes it stale, and to take it in is free."""
    if world.steps or turn.durable.planned:
        return None
    return next((process.worker for process in turn.serving() if _could_rejoin(turn, world, process)), None)


def _could_rejoin(turn: Turn, world: Plan, process: Process) -> bool:
    status = process.status
    stands = status.generation > 0 and status.state not in (
        MemberState.LEFT,
        MemberState.WARMING_UP,
        MemberState.WAITING,
        MemberState.JOINING,
    )
    record = turn.record(process.worker)
    return (
        stands
        and not is_member(world, process.worker)
        and max(turn.durable.committed_in, turn.durable.first_valid_generation) <= status.generation < world.generation
        and not (record.leaving or link_faults.is_backing_off(turn, process.worker))
    )


# ---- who is to go?


def _dismiss_the_stale(turn: Turn, world: Plan) -> None:
    """● A step was committed in a later generation than a worker's: it changes nothing any more."""
    committed_in = turn.durable.committed_in
    valid = max(committed_in, turn.durable.first_valid_generation)
    for process in [process for process in turn.serving() if 0 < process.status.generation < valid]:
        if process.status.state is not MemberState.LEFT and not is_member(world, process.worker):
            recovery.dismiss_stale(turn, process.worker, process.status.generation, committed_in)


def _settle_last_ones(turn: Turn, world: Plan) -> None:
    """Nobody has come for whom the last leaving workers stayed: their grace is over, the state goes with them."""
    members = [member.worker for member in world.members]
    if not all(turn.record(worker).leaving for worker in members) or planned_changes.waiting_joiners(turn, world):
        return turn.keep(final_drain=False) if turn.durable.final_drain else None
    if turn.durable.description is not None and turn.durable.description.can_checkpoint:
        return final_drain.settle(turn, world, members)
    if all(turn.now >= turn.record(worker).leaves_at for worker in members):
        turn.note(
            EventKind.LOST,
            f"no worker came to take over from the last ones ({', '.join(members)}): their state is lost",
        )
        for worker in members:
            scaling.dismiss_last(turn, worker)
    return None
