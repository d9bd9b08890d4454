"""Admission of a worker that says hello: its identity, whether it may take part, and what it is sent.

The first hello of a job describes the job; every other one is compared with it. An id belongs to one process for ever,
and a process keeps its id over broken streams and controllers. With the description comes a note for people on how many
losses the job survives by its mirrors and its checkpoints (`survival_sentence`).

Where a cell has several processes a worker asks for its coordinate first, before it builds a model. Its seat is the
worker's for as long as the process lives; one that has come further than the store knows keeps what it says.
"""

from __future__ import annotations

import json
from dataclasses import replace

from shoal_protos.description import ANSWER, Description, first_difference, numerics_differ, with_digest
from shoal_protos.messages import PROTOCOL_VERSION, AskSeat, Drain, Hello, Refusal, Seat, Status, Welcome
from shoal_protos.plan import EVERYONE, WorkerId
from shoal_protos.shape import ONE
from shoal_protos.text import of_shoal, plural

from shoal_controller.core.machine.durable import Durable, Place, Standing, WorkerRecord, bounds_of, default_bounds
from shoal_controller.core.machine.effects import Close, Probe, Send
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.events import Connected, SeatAsked
from shoal_controller.core.machine.job import Process
from shoal_controller.core.machine.job_size import JobSize, broken_bounds, broken_spares
from shoal_controller.core.machine.phases import (
    checkpoints,
    claims,
    ending,
    failure_detector,
    failures,
    fencing,
    seating,
    silence,
    worker_messages,
)
from shoal_controller.core.machine.phases.next_message import send_if_due
from shoal_controller.core.machine.phases.progress import shown_loss
from shoal_controller.core.machine.spec import WorkerBounds
from shoal_controller.core.machine.turn import Turn, once, worker_of

REFUSALS = 256
"""How many refusals are remembered, so that each is noted once."""


def on_connected(turn: Turn, event: Connected) -> None:
    """A worker connected: answer with Welcome and the current message, with Refusal, or with Describe."""
    known, was_asked = turn.durable.description, event.connection in turn.job.asked_to_describe
    claims.stop_waiting(turn, event.connection)
    _on_hello(turn, event)
    if turn.durable.description is not known:
        for waiting in claims.answerable(turn):
            claims.stop_waiting(turn, waiting.connection)
            _on_hello(turn, waiting)
    if was_asked:
        claims.ask_for_model(turn, turn.job.greeting)


def _on_hello(turn: Turn, event: Connected) -> None:
    hello = event.hello
    if claims.turns_away(turn, event):
        return None
    if hello.version != PROTOCOL_VERSION:
        return _refuse_protocol(turn, event)
    sentence = _impossible(turn, hello)
    if sentence is not None:
        return _refuse(turn, event.connection, hello, Refusal(sentence))
    if claims.is_model_unknown(turn, hello):
        return claims.wait_for_model(turn, event)
    seating.learn_cell(turn, hello.description.cell)
    if turn.durable.description is None:
        _describe_job(turn, hello)
    _take_over(turn, hello)
    worker = _identify(turn, hello)
    if worker is None:
        return _refuse_second_process(turn, event)
    _take_in(turn, worker, event)
    spec, known = turn.spec, checkpoints.latest(turn.durable)
    welcome = Welcome(
        worker, spec.heartbeat_seconds, spec.reconnect_seconds, spec.stall_seconds, turn.durable.last_generation,
        resume="" if spec.resume is None else json.dumps(spec.resume),
        opened_generations=turn.durable.opened_generations, run=spec.run, step=turn.durable.step,
        loss=once(turn, shown_loss), checkpoint=known.path if known is not None else "",
        checkpoint_marks=turn.durable.description.checkpoint_marks if turn.durable.description is not None else (),
    )  # fmt: skip
    turn.do(Send(event.connection, welcome))
    worker_messages.on_status(turn, worker, hello.status)
    record = turn.record(worker)
    if record.leaving:
        turn.say(worker, Drain(record.grace_seconds, turn.durable.last_generation))
    send_if_due(turn, worker)
    return None


# ---- may it take part?


