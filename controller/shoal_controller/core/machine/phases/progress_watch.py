"""The progress watch: all are heard, and yet no vote passes, a plan is not built or a connection breaks. Who has to go?

A connection on which packets are dropped is seen by neither end, so the waits that workers report are examined
(`wait_graph.py`). A broken link breaks the generation at once; a straggler is named, and ends only when its code has
come no further for `stall_seconds`. Votes without a step count as votes, so a paused job is judged like any other.

Of all broken links together the worker on most of them goes, at once (a tie: the younger), with a back-off that
doubles. Where neither end can be spared, because each is the only one that holds some blocks, the job is `stalled`,
names the pair and tries again, until `stall_seconds` are over.

A connection that breaks is reported by its ends. One break is weather: the world is built anew. After two generations
broken by the same pair, with no worker lost, the one that was named more often goes (a tie: the younger).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from shoal_protos.activity import Activity, StepPhase
from shoal_protos.messages import Ending, MemberState, Status
from shoal_protos.plan import Plan, WorkerId
from shoal_protos.text import plural

from shoal_controller.core.machine.durable import LinkFault
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.job import Attempt, Job, Process
from shoal_controller.core.machine.phases import places, scaling
from shoal_controller.core.machine.phases.next_message import is_member, send_if_due
from shoal_controller.core.machine.phases.progress import step_seconds_median
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.turn import Turn
from shoal_controller.core.machine.wait_graph import Activities, BrokenLink, broken_links, stragglers

SLOW = 10.0
"""A world may take so many times its median step, and its slowest piece of a message, before it is looked into."""
PATIENCE = 2
"""How many generations the same pair may break."""
FIRST_BACKOFF = 10.0
LONGEST_BACKOFF = 3600.0

Reports = tuple[tuple[WorkerId, WorkerId], ...]


# ---- in every tick


def update(turn: Turn) -> None:
    """Notice that a vote has passed. While no world may train, none is expected."""
    job, world = turn.job, turn.world
    if world is None or job.attempt is not None:
        return turn.change(last_vote_at=turn.now)
    processes = (job.processes.get(member.worker) for member in world.members)
    voted = max(((p.status.generation, p.status.boundaries) for p in processes if p is not None), default=(0, 0))
    if voted != job.last_vote:
        turn.change(last_vote=voted, last_vote_at=turn.now, named_stragglers=frozenset())
    return None


# ---- the world that may train


def is_standing_still(job: Job, now: float) -> bool:
    """Whether no vote has passed for longer than the limit."""
    quiet = now - _last_vote_at(job)
    return quiet > job.spec.progress_seconds and quiet > limit_seconds(job)


def limit_seconds(job: Job) -> float:
    """The limit while steps run: at any pace that workers report, `stall_seconds` are enough."""
    slow_steps = min(SLOW * (step_seconds_median(job) or 0.0), job.spec.stall_seconds)
    return max(slow_steps, building_limit_seconds(job))


def building_limit_seconds(job: Job) -> float:
    """Where no step is under way."""
    slowest = max((process.activity.slowest_piece_seconds for process in job.processes.values()), default=0.0)
    return max(job.spec.progress_seconds, min(SLOW * slowest, job.spec.stall_seconds))


def _last_vote_at(job: Job) -> float:
    return max(job.last_vote_at, job.started_at)


def judge_training(turn: Turn, world: Plan) -> tuple[BrokenLink, ...]:
    """Name stragglers, and end those that are stuck. Returns the broken links that hold the world up."""
    if not is_standing_still(turn.job, turn.now):
        return ()
    update(turn)  # a world may have begun since the last tick
    if not is_standing_still(turn.job, turn.now) or not _all_are_heard(turn.job, world, turn.now):
        return ()
    activities = _activities(turn.job, world)
    links = _links(turn, activities, limit_seconds(turn.job))
    if not links:
        late = stragglers(activities)
        _name_stragglers(turn, late)
        for worker in late:
            _end_if_stuck(turn, worker)
    return links


def _all_are_heard(job: Job, world: Plan, now: float) -> bool:
    """Silence is the failure detector's affair."""
    patience = job.spec.heartbeat_seconds * job.spec.suspect_after
    processes = [job.processes.get(member.worker) for member in world.members]
    return all(p is not None and p.connection is not None and now - p.last_message_at <= patience for p in processes)


