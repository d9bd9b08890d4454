"""Who is here: broken streams, probes, launchers' reports and silence.

A death is confirmed by the launcher, an operator, another process of its host, or a refused connection
(`judge_refusals` says when). Silence alone evicts a worker only after it was asked directly, and never when most are
silent: then it is the controller that is cut off.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from shoal_protos.addresses import split_address
from shoal_protos.messages import NO_CONTROLLER, WRONG_USE, Ping
from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.durable import Standing, WorkerRecord
from shoal_controller.core.machine.effects import Close, Probe
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.events import Disconnected, Exited, Probed, Spawned
from shoal_controller.core.machine.job import PingSent, Process
from shoal_controller.core.machine.phases import claims, failures, silence, starts
from shoal_controller.core.machine.phases.next_message import is_member
from shoal_controller.core.machine.turn import Turn, worker_of

PING_SECONDS = 0.5
"""How long a silent worker has to answer when it is asked directly."""
PING_AHEAD = 0.6
"""Share of a heartbeat interval by which a silent worker is asked before it is suspected, so that a frozen one has
missed its answer when it has missed its heartbeats, and is evicted as soon as it is suspected.
"""
PING_AFTER = 1.5
"""Heartbeat intervals of silence before which nobody is asked."""
PROBE_SECONDS = 1.0
"""How often the rendezvous port of a worker without a stream is probed."""
REACH_AGAIN_SECONDS = 10.0
"""How often a port that could not be reached is tried again."""
SEEN_TO_DIE = "another process of its host has seen it end"
EXIT_SECONDS = 10.0
"""How long a launcher may take to say how a process ended that others have seen to die: its memory is freed first."""
QUICK_PROBE_SECONDS = 0.05
"""Interval of probes in the first second: a dying process closes its stream a moment before its rendezvous port."""


def on_disconnected(turn: Turn, event: Disconnected) -> None:
    """A stream ended; its worker may still be alive. The rendezvous port tells whether the process is dead."""
    worker = turn.job.connections.get(event.connection)
    claims.on_disconnected(turn, event.connection)
    if worker is None:
        return
    turn.drop("connections", event.connection)
    turn.see(worker, connection=None, cut_at=turn.now)
    record = turn.record(worker)
    if record.ending is None:
        turn.note(
            EventKind.DISCONNECTED, f"worker {worker} on {record.host}: its connection ended ({event.why})", worker
        )
    if _death_matters(turn, record):
        _probe_now(turn, worker)


# ---- what a refused connection proves

Place = tuple[str, str]
"""A host's name, and its address without the port."""


def on_probed(turn: Turn, event: Probed) -> bool:
    """Something answers at a worker's rendezvous port, or its host refuses the connection, or nothing is known."""
    record, process = turn.durable.roster.get(event.worker), turn.process(event.worker)
    if record is None or process is None or record.incarnation != event.incarnation:
        return False
    if event.reached:
        again_at = turn.job.probed_at.get(event.worker) if process.reachable and not event.refused else None
        turn.see(event.worker, reachable=True, answered_again_at=again_at)
    elif process.reachable is None and process.connection is not None:
        _announce_unreachable(turn, record)
    if process.connection is None:
        since = turn.now if process.refused_since is None else process.refused_since
        turn.see(event.worker, refused_since=since if event.refused else None)
    return process.connection is None and event.refused


def _announce_unreachable(turn: Turn, record: WorkerRecord) -> None:
    turn.see(record.worker, reachable=False)
    turn.note(
        EventKind.UNREACHABLE,
        f"worker {record.worker} on {record.host} is connected, but this controller cannot reach it at "
        f"{record.address}: a refused connection there proves nothing, so its death would be noticed by its silence "
        "or by the launcher",
        record.worker,
    )


def judge_refusals(turn: Turn) -> None:
    """● A refused connection proves a death only where this life of the controller has reached that very process there.

    Never while workers may be reconnecting after the controller's start, nor where a launcher sees the process alive.
    Where most members refuse, only after `reconnect_seconds`: whoever lives comes back by itself in that time.
    Firewalls, tunnels and address translation refuse the living too. ● But where the host has answered since at
    another port, at which this controller had reached a worker before, nothing on the way refuses, and it counts at
    once.
    """
    refusals = {process.worker: _refused_since(turn, process) for process in turn.job.processes.values()}
    refused = {worker: since for worker, since in refusals.items() if since is not None}
    if not refused or silence.may_be_reconnecting(turn):
        return
    patience = turn.spec.reconnect_seconds if _most_are_gone(turn) else 0.0
    answers = _answers_by_place(turn, [worker for worker, since in refused.items() if turn.now - since < patience])
    for worker, since in refused.items():
        record = turn.record(worker)
        why = f"its host {record.host} refuses connections to {record.address}"
        if turn.now - since >= patience:
            confirm_death(turn, worker, why)
        elif _answers_beside(answers[_place(record)], record, since):
            confirm_death(turn, worker, f"{why} and answers at another port")


