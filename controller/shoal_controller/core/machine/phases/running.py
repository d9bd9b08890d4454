"""A world trains: is it whole, is it done, is another one wanted, who is slow, who is to be let go?

Where nothing says a job's end beforehand, its last step is the one at which all its scripts have ended. A script that
has ended waits, outside all exchange, until it is told that step (`next_message.py`): so what it has committed is what
the others have committed, and a script that begins another step waits for it in vain. That fails the job by name:
workers that count their batches themselves come to different ends. A *follower* ran no body of that step, so its script
could not end there: it had no lanes, or gets its first ones with the next step. Where all others have ended it is
stopped in that next step, and told the end before it trains again.

Where the last members leave and no worker has come, their state goes into a checkpoint, and the job waits. Half of the
shortest grace they train on for a joiner's sake. Then no steps run any more, they are asked to save, and once the
checkpoint of the very last step is reported they are let go. Workers that come later begin with it.

Heartbeats tell what a lane takes on each worker, without its waits for others; `planning/lanes.py` judges whether that
is worth another sharing. One that is chosen is durable and a part of the goal, so `planned_changes.py` asks the planner
for it as for any other change. `shoal.on_slow` of the job's config says what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal_protos.activity import LANES_BEGIN, StepPhase
from shoal_protos.description import OnSlow
from shoal_protos.messages import MemberState
from shoal_protos.plan import Plan, Reason, WorkerId
from shoal_protos.text import at_step, plural

from shoal_controller.core.machine.durable import Leaving
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.job import Process
from shoal_controller.core.machine.phases import (
    checkpoints,
    ending,
    failure_detector,
    fencing,
    lost_blocks,
    planned_changes,
    progress,
    progress_watch,
    recovery,
    scaling,
)
from shoal_controller.core.machine.phases.next_message import is_member, send_all_if_due, send_if_due
from shoal_controller.core.machine.phases.progress import known_step
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.turn import Turn
from shoal_controller.core.planning.lanes import Look, MeasuredTrainer, judge, without

READ_SECONDS = 0.5
"""How often speeds are looked at, at most: they come with heartbeats."""
SLOW = 1.3
"""So many times as long as the median of the others a slow worker's lane takes."""
SLOW_SECONDS = 10.0
"""For so long it has to be slow before it is in the history."""
VERY_SLOW, VERY_SLOW_SECONDS = 1.5, 300.0
"""Likewise, before it is replaced."""
REPLACED_SECONDS = 3600.0
"""Between two that are replaced."""
MOST_NAMED = 4


def settle(turn: Turn) -> None:
    world = turn.world
    assert world is not None
    if _at_its_end(turn, world):
        return _end(turn)
    if _learn_the_end(turn, world):
        return None
    if _recover_if_broken(turn, world):
        return None
    scaling.keep_the_spared(turn)
    _settle_last_ones(turn, world)
    if turn.world is None:
        return None  # the last ones have left
    _settle_speeds(turn, world)
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
    progress.count_steps(turn, turn.durable.step)
    if turn.durable.stopping:
        return ending.finish(turn, Phase.CANCELLED, f"cancelled {at_step(turn.durable.step)}")
    return ending.succeed(turn)


# ---- an end that nothing says beforehand


def _learn_the_end(turn: Turn, world: Plan) -> bool:
    """Learn the last step. Returns whether that ends this world: the job has failed, or followers are stopped."""
    durable = turn.durable
    if durable.description is None or durable.last_step is not None:
        return False
    found = (turn.process(member.worker) for member in world.members)
    members = [process for process in found if process is not None and process.status.generation == world.generation]
    known = max((process.status.last_step for process in members), default=0)
    if known:
        turn.keep(ends_at=known)  # a store that was restored has forgotten it, or the script has stopped the job
        return False
    ended = [process for process in members if process.status.ended]
    if not ended:
        return False
    last, followers = ended[0].status.step, _followers(world, members)
    living = {member.worker for member in world.members if turn.record(member.worker).serves}
    at_work = living - {process.worker for process in ended}
    beyond = {one.worker for one in members if one.worker in living and _is_beyond(turn, one, ended)}
    ahead = min(beyond - followers, default="")
    if ahead:
        ending.fail(
            turn,
            f"the script of worker {ended[0].worker} has ended at step {last}, and worker {ahead} goes on with step "
            f"{last + 1}; scripts must end at the same step on all workers. Loop over whole epochs, or leave the loop "
            "by engine.global_steps.",
        )
        return True
    is_broken = len(living) < world.world_size
    if not at_work <= (followers if is_broken else beyond):
        return False
    turn.keep(ends_at=last)
    if is_broken:
        return False  # those of the next world are told before it begins
    if at_work:
        names = ", ".join(sorted(at_work))
        why = f"all scripts that trained step {last} have ended, and {names}, which had no lanes in it, is to end too"
        recovery.pause(turn, why)
        return True
    send_all_if_due(turn)
    return False