def _activities(job: Job, world: Plan) -> Activities:
    """What each member does in the world, or in the one before that it cannot leave. A joiner waits in a group. One
    whose script has ended waits for the other scripts.
    """
    processes = (job.processes.get(member.worker) for member in world.members)
    found = {}
    for process in processes:
        if process is not None and not (process.status.ended and job.durable.last_step is None):
            joiner = not process.status.generation
            does = _build(process, world.generation) if joiner else None
            found[process.worker] = _steady(process, does or process.activity)
    return found


def _building(job: Job, plan: Plan) -> Activities:
    """What those who have come do in the group of a plan. What they do in another one meanwhile says nothing of it."""
    processes = (job.processes.get(member.worker) for member in plan.members)
    does = {p.worker: (p, _build(p, plan.generation)) for p in processes if p is not None}
    return {worker: _steady(process, build) for worker, (process, build) in does.items() if build is not None}


def yet_to_build(job: Job, plan: Plan) -> list[WorkerId]:
    """Members of a planned change that have not said that they have built its group."""
    built = {worker for worker, build in _building(job, plan).items() if build.phase > StepPhase.BUILDING}
    return [member.worker for member in plan.members if member.worker not in built]


def _build(process: Process, generation: int) -> Activity | None:
    if process.activity.generation >= generation:
        return process.activity
    return next((build for build in process.builds if build.generation == generation), None)


def _steady(process: Process, activity: Activity) -> Activity:
    """The activity without the time in which the worker was not heard: a frozen one has waited for no other."""
    return replace(activity, seconds=min(activity.seconds, max(0.0, process.last_message_at - process.steady_since)))


def _name_stragglers(turn: Turn, late: dict[WorkerId, float]) -> None:
    """Each once for each time that the world stands still."""
    if not turn.job.named_stragglers.issuperset(late):
        turn.change(named_stragglers=turn.job.named_stragglers.union(late))
        turn.note(EventKind.STRAGGLER, _sentence(turn.job, late, turn.now), next(iter(late)))


def reason(job: Job, now: float) -> str:
    """The workers or links that hold the world up, as a sentence; empty while votes pass."""
    world = job.durable.current
    looked_into = world is not None and job.attempt is None and is_standing_still(job, now)
    if world is None or not looked_into or not _all_are_heard(job, world, now):
        return ""
    activities = _activities(job, world)
    links = broken_links(activities, job.spec.progress_seconds)
    return "; ".join(link.seen for link in links) or _sentence(job, stragglers(activities), now)


def _sentence(job: Job, late: dict[WorkerId, float], now: float) -> str:
    quiet = now - _last_vote_at(job)
    if not late:
        return f"no vote has passed for {quiet:.0f} s"
    each = ", ".join(f"worker {worker} {_activity_of(job, worker, now)}" for worker in sorted(late))
    return f"no vote has passed for {quiet:.0f} s: waiting for {each}"


def _activity_of(job: Job, worker: WorkerId, now: float) -> str:
    process = job.processes.get(worker)
    if process is None:
        return "(not heard from)"
    if process.status.ended or process.status.done:
        return "(to end its script)"
    return f"(in user code for {now - _last_progress_at(job, process):.0f} s)"


def waited_for_seconds(job: Job, now: float) -> dict[WorkerId, float]:
    """Seconds that others have waited for each worker at the end of their chain; empty while votes pass."""
    world = job.durable.current
    looked_into = world is not None and job.attempt is None and is_standing_still(job, now)
    return stragglers(_activities(job, world)) if world is not None and looked_into else {}


