"""A world made from inventories: a start, or a recovery after a loss.

PREPARE(n) stops all who may hold something, their inventories make the plan, PLAN(n) brings them together, OPEN(n) lets
them train. Whoever is lost on the way means the next number; a joiner never does.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_protos.messages import Ending, Inventory, MemberState
from shoal_protos.plan import Plan, Reason, WorkerId
from shoal_protos.runs import NO_BLOCKS, Runs, every
from shoal_protos.text import plural

from shoal_controller.core.machine.durable import Goal, Standing
from shoal_controller.core.machine.effects import Persist
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.events import PlannerAnswered
from shoal_controller.core.machine.job import Attempt, AttemptPhase
from shoal_controller.core.machine.phases import (
    checkpoints,
    corruption,
    ending,
    failures,
    fencing,
    lost_blocks,
    planned_changes,
    planner_questions,
    progress,
    progress_watch,
    scaling,
    seating,
)
from shoal_controller.core.machine.phases.fencing import fenced_workers, is_dead, may_still_train, missing_answers
from shoal_controller.core.machine.phases.next_message import inventory_for, send_if_due
from shoal_controller.core.machine.phases.progress import known_step
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.turn import Turn
from shoal_controller.core.machine.wait_graph import BrokenLink
from shoal_controller.core.planning.question import ChangeQuestion, RecoveryQuestion, StartQuestion

LONG_WAIT_SECONDS = 1.0
MOST_NAMES = 8


def begin(turn: Turn, attempt: Attempt) -> None:
    """Give a new number, and ask all who may hold something to stop. It is in the store before anyone hears of it."""
    number = turn.durable.last_generation + 1
    prepare = AttemptPhase.PREPARE
    attempt = replace(attempt, generation=number, since=turn.now, phase=prepare, plan=None, judged=False, waits_for="")
    starting = attempt.start and attempt.reason is not Reason.RESTORE
    turn.enter(Phase.STARTING if starting else Phase.RESIZING)
    turn.keep(last_generation=number)
    turn.change(attempt=attempt, goal=None, detect_seconds=turn.now - attempt.noticed_at)
    turn.note(
        EventKind.PREPARE,
        f"generation {number} is being prepared: {attempt.why}",
        reason=attempt.reason.value,
        detect_seconds=round(turn.now - attempt.noticed_at, 3),
    )
    for worker in fenced_workers(turn):
        send_if_due(turn, worker)


def recover(
    turn: Turn, why: str, noticed: float, reports: progress_watch.Reports = (), links: tuple[BrokenLink, ...] = ()
) -> None:
    """Something broke the world that may train."""
    begin(turn, Attempt(0, Reason.KILL, why, noticed, turn.now, reports=reports, links=links, links_seen_at=turn.now))


def pause(turn: Turn, why: str) -> None:
    """No step more is made with what is held now, not the one under way either, as a planned change would."""
    begin(turn, Attempt(0, Reason.BALANCE, why, turn.now, turn.now))


def start(turn: Turn, workers: list[WorkerId], why: str) -> None:
    """A world of joiners."""
    begin(turn, Attempt(0, Reason.START, why, turn.now, turn.now, start=True, starters=frozenset(workers)))


def retry(turn: Turn, attempt: Attempt, why: str, reports: progress_watch.Reports = ()) -> None:
    """Lost again on the way: the next number."""
    progress.count_resize(turn, attempt.reason, "superseded")
    builder = attempt.plan.members[attempt.plan.builder].worker if attempt.plan is not None else ""
    begin(
        turn,
        replace(
            attempt,
            why=why,
            reports=reports,
            avoided_builders=attempt.avoided_builders | {builder},
            lost_blocks=NO_BLOCKS,
        ),
    )


# ---- an attempt, looked at after every event


def settle(turn: Turn) -> None:
    attempt = turn.job.attempt
    if attempt is None:  # the controller was away in the middle of one
        if turn.world is not None:
            recover(turn, "the controller was restarted during a change", turn.now)
        else:
            turn.enter(Phase.WAITING)
    elif attempt.phase is AttemptPhase.PREPARE:
        _prepare(turn, attempt)
    else:
        _plan(turn, attempt)


def _is_behind(turn: Turn, attempt: Attempt) -> bool:
    """Begin again with what all hold where a worker is in a generation that the number does not exceed, or knows a plan
    beyond it: it was given by a store that was restored from an older state, before that worker was heard. Returns
    whether it has.
    """
    why = fencing.outnumbered(turn, attempt.generation) if turn.world is not None else ""
    if why:
        recover(turn, why, turn.now)
    return bool(why)


def _prepare(turn: Turn, attempt: Attempt) -> None:
    """All who are asked have answered, and no world may train any more: ask for a plan."""
    if _is_behind(turn, attempt):
        return None
    fencing.confirm_absent(turn)
    asked = planner_questions.take(turn)
    if asked is not None and _is_right_now(turn, attempt, asked):
        return _on_answer(turn, attempt, asked)
    if attempt.reason is Reason.RESTORE:
        if not fenced_workers(turn):
            return lost_blocks.start_anew(turn, f"{attempt.why}; nobody is left")
        if absent := turn.durable.absent(fencing.beginners(turn, attempt)):
            return _wait(turn, seating.with_joiners(turn, attempt), f"{absent} has no member")
    elif attempt.start and not turn.durable.are_enough(fenced_workers(turn)):
        return _give_up_start(turn)
    waiting = missing_answers(turn, attempt)
    if waiting:
        _wait(turn, attempt, f"waiting for {_names(waiting)} to stop{fencing.advice_if_gone(turn, waiting)}")
        if _overdue(turn, attempt.since):
            _give_up(turn, waiting, "did not stop")
        return None
    unknown = 0 if attempt.start else fencing.unknown_generation(turn)
    if unknown and fencing.may_others_come(turn):
        return _wait(turn, attempt, f"waiting for others of generation {unknown}, which the store does not know")
    world = None if attempt.start else may_still_train(turn)
    if world is not None:
        alive = [m.worker for m in world.members if not is_dead(turn, m.worker)]
        sentence = f"no member of generation {world.generation} has answered, and {_names(alive)} may be alive"
        _wait(turn, attempt, f"{sentence}: it might still train{fencing.advice_if_gone(turn, alive)}")
        if _overdue(turn, attempt.since):
            for worker in alive:
                scaling.give_up(turn, worker, f"it has been silent for {turn.spec.stall_seconds:g} s")
        return None
    if planner_questions.is_busy(turn):
        return _wait_for_planner(turn, attempt)
    if attempt.start:
        return _ask_for_start(turn, attempt, fencing.beginners(turn, attempt))
    return _ask(turn, attempt)


def _ask_for_start(turn: Turn, attempt: Attempt, workers: list[WorkerId]) -> None:
    """Ask for a world of these; later, where an earlier question is out, or a coordinate has no member yet."""
    if not planner_questions.is_busy(turn) and not turn.durable.absent(workers):
        planner_questions.ask(turn, planner_questions.start_question(turn, workers, attempt))


def _wait_for_planner(turn: Turn, attempt: Attempt) -> None:
    if planner_questions.has_failed_for(turn, turn.spec.stall_seconds, attempt.since):
        why = f"the planner has failed for {turn.spec.stall_seconds:g} s (stall_seconds): {turn.job.planner.why}"
        return ending.fail(turn, f"generation {attempt.generation} cannot be planned: {why}.")
    asked_at = turn.job.planner.asked_at
    if asked_at is None or turn.now - asked_at >= LONG_WAIT_SECONDS:
        _wait(turn, attempt, planner_questions.sentence(turn.job))
    return None


def _give_up_start(turn: Turn) -> None:
    """Give up a start: not enough of its workers are left."""
    least = turn.durable.bounds.least
    turn.note(
        EventKind.WAITING,
        f"only {plural(len(fenced_workers(turn)), 'worker')} left to start with, min_workers is {least}",
    )
    turn.enter(Phase.WAITING)
    turn.change(attempt=None)


def _ask(turn: Turn, attempt: Attempt) -> None:
    """Ask for a plan from the inventories, unless all have to go back or nobody can begin."""
    inventories = _inventories(turn, attempt)
    if attempt.lost_blocks and attempt.respondents == inventories.keys():
        return _go_back_unless_blocks_may_come(turn, attempt)
    committed_in = max([turn.durable.committed_in, *(inventory.committed_in for inventory in inventories.values())])
    counting = {
        worker: inventory
        for worker, inventory in inventories.items()
        if inventory.step >= 0 and counts(inventory, committed_in, turn.durable.first_valid_generation)
    }
    attempt = replace(attempt, committed_in=committed_in, respondents=frozenset(inventories))
    attempt = progress_watch.judge_links(
        turn, attempt, lambda worker: planner_questions.can_spare(turn, counting, worker)
    )
    counting = {worker: inventory for worker, inventory in counting.items() if turn.record(worker).serves}
    if not attempt.judged:
        progress_watch.judge_reports(turn, attempt)
    attempt = replace(attempt, judged=True, lost_blocks=NO_BLOCKS)  # what was lost without those who came since
    turn.change(attempt=attempt)
    if turn.durable.corruption.restoring:
        return _go_back(turn, attempt, turn.durable.corruption.restoring)
    question = planner_questions.recovery_question(turn, counting, attempt)
    if question is not None:
        return planner_questions.ask(turn, question)
    assert turn.durable.description is not None
    return _on_lost_blocks(turn, attempt, every(turn.durable.description.blocks))


def _is_right_now(turn: Turn, attempt: Attempt, asked: PlannerAnswered) -> bool:
    """Whether the planner's answer is to this attempt, and nothing has happened since that makes it wrong."""
    question, answer = asked.asked.question, asked.answer
    if isinstance(question, ChangeQuestion) or question.request.generation != attempt.generation:
        return False
    if isinstance(question, RecoveryQuestion) and (attempt.start or turn.durable.corruption.restoring):
        return False  # all are to go back to a checkpoint
    if isinstance(question, StartQuestion) and not planner_questions.begins_where_all_would(turn, question):
        return False
    if isinstance(answer, Runs):  # whoever has come since an earlier question may hold them
        return asked.asked.number == turn.job.planner.asked
    return not planner_questions.has_lost_a_member(turn, answer)


