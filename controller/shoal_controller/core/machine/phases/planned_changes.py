"""Planned changes: join, drain, scale, pause, promotion after fills. No pause but the switch, and no controller in it.

A plan is made when what is wanted differs from what the newest plan was asked for. It is stored before it is sent; it
begins when all members of its base vote it, which the controller learns from any status. It is void once another
generation is current.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from shoal_protos.messages import Ending, MemberState, Status
from shoal_protos.plan import Plan, Reason, WorkerId

from shoal_controller.core.machine.durable import Goal, Leaving, Traits
from shoal_controller.core.machine.events import PlannerAnswered
from shoal_controller.core.machine.job import Job, Process
from shoal_controller.core.machine.phases import checkpoints, planner_questions, progress, progress_watch, scaling
from shoal_controller.core.machine.phases.next_message import send_if_due
from shoal_controller.core.machine.phases.planner_questions import kept_blocks
from shoal_controller.core.machine.turn import Turn
from shoal_controller.core.machine.wait_graph import BrokenLink
from shoal_controller.core.planning.planner import Candidate, same_world
from shoal_controller.core.planning.seats import Seated, first_to_give_way, with_room

OUTSTANDING = 2
"""How many planned changes of one base may wait whose members are all here; more are made when one has begun."""
MOST_PLANNED = 16
"""How many in all: one that waits for somebody who is gone will hardly begin, but nobody knows that it has not."""


# ---- a planned change begins


def on_status(turn: Turn, status: Status) -> None:
    on_generation_seen(turn, status.generation)


def on_generation_seen(turn: Turn, generation: int) -> None:
    """Somebody is in a generation that was planned: all of its base have voted it, so it is the current one now."""
    for plan in turn.durable.planned:
        if plan.generation == generation:
            void = [other for other in turn.durable.planned if other.base != generation and other is not plan]
            turn.keep(current=plan, planned=tuple(p for p in turn.durable.planned if p.base == generation))
            for other in void:
                progress.count_resize(turn, other.reason, "superseded")
            if turn.durable.scaled_up and plan.world_size >= turn.durable.wanted:
                turn.keep(scaled_up=False)
            _set_goal(turn, turn.job.goals.get(generation), plan)
            checkpoints.on_opened(turn, generation)
            progress.on_begun(turn, plan)
            return


def on_opened(turn: Turn, plan: Plan, asked_for: Goal | None) -> None:
    """A world made from inventories was opened: it is what was asked for."""
    _set_goal(turn, asked_for, plan)


def goal_of(turn: Turn, plan: Plan, candidates: Iterable[Candidate]) -> Goal:
    """What a plan made from inventories was asked for, of those who are in it."""
    leaving = {candidate.member.worker: candidate.leaving for candidate in candidates}
    speed = turn.durable.lane_seconds
    pool = [Traits(m.worker, leaving.get(m.worker, False), speed(m.worker)) for m in plan.members]
    return Goal(_by_age(turn, pool), plan.steps, promote=False, trainers=turn.durable.trainers)


def _set_goal(turn: Turn, goal: Goal | None, plan: Plan) -> None:
    """What the plan was asked for is fulfilled, as far as it took part in it: only what is new asks for another one."""
    if goal is not None:
        pool = tuple(traits for traits in goal.pool if traits.worker in plan.workers)
        goal = Goal(pool, plan.steps, promote=False, trainers=goal.trainers)
    turn.change(goal=goal, goals={})


# ---- a planned change is made


def settle(turn: Turn, world: Plan) -> None:
    """Ask for a plan where what is wanted has changed; whoever lacks the newest one gets it with the next heartbeat."""
    _give_up_on_joiners(turn, world)
    answer = planner_questions.take(turn)
    if answer is not None:
        _on_answer(turn, world, answer)
    if planner_questions.is_busy(turn) or _enough_are_planned(turn) or not _all_in(turn, world):
        return
    _make_room(turn, world)
    joiners = waiting_joiners(turn, world)
    goal = _goal(turn, world, joiners)
    if goal == turn.job.goal:
        return
    turn.change(goal=goal)
    number = turn.durable.last_generation + 1
    question = planner_questions.change_question(turn, world, joiners, number, _reason(turn, world, joiners))
    planner_questions.ask(turn, question, goal)


def _on_answer(turn: Turn, world: Plan, event: PlannerAnswered) -> None:
    """Make the answer the newest planned change, unless it would be wrong now: then what is wanted is asked for again.

    What was filled meanwhile, and who has come since, is the next question.
    """
    plan, goal = event.answer, event.asked.goal
    if not isinstance(plan, Plan) or goal is None or not _is_right_now(turn, world, plan):
        return turn.change(goal=None) if turn.job.goal == goal else None
    newest = turn.durable.planned[-1] if turn.durable.planned else world
    if same_world(plan, newest) or (newest is world and _only_fills_left(plan, world)):
        return None
    turn.keep(last_generation=plan.generation, planned=(*turn.durable.planned, plan))
    turn.change(goals={**turn.job.goals, plan.generation: goal}, planned_at=turn.now)
    progress.on_planned(turn, plan, newest)
    for worker in dict.fromkeys(member.worker for member in (*world.members, *plan.members)):
        send_if_due(turn, worker)
    return None


def _is_right_now(turn: Turn, world: Plan, plan: Plan) -> bool:
    """Whether a plan still has the base and the number that it was made for, and all its members."""
    next_one = plan.base == world.generation and plan.generation == turn.durable.last_generation + 1
    return next_one and not planner_questions.has_lost_a_member(turn, plan)


def _enough_are_planned(turn: Turn) -> bool:
    plans = turn.durable.planned
    live = sum(all(turn.record(member.worker).serves for member in plan.members) for plan in plans)
    return live >= OUTSTANDING or len(plans) >= MOST_PLANNED


def judge_building(turn: Turn, world: Plan) -> tuple[BrokenLink, ...]:
    """Keep a joiner that cannot be reached outside for a while: without it the newest plan is void. Returns the broken
    links between members that keep the plan from being built.
    """
    if not turn.durable.planned:
        return ()
    links = progress_watch.broken_links_in_building(turn, turn.durable.planned[-1], _planned_at(turn.job))
    return () if progress_watch.keep_out(turn, world, links) else links


def _planned_at(job: Job) -> float:
    """What an earlier controller has planned gets its time anew."""
    return max(job.planned_at, job.started_at)


def reason(job: Job, now: float) -> str:
    """Whom the newest planned change waits for; empty where none is planned, and the planner does not fail."""
    if job.planner.failures:
        return planner_questions.sentence(job)
    world, plans = job.durable.current, job.durable.planned
    if world is None or not plans:
        return ""
    plan, since = plans[-1], _planned_at(job)
    missing = progress_watch.yet_to_build(job, plan) if plan.members != world.members else []
    whom = (
        f"waiting for {progress.names_or_count(missing)} to build its group"
        if missing
        else "it begins with the next vote"
    )
    return f"generation {plan.generation} is planned ({plan.reason.value}); {whom} ({now - since:.0f} s so far)"


def _give_up_on_joiners(turn: Turn, world: Plan) -> None:
    """A change that does not begin within `stall_seconds` goes on without its joiners; nobody else waits for them."""
    plans = turn.durable.planned
    if not plans or turn.now - _planned_at(turn.job) <= turn.spec.stall_seconds:
        return
    why = f"generation {plans[-1].generation} did not begin within {turn.spec.stall_seconds:g} s (stall_seconds)"
    for member in plans[-1].members:
        if member.worker not in world.workers and turn.record(member.worker).serves:
            how = Ending.REPLACED if turn.record(member.worker).launched else Ending.START_OVER
            scaling.dismiss(turn, member.worker, how, why)
            send_if_due(turn, member.worker)
    turn.change(planned_at=turn.now)


def _all_in(turn: Turn, world: Plan) -> bool:
    """Whether every member has been seen in the world that the plan is to replace."""
    for member in world.members:
        process = turn.process(member.worker)
        if process is None or process.status.generation != world.generation:
            return False
    return True


def waiting_joiners(turn: Turn, world: Plan) -> list[WorkerId]:
    """Who may become a member, as many as there is room for."""
    joiners, staying = _ready_and_staying(turn, world)
    return with_room(turn.durable.cell, joiners, staying, most_of_each(turn)) if joiners else []


def _make_room(turn: Turn, world: Plan) -> None:
    """Drain a member that is in no cell, where its place is what a joiner needs who completes one on its host."""
    joiners, staying = _ready_and_staying(turn, world) if turn.durable.cell.tight else ([], [])
    if joiners and (found := first_to_give_way(turn.durable.cell, joiners, staying, most_of_each(turn))):
        joiner, member = found
        why = f"worker {joiner.worker} completes a part of a cell on {joiner.host}, and needs its place"
        scaling.drain(turn, member.worker, Leaving.DRAIN, scaling.SCALE_DOWN_GRACE, why)


def _ready_and_staying(turn: Turn, world: Plan) -> tuple[list[Seated], list[Seated]]:
    """Who is ready to become a member, and the members that stay, those in cells first; each oldest first."""
    members = world.workers
    expected = turn.durable.planned[-1].workers if turn.durable.planned else frozenset()
    ready = [
        process
        for process in turn.serving()
        if process.status.state in (MemberState.WAITING, MemberState.JOINING)
        and process.worker not in members
        and (_is_reachable(process) or process.worker in expected)
        and not turn.record(process.worker).leaving
        and not progress_watch.is_backing_off(turn, process.worker)
    ]
    if not ready or any(process.status.done for process in turn.serving() if process.worker in members):
        return [], []  # after the last step no worker joins any more
    joiners = sorted((process.worker for process in ready), key=lambda worker: turn.record(worker).join_order)
    in_cells = frozenset(chain.from_iterable(world.workers_of_cells))
    staying = [worker for worker in members if not turn.record(worker).leaving]
    staying.sort(key=lambda worker: (worker not in in_cells, turn.record(worker).join_order))
    return seated(turn, joiners), seated(turn, staying)


def _is_reachable(process: Process) -> bool:
    return process.connection is not None and (process.ping is None or not process.ping.suspected)


def most_of_each(turn: Turn) -> int:
    """How many members a coordinate may have: those that make the most cells that the job can use."""
    most = turn.durable.description.most_members if turn.durable.description is not None else turn.durable.wanted
    return min(turn.durable.bounds.most or most, most) // turn.durable.cell.processes


def seated(turn: Turn, workers: Iterable[WorkerId]) -> list[Seated]:
    """Workers with their coordinates and hosts."""
    return [Seated(one.worker, one.coordinate, one.host) for one in map(turn.record, workers)]


def _goal(turn: Turn, world: Plan, joiners: list[WorkerId]) -> Goal:
    pool = [_traits(turn, worker) for worker in (*(member.worker for member in world.members), *joiners)]
    promote = bool(world.fills) and fills_done(turn, world)
    steps = planner_questions.steps_run(turn, [traits.worker for traits in pool])
    return Goal(_by_age(turn, pool), steps, promote, turn.durable.trainers)


def _by_age(turn: Turn, pool: list[Traits]) -> tuple[Traits, ...]:
    return tuple(sorted(pool, key=lambda traits: turn.record(traits.worker).join_order))


def _traits(turn: Turn, worker: WorkerId) -> Traits:
    return Traits(worker, bool(turn.record(worker).leaving), turn.durable.lane_seconds(worker))


def fills_done(turn: Turn, world: Plan) -> bool:
    """Whether every fill of the world is held by its target."""
    statuses = (turn.job.processes[world.members[fill.target].worker].status for fill in world.fills)
    if all(status.boundaries < world.boundaries for status in statuses):
        return False  # as at most ticks: the last slice is still to come
    return all(
        fill.blocks <= kept_blocks(world, fill.target, turn.job.processes[world.members[fill.target].worker].status)
        for fill in world.fills
    )


def _only_fills_left(plan: Plan, world: Plan) -> bool:
    """Whether a plan would only go on with what the world is doing already."""
    planned, under_way = ({(fill.target, fill.blocks) for fill in one.fills} for one in (plan, world))
    return plan.is_like(world) and planned <= under_way


def _reason(turn: Turn, world: Plan, joiners: list[WorkerId]) -> Reason:
    """The most important of the reasons: who goes, then who comes."""
    leaving = {turn.record(member.worker).leaving for member in world.members} - {Leaving.NO}
    if leaving:
        return Reason.SCALE_DOWN if leaving == {Leaving.SCALE_DOWN} else Reason.DRAIN
    if joiners:
        return Reason.SCALE_UP if turn.durable.scaled_up else Reason.JOIN
    return Reason.BALANCE