def _impossible(turn: Turn, hello: Hello) -> str | None:
    """Why this hello cannot be accepted, whoever says it."""
    name, durable, theirs = hello.worker or "(new)", turn.durable, hello.description
    most = theirs.most_members
    if false := claims.false_hello(turn, hello):
        return f"worker {name} says that it {false}. Start the controller with the job's own store."
    if why := seating.impossible_cell(turn, name, theirs.cell) or seating.wrong_seat(turn, hello):
        return why
    if (jobs := durable.description) is not None:
        return (
            _exchanges_otherwise(turn, hello, jobs)
            or first_difference(name, theirs, jobs)
            or _saves_elsewhere(turn, hello, jobs)
        )
    if turn.spec.lanes not in (None, theirs.lanes):
        return (
            f"worker {name} has {theirs.lanes} lanes in its config, job {turn.spec.job} was submitted with "
            f"{turn.spec.lanes}. Make them agree, or leave lanes out of the job."
        )
    bounds = durable.changed_bounds or bounds_of(turn.spec, theirs, theirs.cell)
    if why := broken_bounds(bounds, theirs.cell.processes):
        return f"job {turn.spec.job} cannot have {why}. Change workers.min and workers.max, or `elasticity`."
    if bounds.most is not None and bounds.least > bounds.most:
        return (
            f"job {turn.spec.job} may have {_from_to(durable.bounds)}, and its config's `elasticity` is for "
            f"{_from_to(default_bounds(theirs, theirs.cell))}. Give the job both workers.min and workers.max, or "
            "neither."
        )
    wanted, together = _fitting(durable.wanted, bounds, most), turn.spec.started_together
    size = JobSize(turn.spec.job, wanted, bounds, theirs.lanes, theirs.cell, together, durable.spares, theirs.mirrors)
    if why := broken_spares(size):
        return f"worker {name} comes to a job that is made otherwise: {why}"
    if wanted == durable.wanted or _is_by_default(turn, bounds, most):
        return None
    if durable.wanted > most:
        whose = "worker" if theirs.cell == ONE else f"cell of {plural(theirs.cell.processes, 'worker')}"
        return (
            f"job {turn.spec.job} asks for {durable.wanted} workers, but its config has {theirs.lanes} lanes and every "
            f"{whose} trains at least one. Ask for at most {most} workers, or raise lanes."
        )
    return (
        f"job {turn.spec.job} asks for {plural(durable.wanted, 'worker')}, but its config's `elasticity` is for "
        f"{_from_to(bounds)}. Ask for so many, or change the section."
    )


def _from_to(bounds: WorkerBounds) -> str:
    return f"{bounds.least} to {bounds.most} workers" if bounds.most else f"{plural(bounds.least, 'worker')} or more"


def _fitting(wanted: int, bounds: WorkerBounds, most: int) -> int:
    """The number of workers next to `wanted` that the job can have."""
    return max(bounds.least, min(wanted, bounds.most or most, most))


def _exchanges_otherwise(turn: Turn, hello: Hello, jobs: Description) -> str | None:
    """Return why this worker may be in no plan with the others: what they send each other it would misread, or wait
    for.
    """
    theirs = hello.description.peers
    if theirs == jobs.peers or (other := _other(turn, hello)) is None:
        return None
    return (
        f"worker {hello.worker or '(new)'} on {hello.host} is of {of_shoal(hello.release)} and exchanges state with "
        f"others in form {theirs}; worker {other.worker} on {other.host} is of {of_shoal(other.release)}, and the "
        f"job's form is {jobs.peers}. Start all workers of a job with one release."
    )


def _saves_elsewhere(turn: Turn, hello: Hello, jobs: Description) -> str | None:
    """Return why this worker may not save where it does: beside what others save elsewhere nothing would be whole."""
    theirs, place = hello.description.saves_to, jobs.saves_to
    if theirs == place or (other := _other(turn, hello)) is None:
        return None
    return (
        f"worker {hello.worker or '(new)'} on {hello.host} saves checkpoints to {theirs or 'no place'}, "
        f"worker {other.worker} on {other.host} to {place or 'no place'}. Give all workers the same "
        "`shoal.checkpoint.path`, which each of them reaches: an absolute path of a shared folder, or a URL."
    )