def _followers(world: Plan, members: Sequence[Process]) -> frozenset[WorkerId]:
    """Members that ran no body of the last step: any of them at a world's first step, unless all began with it."""
    has_begun = any(process.status.committed_in == world.generation for process in members)
    if not has_begun and world.reason not in (Reason.START, Reason.RESTORE):
        return world.workers
    return frozenset(worker for worker, lanes in world.lanes_by_worker.items() if not lanes)


def _is_beyond(turn: Turn, process: Process, ended: Sequence[Process]) -> bool:
    """Whether it has begun to exchange a step after the one at which other scripts have ended, or ended later. In a
    cell it waits for the other members before: for one whose script has ended in vain.
    """
    activity, first = process.activity, ended[0]
    exchanges = (activity.phase, activity.bucket) >= (StepPhase.LANES, LANES_BEGIN)
    in_next = activity.generation == process.status.generation and activity.boundary > first.status.boundaries
    in_vain = any(progress_watch.waits_in_vain(turn.job, process, one) for one in ended)
    return (in_next and (exchanges or in_vain)) or process.status.step > first.status.step


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
    reports = progress_watch.reports(turn, world, building=False)
    if reports:
        for _, peer in reports:
            failure_detector.probe_peer(turn, peer)
        recovery.recover(turn, progress_watch.reports_sentence(reports), turn.now, reports)
        return True
    links = progress_watch.judge_training(turn, world) or planned_changes.judge_building(turn, world)
    if links:
        recovery.recover(turn, progress_watch.links_sentence(links), turn.job.last_vote_at, links=links)
        return True
    stopped = next((member.worker for member in world.members if _has_stopped(turn, world, member.worker)), None)
    if stopped is not None:
        recovery.recover(turn, f"worker {stopped} has stopped", turn.now)
        return True
    ahead = next((process for process in turn.serving() if process.status.generation > world.generation), None)
    if ahead is not None:
        recovery.recover(turn, fencing.ahead(turn, world.generation), turn.now)
        return True
    back = _who_could_rejoin(turn, world)
    if back is not None:
        turn.mark(back, quarantined=False)
        recovery.recover(turn, f"worker {back} is back and holds blocks", turn.now)
        return True
    return False


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
        and not (record.leaving or progress_watch.is_backing_off(turn, process.worker))
    )


# ---- who is to go?


def _dismiss_the_stale(turn: Turn, world: Plan) -> None:
    """A step was committed in a later generation than a worker's: it changes nothing any more."""
    committed_in = turn.durable.committed_in
    valid = max(committed_in, turn.durable.first_valid_generation)
    for process in [process for process in turn.serving() if 0 < process.status.generation < valid]:
        if process.status.state is not MemberState.LEFT and not is_member(world, process.worker):
            recovery.dismiss_stale(turn, process.worker, process.status.generation, committed_in)


def _last_ones(turn: Turn, world: Plan) -> list[WorkerId]:
    """The leaving members that are alone at their coordinate, without even one that is about to join."""
    members = [member.worker for member in world.members]
    staying = {turn.record(worker).coordinate for worker in members if not turn.record(worker).leaving}
    if len(staying) < turn.durable.cell.processes:
        joiners = planned_changes.waiting_joiners(turn, world)
        staying.update(turn.record(worker).coordinate for worker in joiners)
    return [worker for worker in members if turn.record(worker).coordinate not in staying]


def _settle_last_ones(turn: Turn, world: Plan) -> None:
    """No worker has come to take over from the last ones that leave: their grace is over, the state goes with them."""
    members = _last_ones(turn, world)
    if not members:
        return turn.keep(final_drain=False) if turn.durable.final_drain else None
    if turn.durable.description is not None and turn.durable.description.can_checkpoint:
        return _save_last_ones(turn, world, members)
    if all(turn.now >= turn.record(worker).leaves_at for worker in members):
        turn.note(
            EventKind.LOST,
            f"no worker came to take over from the last ones ({', '.join(members)}): their state is lost",
        )
        for worker in members:
            scaling.dismiss_last(turn, worker)
    return None