def _on_answer(turn: Turn, attempt: Attempt, asked: PlannerAnswered) -> None:
    """The planner has answered: carry the plan out, or look where the blocks may be that nobody has."""
    question, answer = asked.asked.question, asked.answer
    assert not isinstance(question, ChangeQuestion)
    if isinstance(answer, Runs):
        return _on_lost_blocks(turn, attempt, answer)
    if isinstance(question, RecoveryQuestion):
        inventories = _inventories(turn, attempt)
        answered_by = {worker: inventories[worker] for worker in inventories if worker in attempt.respondents}
        _dismiss_stale(turn, answered_by, attempt.committed_in)
    _send(turn, answer, planned_changes.goal_of(turn, answer, question.everyone))
    return progress_watch.stall(turn, attempt) if isinstance(question, RecoveryQuestion) else None


def _on_lost_blocks(turn: Turn, attempt: Attempt, blocks: Runs) -> None:
    if not _has_trained(turn, attempt.committed_in):
        return _begin_again(turn, attempt, sorted(_inventories(turn, attempt)))
    attempt = replace(attempt, lost_blocks=blocks)
    turn.change(attempt=attempt)
    lost_blocks.stall(turn, attempt)
    return _go_back_unless_blocks_may_come(turn, attempt)


def _has_trained(turn: Turn, committed_in: int) -> bool:
    """Whether a step was committed since the job began, or began anew, where the last one was in this generation."""
    return committed_in >= max(turn.durable.first_valid_generation, 1)