def _refused_since(turn: Turn, process: Process) -> float | None:
    """Since when its host refuses connections to it; None: it does not, or that may not prove this process's death."""
    if process.connection is not None or not process.reachable or process.worker in turn.job.live_processes:
        return None
    return process.refused_since if turn.record(process.worker).standing is not Standing.DEAD else None


def _answers_by_place(turn: Turn, refuse: Collection[WorkerId]) -> dict[Place, list[tuple[float, str]]]:
    """When the hosts of those that refuse have answered again, and at which address, the last answer first: of
    connected workers there that this controller has reached. They are asked to answer once more.
    """
    found: dict[Place, list[tuple[float, str]]] = {_place(turn.record(worker)): [] for worker in refuse}
    for process in turn.job.processes.values() if found else ():
        record = turn.record(process.worker)
        if process.connection is None or not process.reachable or (place := _place(record)) not in found:
            continue
        _probe(turn, process.worker, watched=False)
        if process.answered_again_at is not None:
            found[place].append((process.answered_again_at, record.address))
    for answers in found.values():
        answers.sort(reverse=True)
    return found


def _place(record: WorkerRecord) -> Place:
    """One address may stand for several hosts (a tunnel's end), so the hosts' names count too."""
    return record.host, split_address(record.address)[0]


def _answers_beside(answers: Sequence[tuple[float, str]], refuses: WorkerRecord, since: float) -> bool:
    """Whether a worker's host has answered since then at another port."""
    last = next((at for at, address in answers if address != refuses.address), None)
    return last is not None and last >= since


def _most_are_gone(turn: Turn) -> bool:
    """Whether more than half of the members have no stream; whose refusal was taken for a death is one of them."""
    if turn.world is None:
        return False
    gone = [member.worker for member in turn.world.members if _is_gone(turn, member.worker)]
    return 2 * len(gone) > turn.world.world_size


def _is_gone(turn: Turn, worker: WorkerId) -> bool:
    process = turn.process(worker)
    if turn.record(worker).standing is Standing.DEAD:
        return process is not None and process.refused_since is not None
    return process is None or process.connection is None


# ---- what the launcher says


def on_spawned(turn: Turn, event: Spawned) -> None:
    """The launcher has started or adopted a worker. Where it starts several together, it sees none of them alone."""
    if turn.durable.phase.is_over and event.worker not in turn.durable.roster:
        return
    _take_for_the_launchers(turn, event.worker)
    if turn.spec.started_together == 1:
        turn.change(live_processes=turn.job.live_processes | {event.worker})
    turn.mark(event.worker, place=event.place)
    if event.place.has_started:
        starts.on_started(turn, event.worker)


def _take_for_the_launchers(turn: Turn, worker: WorkerId) -> None:
    """A store that was restored from an older state need not know a process of the launcher's: it is in the roster from
    now on, under its own id, and as one that the launcher ends.
    """
    if worker not in turn.durable.roster:
        turn.enlist_new(worker, launched=True)
        turn.put("spawned_at", worker, turn.now)
    turn.mark(worker, launched=True)


def on_exited(turn: Turn, event: Exited) -> None:
    """The launcher saw the process end, or could not start it."""
    turn.change(live_processes=turn.job.live_processes - {event.worker})
    turn.drop("pending", event.worker)
    turn.drop("seen_to_die", event.worker)
    record = turn.durable.roster.get(event.worker)
    if record is None:
        return None
    if record.ending is not None or turn.durable.phase.is_over:
        return turn.mark(event.worker, standing=Standing.DEAD, ending_since=None)
    if _has_died(record, event.code):
        return confirm_death(turn, event.worker, event.why, event.code, "the launcher")
    if event.code == NO_CONTROLLER:
        why = f"{event.why}: it was in no world and found no controller"
        return confirm_death(turn, event.worker, why, event.code, "the launcher")
    if event.code == WRONG_USE and record.launched and failures.on_wrong_use(turn, event.worker, event.log_tail):
        return None
    if event.code == 0 and not record.incarnation and failures.on_end_without_hello(turn, event.worker):
        return None
    tail = f"\n{event.log_tail.strip()}" if event.log_tail.strip() else ""
    where = f" (log: {record.log})" if record.log else ""
    fault = failures.fault_of(event.log_tail) if not record.incarnation else None
    refused = record.why if record.standing is Standing.HERE else ""  # else it says why it was taken for dead
    why = f"{refused or event.why}{where}{tail}"
    failures.on_failure(turn, event.worker, why, fault, _step(turn, event.worker))
    return turn.mark(event.worker, ending_since=None)


