"""The view of a job that people see: one `JobView` made of all that is known. Nothing is decided here. Pure.

A `Sample` is what a job's curves keep of it once a second: a few figures, made without a look at every worker's row.

The view, the series and the holdings count copies of blocks with `copies_wanted` and `missing_copies`, so that all
agree. The planner makes as many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from shoal_protos.messages import Ending, MemberState
from shoal_protos.plan import Plan, Reason, WorkerId
from shoal_protos.runs import NO_BLOCKS, Runs
from shoal_protos.shape import ONE
from shoal_protos.text import plural

from shoal_controller.core.machine.durable import Durable, Resize, Standing, WorkerRecord, default_bounds
from shoal_controller.core.machine.job import Job, Process
from shoal_controller.core.machine.phases import planned_changes, progress_watch, seating, silence, starts, waiting
from shoal_controller.core.machine.phases.progress import shown_loss, shown_reports, step_seconds_median
from shoal_controller.core.machine.spec import JobView, Phase, ResizeView, State, WorkerView


def view(job: Job, now: float) -> JobView:
    durable, spec = job.durable, job.durable.spec
    active = active_members(job)
    description = durable.description
    lanes = description.lanes if description is not None else spec.lanes
    copies = copies_wanted(durable)
    spares = min(durable.spares, max(0, len(active) - durable.wanted))
    return JobView(
        job=spec.job,
        phase=shown_phase(job),
        generation=durable.current.generation if durable.current is not None else 0,
        wanted=durable.wanted,
        active=len(active) - spares,
        spares=durable.spares,
        active_spares=spares,
        trainers=durable.trainers,
        min_workers=durable.bounds.least,
        max_workers=durable.bounds.most or durable.most_members,
        default_bounds=default_bounds(description, durable.cell),
        lanes=lanes,
        cell=durable.cell,
        step=durable.step,
        max_steps=durable.last_step,
        loss=shown_loss(job),
        reports=shown_reports(job),
        last_checkpoint_step=durable.checkpoints[0].step if durable.checkpoints else None,
        checkpoints=durable.checkpoints,
        reason="; ".join(filter(None, (reason(job, now), *_asides(job, now)))),
        run=spec.run,
        owner=spec.owner,
        version=durable.version,
        created_at=durable.figures.created,
        started_at=durable.started_at,
        ended_at=durable.ended_at if durable.phase.is_over else None,
        workers=_workers(job, now),
        unmirrored_blocks=len(missing_copies(durable.current, copies)),
        figures=durable.figures,
        samples=samples_read(job),
        goodput_ratio=job.figures.goodput_ratio,
        stepping_ratio=stepping(job, now),
        worker_seconds=job.figures.worker_seconds,
        wanted_seconds=job.figures.wanted_seconds,
        last_commit=job.figures.last_commit,
        fingerprint=durable.fingerprint,
        step_seconds_median=step_seconds_median(job),
        can_checkpoint=description is not None and description.can_checkpoint,
        saves_to=saves_to(job),
        pending=starts.counted(job) if not durable.phase.is_over else {},
        launcher=spec.launcher,
        paused=durable.paused,
        stopping=durable.stopping,
        world=durable.current,
        stage=description.stage if description is not None else None,
        copies_wanted=copies,
        block_bytes=description.state_bytes if description is not None else None,
        resizes=tuple(_resize(one, durable.started_at) for one in durable.history),
    )


def saves_to(job: Job) -> str | None:
    """Return the URL of its checkpoints; empty where it saves none; None until a worker has described the job."""
    description = job.durable.description
    if description is None:
        return None
    return description.checkpoint_places[0] if description.can_checkpoint and description.checkpoint_places else ""


def shown_phase(job: Job) -> Phase:
    """`paused` and `waiting` for more members are a running world that commits no steps."""
    durable = job.durable
    if durable.phase is Phase.RUNNING and durable.current is not None and not durable.current.steps:
        return Phase.PAUSED if durable.paused else Phase.WAITING
    return Phase.WAITING if _lacks_a_coordinate(job) else durable.phase


def _lacks_a_coordinate(job: Job) -> bool:
    """Whether those who are to go back to a checkpoint wait for one who completes a cell."""
    durable, attempt = job.durable, job.attempt
    if durable.phase is not Phase.RESIZING or attempt is None or not attempt.start or durable.cell.processes == 1:
        return False
    left = (worker for worker in attempt.starters if worker in durable.roster and durable.roster[worker].serves)
    return bool(durable.absent(left))


def reason(job: Job, now: float) -> str:
    """Why the job is where it is, with figures; empty while it simply trains."""
    durable, spec = job.durable, job.durable.spec
    if durable.phase.is_over or durable.phase is Phase.STALLED:
        return durable.reason
    if job.attempt is not None:
        waits = f"; {job.attempt.waits_for} ({now - job.attempt.since:.0f} s so far)" if job.attempt.waits_for else ""
        return f"{job.attempt.why}{waits}"
    if durable.current is None:
        found = waiting.sentence(job, now), starts.sentence(job, now), seating.advice(durable)
        return "; ".join(filter(None, found))
    if durable.stopping:
        return "cancelled; the workers end after their step"
    if durable.paused and durable.current.steps:
        return "pausing; the workers stop between two steps"
    if not durable.current.steps:
        sentences = (_why_no_steps(job), planned_changes.reason(job, now), starts.sentence(job, now))
        return "; ".join(filter(None, sentences))
    late = now - job.planned_at > spec.progress_seconds
    planned = planned_changes.reason(job, now) if late else ""
    training = progress_watch.reason(job, now), planned, starts.sentence(job, now), seating.advice(durable)
    return "; ".join(filter(None, training))


def _why_no_steps(job: Job) -> str:
    """Of a world that votes without steps; empty where a planned change will end that."""
    durable = job.durable
    if durable.paused:
        return f"paused: {durable.paused_because}" if durable.paused_because else "paused by an operator"
    if durable.planned and durable.planned[-1].steps:
        return ""
    members = [member.worker for member in durable.current.members] if durable.current is not None else []
    active = plural(len(members), "worker")
    if durable.are_enough(members) and durable.cell.tight and durable.current is not None and not durable.current.cells:
        return f"{active} active; no host has all processes of a cell that must share one ({durable.cell})"
    if durable.are_enough(members):
        return f"{active} active; a generation that trains is being planned"
    coming = sum(record.serves for record in durable.roster.values()) > len(members)
    more = "" if coming else waiting.how_to_start(durable)
    cells = f" in {plural(durable.full_cells(members), 'whole cell')}" if durable.cell.processes > 1 else ""
    return f"{active} active{cells}, min_workers is {durable.bounds.least}{waiting.trouble(durable)}{more}"


def _asides(job: Job, now: float) -> tuple[str, ...]:
    """What is to be said of a job whatever its phase; empty where there is nothing."""
    return silence.doubt(job, now), repair(job), last_save(job), exactness(job)


def repair(job: Job) -> str:
    """That blocks wait for their second copy, which the world's steps give more of their time; empty where none does,
    or none is wanted.
    """
    world, description = job.durable.current, job.durable.description
    if job.attempt is not None or world is None or description is None or not description.mirrors:
        return ""
    left = world.second_copies
    if job.durable.phase.is_over or not left:
        return ""
    for rank in {fill.target for fill in world.fills}:
        left -= world.filled(rank, _boundaries(job.processes.get(world.members[rank].worker), world))
    amount = plural(len(left), "block")
    so = "so steps may take half as long again until the second one is there"
    return f"repairs: {amount} with one copy, {so}" if left else ""


def last_save(job: Job) -> str:
    """That the last save failed: the job trains on, and has less to go back to than people count on."""
    sentence = job.durable.failed_save.partition("\n")[0]
    return f"last save: {sentence}" if sentence else ""


def exactness(job: Job) -> str:
    """What is to be said of the job's bits; empty where they are those of any other world."""
    description = job.durable.description
    return "not bit-exact: mixed_numerics is true" if description is not None and description.mixed_numerics else ""