def _other(turn: Turn, hello: Hello) -> WorkerRecord | None:
    """A worker of the job beside the one that says hello, as far as is known; None: there is none."""
    roster, own = turn.durable.roster.values(), hello.incarnation
    return next((record for record in roster if record.serves and record.incarnation not in ("", own)), None)


def _take_over(turn: Turn, hello: Hello) -> None:
    """Where no other worker is left, the job's checkpoints go where the one that has come saves them, and the form of
    its exchange is the job's. What the store knows to be saved lies where it lay: the mark of that place stays the
    job's.
    """
    jobs, theirs = turn.durable.description, hello.description
    if jobs is None or _other(turn, hello) is not None:
        return
    marks = jobs.checkpoint_marks if turn.durable.checkpoints else theirs.checkpoint_marks
    known = (jobs.peers, jobs.can_checkpoint, jobs.checkpoint_places, jobs.checkpoint_marks)
    if (theirs.peers, theirs.can_checkpoint, theirs.checkpoint_places, marks) != known:
        turn.keep(
            description=replace(
                jobs,
                peers=theirs.peers,
                can_checkpoint=theirs.can_checkpoint,
                checkpoint_places=theirs.checkpoint_places,
                checkpoint_marks=marks,
            )
        )


def _describe_job(turn: Turn, hello: Hello) -> None:
    """The first hello says what the job is made of; a number of workers that nobody chose becomes one that it can
    have.
    """
    lanes, wanted, most = hello.description.lanes, turn.durable.wanted, hello.description.most_members
    turn.keep(description=with_digest(hello.description))
    gets = _fitting(wanted, turn.durable.bounds, most)
    if gets != wanted:
        by_lanes = f"has {plural(lanes, 'lane')}"
        why = f"its config {by_lanes if gets == most else f'is for {_from_to(turn.durable.bounds)}'}"
        number = f"{gets} of {wanted} workers" if gets < wanted else f"{plural(gets, 'worker')}, not {wanted}"
        turn.note(EventKind.SCALED, f"the job gets {number}, because {why}", hello.worker or "(new)")
        turn.keep(wanted=gets)
    turn.note(EventKind.SURVIVES, survival_sentence(hello.description))


def _is_by_default(turn: Turn, bounds: WorkerBounds, most: int) -> bool:
    """Whether so many workers are only the default, and another number is possible."""
    spec, durable = turn.spec, turn.durable
    return spec.wanted_by_default and durable.wanted == spec.wanted and bounds.least <= most


def _refuse_protocol(turn: Turn, event: Connected) -> None:
    """Refuse a worker whose protocol is another one. A member trains on, as where no controller is there, until the job
    has given it up: then it ends, and makes room.
    """
    hello = event.hello
    record = turn.durable.roster.get(hello.worker)
    is_member = record is not None and record.serves and record.incarnation == hello.incarnation
    sentence = (
        f"worker {hello.worker or '(new)'} on {hello.host} is of {of_shoal(hello.release)} and speaks protocol "
        f"{hello.version}; this controller is of {of_shoal(event.release)} and speaks {PROTOCOL_VERSION}. Install one "
        "release on both sides."
    )
    _refuse(turn, event.connection, hello, Refusal(sentence, ends_members=bool(hello.run) and not is_member))


def _refuse(turn: Turn, connection: int, hello: Hello | AskSeat, refusal: Refusal) -> None:
    turn.do(Send(connection, refusal))
    turn.do(Close(connection))
    if turn.job.refusals.get(hello.incarnation) != refusal.sentence:
        latest = dict(list(turn.job.refusals.items())[1 - REFUSALS :])
        turn.change(refusals={**latest, hello.incarnation: refusal.sentence})
        turn.note(EventKind.REFUSED, refusal.sentence, hello.worker, host=hello.host, pid=hello.pid)
    turn.keep(last_refusal=refusal.sentence)
    record = turn.durable.roster.get(hello.worker)
    if record is not None and record.incarnation in ("", hello.incarnation):
        turn.mark(record.worker, why=refusal.sentence)
        if record.launched:  # what is started in its place would be refused too
            turn.keep(spawn_after=max(turn.durable.spawn_after, turn.now + failures.LONGEST_BACKOFF))
        if record.launched and turn.durable.description is None:
            ending.fail(turn, refusal.sentence)