def waits_in_vain(job: Job, process: Process, ended: Process) -> bool:
    """Whether it has waited for one whose script has ended for longer than the limit, and has said so as long after
    that end: what was sent before it has come by then.
    """
    limit, activity = limit_seconds(job), process.activity
    said_after = process.last_message_at - ended.moved_at
    return ended.worker in activity.waits_for and min(_steady(process, activity).seconds, said_after) > limit


# ---- user code that is stuck


def _last_progress_at(job: Job, process: Process) -> float:
    """When its training thread last moved, as far as this controller has seen."""
    return max(process.moved_at, _last_vote_at(job))


def _end_if_stuck(turn: Turn, worker: WorkerId) -> None:
    """Code that has come no further for `stall_seconds` ends, until its worker has given its digests."""
    process, record = turn.process(worker), turn.record(worker)
    if process is None or process.status.done or not record.serves:
        return
    still = turn.now - _last_progress_at(turn.job, process)
    if still <= turn.spec.stall_seconds:
        return
    how = Ending.REPLACED if record.launched else Ending.START_OVER
    why = f"worker {worker} is evicted: its script has made no progress for {still:.0f} s (stall_seconds)"
    scaling.dismiss(turn, worker, how, why)
    send_if_due(turn, worker)
    if record.launched:
        places.kill(turn, worker)  # a thread that is stuck does not end when it is told to


# ---- worlds that are being made


def broken_links_in_building(turn: Turn, plan: Plan, since: float) -> tuple[BrokenLink, ...]:
    """The broken links that keep a plan from being built."""
    if turn.now - since <= turn.spec.progress_seconds:
        return ()
    limit = building_limit_seconds(turn.job)
    if turn.now - since <= limit or not _all_are_heard(turn.job, plan, turn.now):
        return ()
    return _links(turn, _building(turn.job, plan), limit)


def _links(turn: Turn, activities: Activities, limit: float) -> tuple[BrokenLink, ...]:
    """As soon as one is found, all that are nearly as old: who is on most of them does not hang on whose heartbeat came
    first.
    """
    if not broken_links(activities, limit):
        return ()
    return broken_links(activities, max(limit / 2, limit - 2 * turn.spec.heartbeat_seconds))


# ---- broken links: who goes, for how long, and what happens where no end can be spared


def links_sentence(links: Iterable[BrokenLink]) -> str:
    """Both ends of each link, and what was seen."""
    return "; ".join(f"workers {link.waiting} and {link.peer} cannot reach each other: {link.seen}" for link in links)


def most_blamed(turn: Turn, links: Iterable[BrokenLink]) -> list[WorkerId]:
    """The ends of the links: the one on most of them first, at a tie the younger."""
    named = Counter(end for link in links for end in link.ends)
    return sorted(named, key=lambda worker: (named[worker], turn.record(worker).join_order), reverse=True)


def judge_links(turn: Turn, attempt: Attempt, can_be_spared: Callable[[WorkerId], bool]) -> Attempt:
    """All who may hold something have stopped: one of those who cannot reach each other stays outside.

    Not where a third was waited for meanwhile: the links may carry again, and if not, the next group is not built.
    """
    are_recent = turn.now - attempt.links_seen_at <= turn.spec.progress_seconds
    links = [link for link in attempt.links if are_recent and all(turn.record(end).serves for end in link.ends)]
    if not links:
        return attempt if attempt.reports else replace(attempt, links=(), inseparable="")
    blamed = most_blamed(turn, links)
    spared = next((worker for worker in blamed if can_be_spared(worker)), None)
    if spared is not None:
        quarantine(turn, spared, _why_blamed(spared, links))
        return replace(attempt, links=(), inseparable="")
    since = attempt.inseparable_since if attempt.inseparable else turn.now
    both = " and ".join(sorted(links[0].ends))
    why = f"{both} cannot reach each other, and both hold blocks that nobody else has; trying again"
    if not attempt.inseparable:
        turn.note(EventKind.STALLED, why, both=sorted(links[0].ends))
    elif turn.now - since > turn.spec.stall_seconds:
        scaling.give_up(
            turn, blamed[0], f"{_why_blamed(blamed[0], links)} for {turn.now - since:.0f} s (stall_seconds)"
        )
        return replace(attempt, links=(), inseparable="")
    return replace(attempt, links=(), inseparable=why, inseparable_since=since)