def active_members(job: Job) -> list[Process]:
    """Return the members that are at work, spares included; of a job that is over none is."""
    world = job.durable.current if not job.durable.phase.is_over else None
    found = (job.processes.get(member.worker) for member in world.members) if world is not None else ()
    return [process for process in found if process is not None and job.durable.roster[process.worker].serves]


def samples_read(job: Job) -> int | None:
    """Samples in committed steps. None: a controller that was started again has not heard yet how many they are."""
    if not job.figures_known:
        return None
    description = job.durable.description
    per_step = description.samples_per_step if description is not None else 0
    return per_step * min(job.figures.steps, job.durable.figures.steps_bound)


def stepping(job: Job, now: float) -> float:
    """Share of the time since the first step began that went into committed steps. It ends with the job."""
    figures = job.figures
    if figures.training_began is None or figures.last_commit is None:
        return 0.0
    end = figures.last_commit if job.durable.phase.is_over else max(now, figures.last_commit)
    wall = end - figures.training_began
    return min(1.0, figures.trained_seconds / wall) if wall > 0 else 0.0


def _resize(resize: Resize, first_began_at: float | None) -> ResizeView:
    return ResizeView(
        generation=resize.generation,
        workers=resize.workers,
        reason=resize.reason.value,
        from_step=resize.from_step,
        pause_seconds=resize.pause_seconds,
        phases=resize.phases,
        promoted_blocks=resize.promoted_blocks,
        pause_bytes=resize.pause_bytes,
        fill_bytes=resize.fill_bytes,
        checkpoint_bytes=resize.checkpoint_bytes,
        lost_steps=resize.lost_steps,
        began_at=resize.began_at,
        starts_again=resize.reason is Reason.START and resize.began_at != first_began_at,
    )