# ---- its seat


def on_seat_asked(turn: Turn, event: SeatAsked) -> None:
    """A process that is to build its part of a model: answer with its coordinate, or with Refusal."""
    ask = event.opening
    if claims.turns_away(turn, event):
        return None
    if why := seating.impossible_cell(turn, ask.worker or "(new)", ask.cell):
        return _refuse(turn, event.connection, ask, Refusal(why))
    worker = seating.seated_before(turn, ask) or _identify(turn, ask)
    if worker is None:
        sentence = f"a second process (pid {ask.pid} on {ask.host}) cannot have the id of worker {ask.worker}"
        return _refuse(turn, event.connection, ask, Refusal(f"{sentence}. Start it without SHOAL_WORKER_ID."))
    turn.do(Send(event.connection, Seat(worker, seating.seat(turn, worker, ask))))
    turn.do(Close(event.connection))
    return None


# ---- who is it?


def _identify(turn: Turn, hello: Hello | AskSeat) -> WorkerId | None:
    """Find the id of the process that says hello, or give it one; None where it claims the id of another living one."""
    durable = turn.durable
    record = durable.roster.get(hello.worker)
    if record is not None and record.incarnation in ("", hello.incarnation):
        return hello.worker
    given = worker_of(turn, hello.incarnation)
    if given is not None and durable.roster[given].ending is None:
        return given  # which it has not heard yet
    if record is None:
        is_free = hello.worker and not _was_given_away(durable, hello.worker)
        return hello.worker if is_free else turn.take_id()
    process = turn.process(hello.worker)
    if isinstance(hello, Hello) and hello.status.generation and _was_given_again(turn, record):
        _give_another(turn, record)
        return hello.worker
    gone = record.standing is not Standing.HERE or record.ending is not None
    return turn.take_id() if gone and (process is None or process.connection is None) else None


def _was_given_away(durable: Durable, worker: WorkerId) -> bool:
    """Whether an id that the roster no longer remembers was in use once."""
    return worker[:1] == "w" and worker[1:].isdecimal() and int(worker[1:]) < durable.next_id


def _was_given_again(turn: Turn, record: WorkerRecord) -> bool:
    """Whether a store that was restored from an older state has given the id of a member to a process that came before
    it, is in no world and holds nothing.
    """
    process = turn.process(record.worker)
    plans = (turn.durable.current, *turn.durable.planned)
    member = any(plan is not None and plan.rank_of(record.worker, record.incarnation) is not None for plan in plans)
    return not (record.launched or member) and (process is None or not process.status.generation)


def _give_another(turn: Turn, record: WorkerRecord) -> None:
    """The process of this record has another id from now on, which it hears when it says hello again."""
    process = turn.process(record.worker)
    if process is not None and process.connection is not None:
        turn.do(Close(process.connection))
        turn.drop("connections", process.connection)
    turn.drop("processes", record.worker)
    turn.enlist(replace(record, worker=turn.take_id()))
    turn.enlist_new(record.worker)


def _refuse_second_process(turn: Turn, event: Connected) -> None:
    """Refuse it, and look whether the first one is still there."""
    hello, record = event.hello, turn.record(event.hello.worker)
    if record.address:
        turn.do(Probe(record.worker, record.incarnation, record.address))
    process = turn.process(hello.worker)
    connected_now = process is not None and process.connection is not None
    assert record.place is not None, "whoever has said hello has said where it runs"
    sentence = (
        f"worker {hello.worker} is in job {turn.spec.job} already, as {record.place.name} on {record.host}; a second "
        f"process (pid {hello.pid} on {hello.host}) cannot have its id. Start it without SHOAL_WORKER_ID."
    )
    _refuse(turn, event.connection, hello, Refusal(sentence, final=connected_now, ends_members=connected_now))


# ---- taking it in