def _why_blamed(worker: WorkerId, links: Iterable[BrokenLink]) -> str:
    others = sorted({end for link in links if worker in link.ends for end in link.ends} - {worker})
    return f"it cannot reach {', '.join(others)}"


def delay_most_blamed(turn: Turn, asked: frozenset[WorkerId], links: Iterable[BrokenLink]) -> frozenset[WorkerId]:
    """No worker holds anything yet: the one on most of the links starts later. Returns the others."""
    blamed = most_blamed(turn, links)[0]
    seconds = back_off(turn, blamed)
    turn.note(EventKind.KEPT_OUT, f"worker {blamed} may join in {seconds:g} s: {_why_blamed(blamed, links)}", blamed)
    return asked - {blamed}


def stall(turn: Turn, attempt: Attempt) -> None:
    """A job that tries again with two who could not reach each other is stalled, and says so."""
    if attempt.inseparable:
        turn.enter(Phase.STALLED, attempt.inseparable)


def keep_out(turn: Turn, world: Plan, links: Iterable[BrokenLink]) -> bool:
    """A planned change cannot be built: its joiner on most broken links comes again after a back-off. False: the links
    are between members.
    """
    joiners = [worker for worker in most_blamed(turn, links) if not is_member(world, worker)]
    if joiners and not is_backing_off(turn, joiners[0]):
        seconds = back_off(turn, joiners[0])
        turn.note(
            EventKind.KEPT_OUT, f"{links_sentence(links)}; {joiners[0]} may join again in {seconds:g} s", joiners[0]
        )
    return bool(joiners)


# ---- connections that break: whom to quarantine when it is always the same two


def reports(turn: Turn, plan: Plan, building: bool) -> Reports:
    """Pairs of a world's member and the peer to which it says its connection broke: in training, or in building."""
    found = []
    for member in plan.members:
        process = turn.process(member.worker)
        if process is None or not process.status.broken:
            continue
        status = process.status
        if building:
            built = status.promised == plan.generation and status.state in (MemberState.BUILDING, MemberState.READY)
            peers = [peer for peer in status.broken if built and is_member(plan, peer)]
        else:
            peers = _broken_in_training(plan, status)
        found += [(member.worker, peer) for peer in peers]
    return tuple(found)


def _broken_in_training(plan: Plan, status: Status) -> list[WorkerId]:
    """The peers it names. A member that the planned change has not reached speaks of the world before: it is stuck."""
    if status.state is not MemberState.TRAINING:
        return []
    behind = 0 < status.generation < plan.generation
    return [peer for peer in status.broken if behind or is_member(plan, peer)]


def reports_sentence(broken: Reports) -> str:
    reporter, peer = broken[0]
    more = f" (and {plural(len(broken) - 1, 'more report')})" if len(broken) > 1 else ""
    return f"worker {reporter} says that its connection to {peer} broke{more}"


