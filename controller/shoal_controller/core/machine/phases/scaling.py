"""How many workers there are: starting them, replacing them, letting them go.

The launcher fills up to `wanted`. A drain never changes `wanted`, so a drained worker is replaced; what is too many
goes, the youngest cell first. Without a launcher workers come by themselves and only leaving is decided here.

A worker whose machine or pod is to go is drained within what is left, and kept where it does not go after all. Several
signals for one worker are one drain, with the shortest of their graces; one that comes after the others were taken back
counts alone. A drain is cancelled only while every world that may train has the worker: what a plan without it has
begun is not taken back, its replacement goes on.
"""

from __future__ import annotations

from shoal_protos.messages import Drain, Ending, MemberState
from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.durable import Leaving, Standing, WorkerRecord
from shoal_controller.core.machine.effects import Adopt, Spawn
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.events import Endangered, NeverStarted, Preempted, Spared
from shoal_controller.core.machine.phases import failures, fencing, places
from shoal_controller.core.machine.phases.failures import LONGEST_BACKOFF
from shoal_controller.core.machine.phases.next_message import is_member, send_if_due
from shoal_controller.core.machine.phases.progress import known_step
from shoal_controller.core.machine.turn import Turn
from shoal_controller.core.planning import seats
from shoal_controller.core.planning.seats import Seated

LAST_ONE = "there was no worker to take its blocks"
"""Said of a worker whose state goes with it."""
PLACE_ENDED = "another process of its pod has ended, and others have come for both"
LINGER_SECONDS = 60.0
"""How long a process that was told to end may take."""
SCALE_DOWN_GRACE = 30.0


def staying_workers(turn: Turn) -> list[WorkerRecord]:
    """The workers that count towards `wanted`, oldest first: alive as far as is known, and not on their way out."""
    serving = (record for record in turn.durable.roster.values() if record.serves and not record.leaving)
    return sorted(serving, key=lambda record: record.join_order)