def _has_died(record: WorkerRecord, code: int | None) -> bool:
    """Whether it died by a signal, or nobody knows how, because an earlier controller was its parent: that is no
    failure of the script. Without a status one that was never started has failed.
    """
    was_started = bool(record.incarnation) or record.place is not None
    return was_started if code is None else code < 0


def _step(turn: Turn, worker: WorkerId) -> int:
    process = turn.process(worker)
    return process.status.step if process is not None else 0


def confirm_death(
    turn: Turn, worker: WorkerId, why: str, code: int | None = None, noticed_by: str = "the controller"
) -> None:
    """Its death is certain. `code`: its exit status, where that is known."""
    record = turn.record(worker)
    if record.standing is Standing.DEAD:
        return
    failures.on_death(turn, worker, code, why)
    turn.mark(worker, standing=Standing.DEAD, why=why, ending_since=None)
    if record.ending is None:
        turn.note(EventKind.LOST, f"worker {worker} on {record.host} is dead: {why}", worker, noticed_by=noticed_by)


# ---- what other processes of its host say


def on_seen_to_die(turn: Turn, witness: WorkerId, incarnations: Sequence[str]) -> None:
    """A worker has seen processes of its host die, by what the kernel told it: it is certain at once, though the kernel
    frees a process's memory before it closes its connections. How one ended that a launcher sees alone, which may be
    by its script's own doing, is the launcher's to say: it is no member any more, and counts as dead from then on.

    ● Messages that the dead process had sent may still arrive: its stream is left, so that they do not count as life.
    """
    for incarnation in incarnations:
        worker = worker_of(turn, incarnation)
        if worker is None or worker == witness or worker in turn.job.seen_to_die:
            continue
        if not _is_beside(turn.record(worker), turn.record(witness)):
            continue
        _leave_stream(turn, worker)
        record, noticed_by = turn.record(worker), f"worker {witness}"
        if record.ending is None and record.launched and turn.spec.started_together == 1:
            turn.put("seen_to_die", worker, turn.now)
            turn.mark(worker, standing=Standing.LOST, why=SEEN_TO_DIE)
            sentence = f"worker {worker} on {record.host}: {SEEN_TO_DIE}"
            turn.note(EventKind.DISCONNECTED, sentence, worker, noticed_by=noticed_by)
        else:
            confirm_death(turn, worker, SEEN_TO_DIE, noticed_by=noticed_by)


def _leave_stream(turn: Turn, worker: WorkerId) -> None:
    process = turn.process(worker)
    if process is not None and process.connection is not None:
        turn.do(Close(process.connection))
        turn.drop("connections", process.connection)
        turn.see(worker, connection=None, cut_at=turn.now)


def _believe_without_launcher(turn: Turn) -> None:
    """The launcher does not say how processes ended that others have seen to die."""
    late = [worker for worker, at in turn.job.seen_to_die.items() if turn.now - at > EXIT_SECONDS]
    for worker in late:
        turn.drop("seen_to_die", worker)
        record = turn.durable.roster.get(worker)
        if record is not None and record.standing is Standing.LOST:
            confirm_death(turn, worker, SEEN_TO_DIE, noticed_by="a worker of its host")


def _is_beside(record: WorkerRecord, witness: WorkerRecord) -> bool:
    """Whether it is taken to live, on the host of another."""
    return record.standing is not Standing.DEAD and record.host == witness.host


# ---- silence, looked at in every tick


def watch(turn: Turn) -> None:
    """Probe who has no stream, ask who is silent, evict who does not answer."""
    processes = turn.job.processes
    for worker, record in turn.durable.roster.items():
        process = processes.get(worker)
        lacks_proof = process is None or process.connection is None or not process.reachable
        if lacks_proof and _death_matters(turn, record):
            _probe(turn, worker)
    judge_refusals(turn)
    _believe_without_launcher(turn)
    silence.count_tick(turn)
    if not silence.may_be_reconnecting(turn):
        silence.announce(turn)
        _evict(turn, _gone_for_good(turn) if silence.is_cut_off(turn.job) else _ask_the_silent(turn))


def _death_matters(turn: Turn, record: WorkerRecord) -> bool:
    """Whether anybody waits to know: of one that was told to end, only while a world with it might train."""
    if record.standing is Standing.DEAD or not record.incarnation:
        return False
    worlds = (turn.durable.current, *turn.durable.planned)
    return record.ending is None or any(is_member(plan, record.worker) for plan in worlds)