def _take_in(turn: Turn, worker: WorkerId, event: Connected) -> None:
    hello, known = event.hello, turn.durable.roster.get(worker)
    first = known is None or not known.incarnation
    silence.note_first(turn)
    turn.enlist(_record_with(hello, turn.enlist_new(worker) if known is None else known))
    turn.keep(last_generation=max(turn.durable.last_generation, fencing.taken_number(turn, hello)))
    before = turn.process(worker)
    if before is not None:
        silence.note_return(turn)
    if before is not None and before.connection not in (None, event.connection):
        turn.do(Close(before.connection))
    process = Process(worker, event.connection, hello.status, turn.now, turn.job.listening)
    if before is not None:
        process = replace(
            before,
            connection=event.connection,
            status=_last_status(turn, before, hello),
            last_message_at=turn.now,
            last_message_listening=turn.job.listening,
            cut_at=None,
            reachable=before.reachable if known is not None and known.address == hello.address else None,
            refused_since=None,
            ping=None,
            last_sent=("", 0, 0.0),
        )
    if before is not None:
        turn.drop("connections", before.connection)
    turn.put("connections", event.connection, worker)
    turn.put("processes", worker, process)
    turn.drop("spawned_at", worker)
    failure_detector.probe_after_hello(turn, worker)
    if first:
        turn.note(EventKind.JOINED, f"worker {worker} on {hello.host} (pid {hello.pid}) connected", worker)
        _note_other_numerics(turn, worker, hello.description)
    elif known is not None and known.standing is not Standing.HERE:
        turn.note(EventKind.RETURNED, f"worker {worker} is back; it was evicted: {known.why}", worker)


def _last_status(turn: Turn, before: Process, hello: Hello) -> Status:
    """What it had said last, so that `on_status` finds what is new. After a longer silence nothing is: what it saved
    meanwhile may be of any age.
    """
    away = turn.now - before.last_message_at > turn.spec.reconnect_seconds
    return hello.status if away and hello.status.sequence >= before.status.sequence else before.status


def _note_other_numerics(turn: Turn, worker: WorkerId, theirs: Description) -> None:
    """Note a worker with other numerics: with `mixed_numerics` it may take part, and the job's bits depend on who
    trains which lane.
    """
    jobs = turn.durable.description
    difference = numerics_differ(worker, theirs, jobs) if jobs is not None else None
    if difference is not None:
        found = difference.removesuffix(f" {ANSWER}")
        turn.note(EventKind.NOT_BIT_EXACT, f"{found} mixed_numerics is true: the run is not bit-exact.", worker)


def _record_with(hello: Hello, known: WorkerRecord) -> WorkerRecord:
    """The roster's entry of a process, with what its hello says."""
    revived = known.ending is None and known.standing is not Standing.HERE
    return replace(
        known,
        incarnation=hello.incarnation,
        address=hello.address,
        host=hello.host,
        domain=hello.domain or hello.host,
        release=hello.release,
        place=known.place or Place.of_process(hello.pid),
        standing=Standing.HERE if revived else known.standing,
        why="" if revived else known.why,
        coordinate=hello.coordinate,
        seated=hello.incarnation if hello.description.cell != ONE else "",
    )


def survival_sentence(made_of: Description) -> str:
    """How many may be lost at once, and what becomes of the job where more are."""
    return f"{_copies(made_of.mirrors, made_of.cell != ONE)}; {_without_a_copy(made_of)}"


def _copies(mirrors: int, in_cells: bool) -> str:
    if mirrors == EVERYONE:
        of, living = (" of its coordinate", "at each") if in_cells else ("", "of them")
        return f"every worker keeps every block{of}, so the job goes on while one {living} lives"
    if not mirrors:
        return "each block is kept by one worker alone (mirrors 0), so none may be lost"
    where = f", where the job has {mirrors + 1} cells" if in_cells else ""
    return f"each block is kept by {mirrors + 1} workers, so {plural(mirrors, 'worker')} may be lost at once{where}"


def _without_a_copy(made_of: Description) -> str:
    if made_of.can_checkpoint:
        place = f" in {made_of.saves_to}" if made_of.saves_to else ""
        return f"where all who keep a block are lost, all go back to the newest checkpoint{place}"
    return "where all who keep a block are lost, the job begins anew at step 0, because no checkpoint.path is set"