def _go_back_unless_blocks_may_come(turn: Turn, attempt: Attempt) -> None:
    if not lost_blocks.may_come_back(turn, attempt) and lost_blocks.give_up(turn, attempt):
        _go_back(turn, attempt, turn.durable.reason)


def _go_back(turn: Turn, attempt: Attempt, why: str) -> None:
    """All who are left begin at the newest checkpoint. The world before stays on record until the new one is open: a
    controller that is started again in between finds the same blocks lost, or corrupt.
    """
    if not any(record.serves for worker, record in turn.durable.roster.items() if worker in attempt.respondents):
        return lost_blocks.start_anew(turn, f"{why}; nobody is left")
    failures.on_world_lost(turn)
    if turn.durable.phase.is_over:
        return None
    turn.keep(step=max(turn.durable.step, known_step(turn)))  # a later life must see that all have gone back
    turn.do(Persist())
    attempt = replace(
        attempt,
        reason=Reason.RESTORE,
        why=why,
        start=True,
        starters=attempt.respondents,
        lost_blocks=NO_BLOCKS,
        back_from=turn.durable.step,
    )
    turn.change(attempt=attempt)
    turn.enter(Phase.RESIZING)
    return _ask_for_start(turn, attempt, fencing.beginners(turn, attempt))


def _begin_again(turn: Turn, attempt: Attempt, workers: list[WorkerId]) -> None:
    """No step was ever committed, so nothing is lost: those who are left start, if they make a cell; else others."""
    absent = turn.durable.absent(workers)
    if workers and not absent:
        return _ask_for_start(turn, attempt, workers)
    failures.on_world_lost(turn)
    if turn.durable.phase.is_over:
        return None
    turn.enter(Phase.WAITING)
    turn.keep(current=None, planned=())
    lost = f"{absent} has lost every worker" if workers else "every worker was lost"
    turn.note(EventKind.WAITING, f"{lost} before the first step; waiting for others")
    return turn.change(attempt=None, goal=None, ready_since=None)