def settle(turn: Turn) -> None:
    """Bring the number of processes to `wanted`, where a launcher does it."""
    if not turn.spec.traits.starts or turn.durable.phase.is_over or turn.durable.stopping:
        return
    here = staying_workers(turn)
    wanted = places.whole(turn, turn.durable.wanted + turn.durable.spares + _replacements(turn, here))
    lasting, left_over = places.divided(turn, here)
    present = [record for record in lasting if record.worker in turn.job.processes or not record.incarnation]
    if not _may_be_heard_yet(turn, present):
        too_many = places.too_many(turn, first_to_stay(turn, present, wanted), wanted)
        for record in reversed(too_many):  # a worker that was never heard is no reason to let others go
            drain(turn, record.worker, Leaving.SCALE_DOWN, SCALE_DOWN_GRACE)
    if places.have_come(lasting, wanted):
        for record in reversed(left_over):
            drain(turn, record.worker, Leaving.DRAIN, SCALE_DOWN_GRACE, PLACE_ENDED)
    if turn.now >= turn.durable.spawn_after and not turn.job.seen_to_die:  # how one ended says when to start another
        for _ in range((wanted - len(lasting)) // turn.spec.started_together):
            _spawn(turn)
    _give_up_the_unheard(turn)
    _kill_the_lingering(turn)
    _end_the_evicted(turn)


def _may_be_heard_yet(turn: Turn, present: list[WorkerRecord]) -> bool:
    """Whether some of these, which have not been heard, may be members of a world that the store does not know, at
    coordinates that others lack.
    """
    is_early = fencing.may_others_come(turn) and fencing.unknown_generation(turn) > 0
    return is_early and any(not record.incarnation for record in present)


def first_to_stay(turn: Turn, staying: list[WorkerRecord], wanted: int) -> list[WorkerRecord]:
    """These, oldest first, in the order in which they stay where fewer are wanted: a cell goes whole. Those that have
    no coordinate yet come last.
    """
    cell, world = turn.durable.cell, turn.world
    if cell.processes == 1:
        return places.in_whole(turn, staying)
    seated = [Seated(record.worker, record.coordinate, record.host) for record in staying if record.seated]
    cells = [[world.members[rank].worker for rank in ranks] for ranks in world.cells] if world is not None else []
    first = [turn.record(worker) for worker in seats.first_to_stay(cell, seated, cells, wanted)]
    return places.in_whole(turn, [*first, *(record for record in staying if not record.seated)])


def _replacements(turn: Turn, here: list[WorkerRecord]) -> int:
    """Workers beyond `wanted` that are asked for while some may have to go; never more than can train."""
    if turn.durable.description is None:
        return 0
    most = turn.durable.description.most_members
    room = min(turn.durable.bounds.most or most, most) - turn.durable.wanted - turn.durable.spares
    return max(0, min(sum(record.endangered for record in here), room))


def _kill_the_lingering(turn: Turn) -> None:
    """Kill workers that were told to end, or have said that they failed, and are still there."""
    for worker, since in turn.durable.ending_since.items():
        is_late = turn.now - max(since, turn.job.started_at) > LINGER_SECONDS
        if is_late and not places.has_others(turn, worker):
            turn.note(
                EventKind.KILLED, f"worker {worker} did not end within {LINGER_SECONDS:g} s and is killed", worker
            )
            turn.expect_end(worker)
            places.kill(turn, worker)


def _end_the_evicted(turn: Turn) -> None:
    """A silent worker of a cluster is ended once a world without it has committed a step, never before: until then
    its blocks may be the only ones. On a machine of ours it may thaw and join again; a pod holds what another needs.
    Not where its launcher is about to say how it ended.
    """
    if turn.spec.traits.readmits or turn.world is None or turn.durable.committed_in < turn.world.generation:
        return
    for record in tuple(turn.durable.roster.values()):
        if record.worker in turn.job.seen_to_die:
            continue
        evicted = record.standing is Standing.LOST and record.launched and record.ending is None
        worlds = (turn.durable.current, *turn.durable.planned)
        if evicted and not record.quarantined and not any(is_member(plan, record.worker) for plan in worlds):
            turn.mark(record.worker, ending=Ending.REPLACED)
            turn.expect_end(record.worker)
            places.kill(turn, record.worker)


def _spawn(turn: Turn) -> None:
    """Ask for the processes of one place."""
    for worker in places.new_ids(turn):
        turn.enlist_new(worker, launched=True)
        turn.put("spawned_at", worker, turn.now)
        turn.note(EventKind.STARTING, f"worker {worker} is being started", worker)
        turn.do(Spawn(worker))


def _give_up_the_unheard(turn: Turn) -> None:
    """A process that never says hello is ended after `stall_seconds`."""
    for worker, at in tuple(turn.job.spawned_at.items()):
        if turn.now - at > turn.spec.stall_seconds:
            places.kill(turn, worker)
            failures.on_failure(turn, worker, f"it did not connect within {turn.spec.stall_seconds:g} s")


def on_restart(turn: Turn) -> None:
    """After a controller's restart: processes that were requested and have not been heard of get their full time again,
    and the launcher says what became of them. Deadlines go on; a clock that was set back makes none longer than it was.
    """
    launched = [record for record in turn.durable.roster.values() if record.serves and record.launched]
    unheard = [record.worker for record in launched if not record.incarnation]
    turn.change(spawned_at=dict.fromkeys(unheard, turn.now))
    turn.keep(spawn_after=min(turn.durable.spawn_after, turn.now + LONGEST_BACKOFF))
    for record in tuple(turn.durable.roster.values()):
        if record.leaving:
            turn.mark(record.worker, leaves_at=min(record.leaves_at, turn.now + record.grace_seconds))
        if record.ending_since is not None:
            turn.mark(record.worker, ending_since=min(record.ending_since, turn.now))
    if turn.spec.traits.starts:
        turn.do(Adopt((*(record.worker for record in launched), *turn.durable.ending_since)))


def on_never_started(turn: Turn, event: NeverStarted) -> None:
    """An earlier controller died before it started this worker: start it now, under the id that it was given."""
    record = turn.durable.roster.get(event.worker)
    if record is None:
        return
    if record.incarnation or not record.serves:
        turn.mark(event.worker, ending_since=None)
        turn.change(absent=turn.job.absent | {event.worker})
        return
    turn.put("spawned_at", event.worker, turn.now)
    sentence = f"worker {event.worker} is being started again: the controller ended before starting it"
    turn.note(EventKind.STARTING, sentence, event.worker)
    turn.do(Spawn(event.worker))


# ---- leaving


def drain(turn: Turn, worker: WorkerId, why: Leaving, grace_seconds: float, because: str = "") -> None:
    """A worker is to go: its lanes and blocks move first, as long as the grace lasts. `because`: who says so."""
    record = turn.record(worker)
    if record.leaving or not record.serves:
        return
    leaves_at = turn.now + grace_seconds
    turn.mark(worker, leaving=why, grace_seconds=grace_seconds, leaves_at=leaves_at, leaving_because=because)
    words = "removed because the job is scaled down" if why is Leaving.SCALE_DOWN else "drained"
    sentence = f"worker {worker} is being {words} (grace {grace_seconds:g} s){f': {because}' if because else ''}"
    turn.note(EventKind.DRAINING, sentence, worker, step=known_step(turn))
    turn.say(worker, Drain(grace_seconds, turn.durable.last_generation))


def release_leaving(turn: Turn) -> None:
    """Leaving workers that no world has or may have any more."""
    durable = turn.durable
    for record in tuple(durable.roster.values()):
        if not record.leaving or not record.serves:
            continue
        process = turn.process(record.worker)
        worlds = (durable.current, *durable.planned)
        if any(is_member(plan, record.worker) for plan in worlds) or turn.job.attempt is not None:
            continue
        joiner = process.status.generation == 0 if process is not None else not record.incarnation
        if joiner:
            why = f"worker {record.worker} was drained before it became a member"
            dismiss(turn, record.worker, Ending.DRAINED, why)
            send_if_due(turn, record.worker)
        elif process is not None and _left_and_safe(turn, process.status.state):
            why = f"worker {record.worker} was drained; its blocks have other copies"
            dismiss(turn, record.worker, Ending.DRAINED, why)
            send_if_due(turn, record.worker)


def _left_and_safe(turn: Turn, state: MemberState) -> bool:
    """A leaving worker keeps its blocks until a vote in the generation without it was seen to pass."""
    return state in (MemberState.LEFT, MemberState.STOPPED) and has_world_voted(turn)


def has_world_voted(turn: Turn) -> bool:
    """Whether a step was committed in the current generation; where no steps run, whether a vote has passed in it."""
    world = turn.world
    if world is None:
        return False
    if turn.durable.committed_in >= world.generation:
        return True
    voted = (p for p in turn.serving() if p.status.generation == world.generation and p.status.boundaries > 0)
    return not world.steps and any(voted)


def dismiss(turn: Turn, worker: WorkerId, how: Ending, why: str) -> None:
    """Tell a worker to end; from now on it changes nothing."""
    turn.mark(worker, ending=how, why=why)
    turn.note(EventKind.LEFT if how is Ending.DRAINED else EventKind.DISMISSED, why, worker)
    process = turn.process(worker)
    record = turn.record(worker)
    turn.expect_end(worker)
    if record.launched and (process is None or not record.incarnation):
        places.kill(turn, worker)
        turn.drop("spawned_at", worker)


def give_up(turn: Turn, worker: WorkerId, why: str, noticed_by: str = "the controller") -> None:
    """Count a silent worker as dead without proof. Should it come back, it is told to end: its world is closed."""
    record = turn.record(worker)
    how = Ending.REPLACED if record.launched else Ending.START_OVER
    turn.mark(worker, standing=Standing.DEAD, ending=how, why=why)
    turn.expect_end(worker)
    turn.note(EventKind.LOST, f"worker {worker} is given up: {why}", worker, noticed_by=noticed_by)


def dismiss_last(turn: Turn, worker: WorkerId, addition: str = "") -> None:
    """Let a worker go whose state no other worker has."""
    why = f"worker {worker} was drained, and {LAST_ONE}{addition}"
    dismiss(turn, worker, Ending.DRAINED, why)
    send_if_due(turn, worker)


# ---- workers whose machine or pod is to go


def on_preempted(turn: Turn, event: Preempted) -> None:
    """A worker is to go, and no wish keeps it: even the last one is not refused its drain."""
    record = turn.durable.roster.get(event.worker)
    if record is None or not record.serves:
        return
    turn.mark(event.worker, spared=False)
    if not record.leaving:
        turn.count("shoal_preemptions_total", signal=event.notice.value)
        drain(turn, event.worker, Leaving.PREEMPTION, event.grace_seconds, event.why)
        return
    at = turn.now + event.grace_seconds
    if record.spared:
        turn.mark(event.worker, leaving_because=event.why)
    if record.spared or at < record.leaves_at:
        turn.mark(event.worker, leaves_at=at, grace_seconds=event.grace_seconds)


def on_spared(turn: Turn, event: Spared) -> None:
    """The notice of its end is taken back. `keep_the_spared` lets it stay, as soon as that is possible."""
    record = turn.durable.roster.get(event.worker)
    if record is not None and record.serves and record.leaving is Leaving.PREEMPTION:
        turn.mark(event.worker, spared=True, leaving_because=event.why)


def on_endangered(turn: Turn, event: Endangered) -> None:
    """A hint: no worker is drained for it, and `settle` asks for a spare."""
    record = turn.durable.roster.get(event.worker)
    if record is None or not record.serves or record.endangered == bool(event.why):
        return
    turn.mark(event.worker, endangered=bool(event.why))
    if event.why:
        turn.note(
            EventKind.PENDING, f"a spare is asked for: worker {event.worker} may have to go: {event.why}", event.worker
        )


def keep_the_spared(turn: Turn) -> None:
    """Cancel the drains whose reason is gone."""
    spared = [record for record in turn.durable.roster.values() if record.spared and record.leaving and record.serves]
    for record in spared:
        if _can_stay(turn, record):
            why = record.leaving_because
            turn.mark(record.worker, leaving=Leaving.NO, leaves_at=0.0, leaving_because="", spared=False)
            turn.note(EventKind.STAYS, f"worker {record.worker} is not drained after all: {why}", record.worker)


def _can_stay(turn: Turn, record: WorkerRecord) -> bool:
    worlds = [plan for plan in (turn.durable.current, *turn.durable.planned) if plan is not None]
    return turn.job.attempt is None and bool(worlds) and all(is_member(plan, record.worker) for plan in worlds)