# ---- workers


def _workers(job: Job, now: float) -> tuple[WorkerView, ...]:
    waited_for, cells = progress_watch.waited_for_seconds(job, now), _cells(job.durable)
    return tuple(
        _worker(job, record, now, waited_for.get(record.worker, 0.0), cells.get(record.worker))
        for record in job.durable.roster.values()
    )


def _cells(durable: Durable) -> Mapping[WorkerId, int]:
    """The number of each member's cell; none where a cell is one process."""
    cells = durable.current.workers_of_cells if durable.current is not None else []
    return {worker: number for number, cell in enumerate(cells) for worker in cell}


def _worker(job: Job, record: WorkerRecord, now: float, waited_for_seconds: float, cell: int | None) -> WorkerView:
    process, world = job.processes.get(record.worker), job.durable.current
    rank = (
        world.rank_of(record.worker, record.incarnation)
        if world is not None and record.serves and not job.durable.phase.is_over
        else None
    )
    lanes, owned, mirrored = (
        (world.lanes_of(rank), world.owned_by(rank), world.mirrored_by(rank))
        if world is not None and rank is not None
        else ((), NO_BLOCKS, NO_BLOCKS)
    )
    telemetry = process.telemetry if process is not None else None
    return WorkerView(
        worker=record.worker,
        host=record.host,
        pid=record.place.pid if record.place is not None else None,
        state=state(job, record, rank),
        rank=rank,
        lanes=lanes,
        blocks=len(owned),
        mirrored_blocks=len(mirrored),
        step=max(process.status.step, 0) if process is not None else 0,
        step_seconds=telemetry.step_seconds if telemetry is not None else 0.0,
        memory_bytes=telemetry.memory_bytes if telemetry is not None else {},
        state_file_bytes_per_second=telemetry.state_file_bytes_per_second if telemetry is not None else 0,
        log=record.log,
        waited_for_seconds=waited_for_seconds,
        pod=record.place.pod if record.place is not None else "",
        node=record.place.node if record.place is not None else "",
        why=_why(job, record),
        domain=record.domain,
        activity=process.activity if process is not None and process.connection is not None else None,
        activity_age_seconds=now - process.last_message_at if process is not None else 0.0,
        member_state=process.status.state.value if process is not None else "",
        boundaries=_boundaries(process, world),
        makes_steps=world is None or rank is None or world.steps,
        heartbeat_age_seconds=now - process.last_message_at if process is not None and record.serves else None,
        lane_seconds=telemetry.lane_seconds if telemetry is not None and rank is not None else 0.0,
        cell_wait_seconds=telemetry.cell_wait_seconds if telemetry is not None else 0.0,
        gpu=telemetry.gpu if telemetry is not None else None,
        coordinate=record.coordinate if job.durable.cell != ONE and record.seated else None,
        cell=cell if rank is not None else None,
    )