def suspect_seconds(turn: Turn) -> float:
    return turn.spec.heartbeat_seconds * turn.spec.suspect_after


def ping_after_seconds(turn: Turn) -> float:
    return turn.spec.heartbeat_seconds * max(PING_AFTER, turn.spec.suspect_after - PING_AHEAD)


def _gone_for_good(turn: Turn) -> list[WorkerId]:
    """While most are silent: who has been so for `stall_seconds`, and others are heard. Hosts that vanish never refuse,
    and a wait for most of a job's workers must end too.
    """
    quiet = silence.silent_workers(turn.job)
    if not silence.hears_somebody(turn.job, quiet):
        return []
    due = turn.now - turn.spec.stall_seconds
    return [worker for worker in quiet if turn.record(worker).serves and silence.last_heard(turn.job, worker) < due]


def _ask_the_silent(turn: Turn) -> list[WorkerId]:
    """Ask who has missed its heartbeats. Returns who has not answered."""
    suspect_after, ping_after = suspect_seconds(turn), ping_after_seconds(turn)
    silent = []
    for worker in silence.unheard_workers(turn.job, min(suspect_after, ping_after)):
        record, process = turn.record(worker), turn.process(worker)
        if not record.serves or not record.incarnation:
            continue
        seconds = silence.silent_seconds(turn.job, worker)
        if process is None or process.connection is None:
            if seconds > suspect_after and not silence.may_be_on_its_way(turn):
                silent.append(worker)
        elif process.ping is not None:
            if seconds > suspect_after:
                _suspect(turn, process, process.ping)
                if turn.job.listening.uncut - process.ping.at >= PING_SECONDS:
                    silent.append(worker)
        elif seconds > ping_after:
            _ping(turn, worker)
    return silent


def _ping(turn: Turn, worker: WorkerId) -> None:
    turn.see(worker, ping=PingSent(turn.job.listening.uncut))
    turn.say(worker, Ping(turn.job.next_ping, turn.durable.last_generation))
    turn.change(next_ping=turn.job.next_ping + 1)


def _suspect(turn: Turn, process: Process, pinged: PingSent) -> None:
    """It has missed its heartbeats: says so, once."""
    if pinged.suspected:
        return
    seconds, asked = silence.silent_seconds(turn.job, process.worker), turn.job.listening.uncut - pinged.at
    sentence = f"worker {process.worker} has been silent for {seconds:.1f} s, and has not answered for {asked:.1f} s"
    turn.note(EventKind.SUSPECTED, sentence, process.worker)
    turn.see(process.worker, ping=replace(pinged, suspected=True))


def _evict(turn: Turn, workers: list[WorkerId]) -> None:
    for worker in workers:
        counted, passed = silence.silent_seconds(turn.job, worker), turn.now - silence.last_heard(turn.job, worker)
        seconds = max(counted, passed)  # what it is judged by may be a tick more than what has passed
        why = f"silent for {seconds:.1f} s and no answer to a ping (suspected after {suspect_seconds(turn):g} s)"
        turn.mark(worker, standing=Standing.LOST, why=why)
        turn.note(EventKind.LOST, f"worker {worker} on {turn.record(worker).host} is evicted: {why}", worker)


def _probe(turn: Turn, worker: WorkerId, watched: bool = True) -> None:
    """Look at the worker's port: just after its stream broke with every tick, then once a second. One that talks to us
    and could not be reached is tried now and then.
    """
    record, process = turn.record(worker), turn.process(worker)
    if process is not None and process.connection is not None and not process.reachable:
        pause = REACH_AGAIN_SECONDS
    else:
        cut_just_now = process is not None and process.cut_at is not None and turn.now - process.cut_at < PROBE_SECONDS
        pause = QUICK_PROBE_SECONDS if cut_just_now else PROBE_SECONDS
    last = turn.job.probed_at.get(worker)
    if record.address and (last is None or turn.now - last >= pause):
        turn.put("probed_at", worker, turn.now)
        turn.do(Probe(worker, record.incarnation, record.address, watched))


def _probe_now(turn: Turn, worker: WorkerId) -> None:
    """Whenever the last one was."""
    turn.drop("probed_at", worker)
    _probe(turn, worker)


def probe_after_hello(turn: Turn, worker: WorkerId) -> None:
    """A process has said hello: reach it at the place that it names, so that a refusal there can tell of its death."""
    process = turn.process(worker)
    if process is not None and not process.reachable:
        _probe_now(turn, worker)


def probe_peer(turn: Turn, worker: WorkerId) -> None:
    """A peer says that its connection to this worker broke: see whether it is dead."""
    if worker in turn.durable.roster and turn.record(worker).standing is not Standing.DEAD:
        _probe(turn, worker)