def judge_reports(turn: Turn, attempt: Attempt) -> None:
    """All who may hold something have stopped: were all of the broken world among them, its reports count."""
    world = turn.world
    if not attempt.reports or world is None:
        return
    if any(not turn.record(member.worker).serves for member in world.members):
        return  # someone was lost: an abort breaks its peers' connections too
    durable = dict(turn.durable.link_faults)
    for pair in dict.fromkeys("|".join(sorted(pair)) for pair in attempt.reports):
        before = durable.get(pair, LinkFault(0, {}))
        named = Counter(before.blame_counts)
        named.update(peer for reporter, peer in attempt.reports if "|".join(sorted((reporter, peer))) == pair)
        durable[pair] = LinkFault(before.times + 1, dict(named))
    turn.keep(link_faults=durable)
    for pair, fault in durable.items():
        if fault.times >= PATIENCE:
            _quarantine_blamed(turn, pair, fault)
            return


def _quarantine_blamed(turn: Turn, pair: str, fault: LinkFault) -> None:
    roster = turn.durable.roster
    blamed = max(pair.split("|"), key=lambda worker: (fault.blame_counts.get(worker, 0), roster[worker].join_order))
    why = f"its connection to another member broke {fault.times} generations ({pair.replace('|', ' and ')})"
    quarantine(turn, blamed, why)


def quarantine(turn: Turn, worker: WorkerId, why: str) -> None:
    """It lives, and stays outside of worlds as long as they can do without it; then it comes back."""
    turn.mark(worker, quarantined=True, why=why)
    turn.keep(
        link_faults={name: other for name, other in turn.durable.link_faults.items() if worker not in name.split("|")}
    )
    turn.note(EventKind.LOST, f"worker {worker} is evicted for {back_off(turn, worker):g} s: {why}", worker)


def back_off(turn: Turn, worker: WorkerId) -> float:
    """No planned change takes it in for so many seconds."""
    address = turn.record(worker).address
    again = 0 if is_backing_off(turn, worker) else 1  # needed though it was evicted: the back-off runs already
    times = turn.durable.backoff_counts.get(address, 0) + again
    turn.keep(backoff_counts={**turn.durable.backoff_counts, address: times})
    if again:
        turn.keep(backoff_until={**turn.durable.backoff_until, address: turn.now + _backoff_seconds(times)})
    return _backoff_seconds(times)


def _backoff_seconds(times: int) -> float:
    return min(FIRST_BACKOFF * 2.0 ** (times - 1), LONGEST_BACKOFF)


def forget_departed(turn: Turn) -> None:
    """Forget the link faults of workers that are gone."""
    roster = turn.durable.roster
    alive = {
        name: fault
        for name, fault in turn.durable.link_faults.items()
        if all(worker in roster and roster[worker].serves for worker in name.split("|"))
    }
    if len(alive) != len(turn.durable.link_faults):
        turn.keep(link_faults=alive)


def forget_old_backoffs(turn: Turn) -> None:
    """Forget back-offs that have been over for as long as they lasted, of addresses without a worker."""
    durable = turn.durable
    if not durable.backoff_counts:
        return
    here = {record.address for record in durable.roster.values() if record.ending is None}
    kept = {
        address: times
        for address, times in durable.backoff_counts.items()
        if address in here or turn.now < durable.backoff_until.get(address, 0.0) + _backoff_seconds(times)
    }
    if len(kept) != len(durable.backoff_counts):
        turn.keep(backoff_counts=kept, backoff_until={a: at for a, at in durable.backoff_until.items() if a in kept})


def on_restart(turn: Turn) -> None:
    """A back-off goes on over a controller's restart. A clock that was set back makes none longer than it was."""
    times = turn.durable.backoff_counts
    until = {
        address: min(at, turn.now + _backoff_seconds(times[address]))
        for address, at in turn.durable.backoff_until.items()
    }
    turn.keep(backoff_until=until)


def is_backing_off(turn: Turn, worker: WorkerId) -> bool:
    return turn.now < turn.durable.backoff_until.get(turn.record(worker).address, 0.0)


def has_fault(turn: Turn, worker: WorkerId) -> bool:
    """Whether a worker is one of a pair whose connection broke: let another one build the group."""
    return any(worker in pair.split("|") for pair in turn.durable.link_faults)