def _boundaries(process: Process | None, world: Plan | None) -> int:
    """Votes that it has passed in this world."""
    if process is None or world is None or process.status.generation != world.generation:
        return 0
    return process.status.boundaries


def _why(job: Job, record: WorkerRecord) -> str:
    """Why it is not at work."""
    if not record.serves:
        return record.why
    pending = job.pending.get(record.worker)
    return pending.why if pending is not None and not record.incarnation else record.leaving_because


def state(job: Job, record: WorkerRecord, rank: int | None) -> State:
    """One word for where a worker stands."""
    if job.durable.phase.is_over and record.ending is None:
        return State.LOST if record.standing is Standing.LOST or record.why else State.LEFT
    if record.ending is not None:
        return State.LOST if record.ending is Ending.FAILED else State.LEFT
    if record.standing is not Standing.HERE:
        return State.LOST
    process = job.processes.get(record.worker)
    if process is not None and process.ping is not None and process.ping.suspected:
        return State.SUSPECTED
    if record.leaving:
        return State.DRAINING
    if rank is not None:
        return State.ACTIVE
    joiner_ready = process is not None and process.status.state in (MemberState.WAITING, MemberState.JOINING)
    return State.READY if joiner_ready else State.STARTING


def has_ended(job: Job, worker: WorkerId) -> bool:
    """Whether it is lost or has left, by its record alone: a view of many workers takes milliseconds."""
    record = job.durable.roster.get(worker)
    return record is None or state(job, record, None) in (State.LOST, State.LEFT)


def copies_wanted(durable: Durable) -> int | None:
    """Of every block in the world that may train, the owner's among them: as many as the job asks for, and no more than
    a coordinate has members that keep blocks, as a joiner does once it is filled. None: there is no world.
    """
    description, world = durable.description, durable.current
    if description is None or world is None:
        return None
    keepers = Counter(member.coordinate for rank, member in enumerate(world.members) if world.kept_by(rank))
    fewest = min(keepers[coordinate] for coordinate in range(world.coordinates))
    return min(description.mirrors, max(1, fewest) - 1) + 1


def missing_copies(world: Plan | None, wanted: int | None) -> Runs:
    """Blocks with fewer copies than wanted, the owner's among them; none where there is no world."""
    if world is None or wanted is None:
        return NO_BLOCKS
    changes = dict.fromkeys((0, world.blocks), 0)
    """By how many the copies of this block are more than those of the block before."""
    for kept in map(world.kept_by, world.ranks):
        for begin, end in kept.spans:
            changes[begin] = changes.get(begin, 0) + 1
            changes[end] = changes.get(end, 0) - 1
    missing, copies = [], 0
    for begin, end in pairwise(sorted(changes)):
        copies += changes[begin]
        if copies < wanted:
            missing.append((begin, end))
    return Runs(missing)


# ---- the sample that curves keep


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a job."""

    step: int
    loss: float | None
    step_seconds: float | None
    """The median of what workers say of their last steps."""
    samples: int | None
    """Read in committed steps; None: not known yet."""
    goodput_ratio: float
    active: int
    wanted: int
    reports: Mapping[str, float] = field(default_factory=dict)
    """The last number that the script has reported under each name."""


def sample(job: Job) -> Sample:
    """The job as it is now."""
    return Sample(
        step=job.durable.step,
        loss=shown_loss(job),
        step_seconds=step_seconds_median(job),
        samples=samples_read(job),
        goodput_ratio=job.figures.goodput_ratio,
        active=len(active_members(job)),
        wanted=job.durable.wanted,
        reports=shown_reports(job),
    )