# ---- the last ones leave


def _save_last_ones(turn: Turn, world: Plan, members: list[WorkerId]) -> None:
    """Save their state and let them go. Called while all members are leaving and no joiner waits."""
    if not turn.durable.final_drain:
        if any(_half_gone(turn, worker) for worker in members if not _goes_by_plan(turn, worker)):
            turn.keep(final_drain=True)
            turn.change(failed_save_step=-1)
            turn.note(
                EventKind.PARTING,
                f"no worker came to take over from {', '.join(members)}: their state is being saved",
            )
        return
    if world.steps or not _are_all_in(turn, world):
        return  # the change to a world without steps is under way
    step = known_step(turn)
    found = checkpoints.latest(turn.durable)
    if found is not None and found.step == step:  # perhaps by an earlier world: no step is saved twice
        _release_last_ones(turn, members, found.path)
    elif turn.job.failed_save_step == step and turn.durable.save is None:
        turn.note(
            EventKind.LOST, f"the state of the last workers ({', '.join(members)}) could not be saved: it is lost"
        )
        _release_last_ones(turn, members, "")
    elif turn.durable.save is None:
        checkpoints.request_save(turn)
        for worker in members:
            send_if_due(turn, worker)


def _goes_by_plan(turn: Turn, worker: WorkerId) -> bool:
    """A planned world is without it: others have its blocks, and its grace hurries no other."""
    return not all(is_member(plan, worker) for plan in turn.durable.planned)


def _half_gone(turn: Turn, worker: WorkerId) -> bool:
    record = turn.record(worker)
    return turn.now >= record.leaves_at - record.grace_seconds / 2


def _are_all_in(turn: Turn, world: Plan) -> bool:
    processes = (turn.process(member.worker) for member in world.members)
    return all(p is not None and p.status.generation == world.generation for p in processes)


def _release_last_ones(turn: Turn, members: list[WorkerId], path: str) -> None:
    """Let them go; the job has no world any more. Where they are only the last ones at their coordinate, the others go
    back to what was saved, with those who come.
    """
    for worker in members:
        scaling.dismiss_last(turn, worker, f"; its state is in {path}" if path else "")
    if turn.world is not None and len(members) < turn.world.world_size:
        turn.keep(final_drain=False)
        return
    left = f"a new worker continues from the checkpoint at {path}" if path else "their state is lost"
    lost_blocks.start_anew(turn, f"the last workers were drained; {left}")
    turn.enter(Phase.WAITING)


# ---- who is slow?


def _settle_speeds(turn: Turn, world: Plan) -> None:
    """Choose another sharing of lanes where steps become shorter by it, and name who is slow."""
    _forget_the_gone(turn)
    passed = turn.now - turn.job.speeds_read_at
    if 0 <= passed < READ_SECONDS:
        return
    turn.change(speeds_read_at=turn.now)
    description, trainers = turn.durable.description, _measured(turn, world)
    if len(trainers) < 2 or description is None or turn.durable.planned:
        return
    _name_the_slow(turn, trainers, min(max(0.0, passed), max(turn.spec.heartbeat_seconds, READ_SECONDS)))
    if description.on_slow is OnSlow.NAME:
        return
    look = Look(turn.now, known_step(turn), world.lanes, description.adds_by_rounds, trainers)
    sharing, since = judge(turn.durable.sharing, turn.job.uneven_since, look)
    turn.change(uneven_since=since)
    if sharing is not turn.durable.sharing:
        turn.keep(sharing=sharing)
        turn.count("shoal_job_rebalances_total")
        turn.note(EventKind.LANES_SHARED, _lanes_sentence(look, bool(sharing.seconds)))
    if description.on_slow is OnSlow.REPLACE:
        _replace_the_slowest(turn, trainers)


def _forget_the_gone(turn: Turn) -> None:
    sharing, roster = turn.durable.sharing, turn.durable.roster
    if sharing.seconds:
        here = frozenset(worker for worker in sharing.seconds if worker in roster and roster[worker].serves)
        if (left := without(sharing, here)) is not sharing:
            turn.keep(sharing=left)