def _inventories(turn: Turn, attempt: Attempt) -> dict[WorkerId, Inventory]:
    found = {worker: inventory_for(turn.process(worker), attempt.generation) for worker in fenced_workers(turn)}
    return {worker: inventory for worker, inventory in found.items() if inventory is not None}


def counts(inventory: Inventory, committed_in: int, floor: int) -> bool:
    """● An inventory counts if no step was committed in a later generation than its worker's."""
    return inventory.generation >= committed_in and (inventory.generation >= floor or inventory.generation == 0)


def _dismiss_stale(turn: Turn, inventories: dict[WorkerId, Inventory], committed_in: int) -> None:
    for worker, inventory in inventories.items():
        if inventory.step >= 0 and not counts(inventory, committed_in, turn.durable.first_valid_generation):
            dismiss_stale(turn, worker, inventory.generation, committed_in)


def dismiss_stale(turn: Turn, worker: WorkerId, generation: int, committed_in: int) -> None:
    """A thawed worker whose world went on without it changes nothing any more."""
    record = turn.record(worker)
    how = Ending.DRAINED if record.leaving else Ending.REPLACED if record.launched else Ending.START_OVER
    since = f"a step was committed in generation {committed_in}"
    if committed_in <= generation:
        since = f"the job began again from a checkpoint in generation {turn.durable.first_valid_generation}"
    why = f"worker {worker} is in generation {generation}, but {since}"
    scaling.dismiss(turn, worker, how, why)
    send_if_due(turn, worker)


def _send(turn: Turn, plan: Plan, goal: Goal) -> None:
    attempt = turn.job.attempt
    assert attempt is not None
    sent = replace(attempt, phase=AttemptPhase.PLAN, plan=plan, goal=goal, planned_at=turn.now, waits_for="")
    turn.change(attempt=sent)
    names = _names([member.worker for member in plan.members])
    step = plan.recovery.step if plan.recovery is not None else 0
    turn.note(
        EventKind.PLAN,
        f"generation {plan.generation} is planned: {names}, from step {step}{_waited(turn, attempt, attempt.since)}",
        prepare_seconds=round(turn.now - attempt.since, 3),
    )
    for member in plan.members:
        turn.mark(member.worker, quarantined=False)  # one that was evicted for its connection, but is needed
        send_if_due(turn, member.worker)


def _plan(turn: Turn, attempt: Attempt) -> None:
    """All members have built the group and caught up: open."""
    plan = attempt.plan
    assert plan is not None
    if _is_behind(turn, attempt):
        return None
    gone = [member.worker for member in plan.members if not turn.record(member.worker).serves]
    if gone:
        return retry(turn, attempt, f"{_names(gone)} lost while generation {plan.generation} was being built")
    if plan.reason is Reason.START and not attempt.start and _has_trained(turn, turn.durable.committed_in):
        # ● who was not heard when the others began again comes back, and they had voted with it
        return retry(turn, attempt, "the first step was committed by a worker that was not heard then")
    reports = progress_watch.reports(turn, plan, building=True)
    if reports:
        why = f"{progress_watch.reports_sentence(reports)} while generation {plan.generation} was being built"
        return retry(turn, attempt, why, reports)
    links = progress_watch.broken_links_in_building(turn, plan, attempt.planned_at)
    if links:
        return _retry_without_unreachable(turn, attempt, plan, links)
    if (found := checkpoints.unreadable(turn, attempt)) is not None:
        worker, checkpoint = found
        checkpoints.drop_unreadable(turn, worker, checkpoint)
        why = f"worker {worker} could not read the checkpoint: {checkpoint.sentence}"
        return _retry_without_checkpoint(turn, attempt, why)
    waiting = [member.worker for member in plan.members if not _is_ready(turn, member.worker, plan)]
    if not waiting:
        return _open(turn, attempt, plan)
    _wait(turn, attempt, f"waiting for {_names(waiting)} to build generation {plan.generation}")
    if _overdue(turn, attempt.planned_at):
        _give_up(turn, waiting, "did not get ready")
    return None


def _retry_without_unreachable(turn: Turn, attempt: Attempt, plan: Plan, links: tuple[BrokenLink, ...]) -> None:
    """Of a start, where nobody holds anything, one goes at once; else when it is known what each holds."""
    why = f"{progress_watch.links_sentence(links)} while generation {plan.generation} was being built"
    if attempt.start:
        attempt = replace(attempt, starters=progress_watch.delay_most_blamed(turn, attempt.starters, links))
        return retry(turn, attempt, why)
    return retry(turn, replace(attempt, links=links, links_seen_at=turn.now), why)