def _measured(turn: Turn, world: Plan) -> list[MeasuredTrainer]:
    """Those of a world in which steps run, each with what a lane takes there; none while that of one is not known."""
    found: list[MeasuredTrainer] = []
    for cell in world.cells if world.homes else [(rank,) for rank in _could_train(turn, world)]:
        members = [turn.process(world.members[rank].worker) for rank in cell]
        by_seconds = [
            (process.telemetry.lane_seconds, process.worker)
            for process in members
            if process is not None and process.status.generation == world.generation
        ]
        if len(by_seconds) < len(cell) or not min(by_seconds)[0] or not world.steps:
            return []
        by_seconds.sort(reverse=True)
        workers = tuple(worker for _, worker in by_seconds)
        found.append(MeasuredTrainer(workers, len(world.lanes_of(cell[0])), by_seconds[0][0]))
    return found


def _could_train(turn: Turn, world: Plan) -> list[int]:
    """The ranks with lanes, and of those that have none for their speed, which tell what a lane takes all the same."""
    by_speed, ranks = turn.durable.sharing.seconds, world.ranks
    staying = [rank for rank in ranks if not turn.record(world.members[rank].worker).leaving]
    idle = {rank for rank in staying[: turn.durable.trainers or None] if world.members[rank].worker in by_speed}
    return [rank for rank in ranks if world.lanes_of(rank) or rank in idle]


def _lanes_sentence(look: Look, by_speed: bool) -> str:
    """What changes, and what is gained by it."""
    best = look.best
    gained = f"the lanes of a step take {look.seconds_with(best):.2f} s in place of {look.seconds_now:.2f} s"
    if not by_speed:
        return f"lanes are shared evenly again; {gained}"
    changed = []
    for one, count in sorted(zip(look.trainers, best, strict=True), key=lambda pair: -pair[0].seconds):
        if count != one.lanes:
            takes = f"{one.seconds * 1e3:.0f} ms a lane"
            changed.append(f"{one.workers[0]} is to train {plural(count, 'lane')} in place of {one.lanes} ({takes})")
    more = f" and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
    return f"lanes are shared by speed: {', '.join(changed[:MOST_NAMED])}{more}; {gained}"


def _ratios(trainers: Sequence[MeasuredTrainer]) -> list[tuple[MeasuredTrainer, float, float]]:
    """Each with the median of the others, and how many times as long it takes; the fastest first."""
    in_order = sorted(trainers, key=lambda one: one.seconds)
    others = len(in_order) - 1
    found = []
    for place, one in enumerate(in_order):
        low, high = ((others - 1) // 2, others // 2)
        usual = (in_order[low + (low >= place)].seconds + in_order[high + (high >= place)].seconds) / 2
        found.append((one, usual, one.seconds / usual))
    return found


def _name_the_slow(turn: Turn, trainers: Sequence[MeasuredTrainer], passed: float) -> None:
    """`passed`: seconds of training since the last look. A pause makes no worker slow for longer."""
    job, slow_for, named = turn.job, dict[str, float](), set[str]()
    for one, usual, ratio in _ratios(trainers):
        worker, takes = one.workers[0], f"takes {one.seconds * 1e3:.0f} ms a lane, the others {usual * 1e3:.0f} ms"
        is_named = worker in job.named_slow
        if ratio >= SLOW:
            slow_for[worker] = job.slow_for[worker] + passed if worker in job.slow_for else 0.0
            named |= {worker} if is_named or slow_for[worker] >= SLOW_SECONDS else set()
        if (worker in named) == is_named:
            continue
        for_seconds = f", for {slow_for[worker]:.0f} s" if worker in named else ": it is not slow any more"
        turn.note(EventKind.SLOW, f"worker {worker} {takes}{for_seconds}", worker, lane_seconds=one.seconds)
    turn.change(slow_for=slow_for, named_slow=frozenset(named))


def _replace_the_slowest(turn: Turn, trainers: Sequence[MeasuredTrainer]) -> None:
    """Drain it where a launcher starts another one, seldom: the next one may be as slow."""
    at = turn.durable.sharing.replaced_at
    if not turn.spec.traits.starts or (at is not None and turn.now - at < REPLACED_SECONDS):
        return
    one, usual, ratio = _ratios(trainers)[-1]
    slow_for = turn.job.slow_for.get(one.workers[0], 0.0)
    if ratio >= VERY_SLOW and slow_for >= VERY_SLOW_SECONDS and not turn.record(one.workers[0]).leaving:
        why = f"it takes {one.seconds * 1e3:.0f} ms a lane, the others {usual * 1e3:.0f} ms, for {slow_for:.0f} s"
        turn.keep(sharing=replace(turn.durable.sharing, replaced_at=turn.now))
        scaling.drain(turn, one.workers[0], Leaving.DRAIN, scaling.SCALE_DOWN_GRACE, f"{why} (on_slow is replace)")