def _retry_without_checkpoint(turn: Turn, attempt: Attempt, why: str) -> None:
    """The one before. Where there is none the job has failed: that what it has saved cannot be read does not mean
    that it has saved nothing, and what it would save from step 0 on would push that out.
    """
    if checkpoints.latest(turn.durable) is None:
        anew = "To begin at step 0, start the job again with `resume: false`."
        return ending.fail(turn, f"{why} There is no other checkpoint. {anew}")
    return retry(turn, attempt, why)


def _is_ready(turn: Turn, worker: WorkerId, plan: Plan) -> bool:
    process = turn.process(worker)
    if process is None:
        return False
    return process.status.state is MemberState.READY and process.status.promised == plan.generation


def _open(turn: Turn, attempt: Attempt, plan: Plan) -> None:
    """The new world may train. Stored first, then said."""
    # of a start: where a job that began anew was to begin, which may be a checkpoint that could not be read
    before = max(turn.durable.step, attempt.back_from if attempt.start else known_step(turn))
    step = plan.recovery.step if plan.recovery is not None else 0
    shown = max(turn.durable.step, step)
    goes_back = _goes_back(turn, plan, step)
    if goes_back:
        # whoever was not there when all went back changes nothing any more
        turn.keep(first_valid_generation=plan.generation)
        progress.return_to(turn, step)
        checkpoints.on_return(turn, step)
        path = plan.recovery.checkpoint if plan.recovery is not None else ""
        checkpoints.give_up_after(turn, path, plan.generation)
        corruption.give_up_from(turn, before)
        shown = step
    if goes_back or attempt.start:
        corruption.on_return(turn)
    checkpoints.on_opened(turn, plan.generation)
    turn.enter(Phase.RUNNING)
    turn.keep(
        current=plan,
        planned=(),
        step=shown,
        final_drain=False,
        anew=None,
        committed_in=max(turn.durable.committed_in, attempt.committed_in),
        last_refusal="",
    )
    turn.change(attempt=None, ready_since=None)
    planned_changes.on_opened(turn, plan, attempt.goal)
    progress.on_opened(turn, plan, max(0, before - step), _waited(turn, attempt, attempt.planned_at))
    for member in plan.members:
        send_if_due(turn, member.worker)


def _goes_back(turn: Turn, plan: Plan, step: int) -> bool:
    """Whether steps that were shown are given up. A world may begin one step before them, where only those who had not
    passed the last vote are left; one that begins earlier is of workers who had taken up a checkpoint when the
    controller died.
    """
    from_checkpoint = plan.recovery is not None and bool(plan.recovery.checkpoint)
    return from_checkpoint or (step < turn.durable.step and plan.reason is Reason.START) or step < turn.durable.step - 1


# ---- waiting has an end


def _wait(turn: Turn, attempt: Attempt, sentence: str) -> None:
    """Say what it waits for; in the history only when it takes long, for then somebody will ask why."""
    since = attempt.waits_since if attempt.waits_for else turn.now
    attempt = replace(attempt, waits_for=sentence, waits_since=since)
    if turn.now - since >= LONG_WAIT_SECONDS and sentence != attempt.announced_wait:
        attempt = replace(attempt, announced_wait=sentence)
        turn.note(EventKind.WAITING, sentence)
    turn.change(attempt=attempt)


def _waited(turn: Turn, attempt: Attempt, since: float) -> str:
    """Whom the others waited for until now: the last sentence names the last."""
    return f"; {attempt.waits_for}: {turn.now - since:.3f} s" if attempt.waits_for else ""


def _overdue(turn: Turn, since: float) -> bool:
    """Every phase has its own time: a plan may be sent only after a long wait for blocks that seemed lost."""
    return turn.now - since > turn.spec.stall_seconds


def _give_up(turn: Turn, workers: list[WorkerId], failure: str) -> None:
    for worker in workers:
        why = f"{failure} within {turn.spec.stall_seconds:g} s (stall_seconds)"
        turn.mark(worker, standing=Standing.LOST, quarantined=True, why=why)
        turn.note(EventKind.LOST, f"worker {worker} is evicted: it {why}", worker)


def _names(workers: list[WorkerId]) -> str:
    more = f" and {len(workers) - MOST_NAMES} more" if len(workers) > MOST_NAMES else ""
    return ", ".join(workers[:MOST_NAMES]) + more
