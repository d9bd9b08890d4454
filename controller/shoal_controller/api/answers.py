"""The bodies that REST returns, made from the views of the core and the events of the shell. Their names are public."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer
from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.error_codes import ErrorCode
from shoal_protos.gpu import Gpu
from shoal_protos.shape import DIMENSIONS, ONE, Shape

from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.figures import Use
from shoal_controller.core.machine.spec import JobView, Phase, ResizeView, State, WorkerView
from shoal_controller.core.overview.idle_lanes import goodput_sentence, idle_lane_ratio, idle_lanes
from shoal_controller.core.overview.shown_sentences import activity_sentence
from shoal_controller.jobs.only_if import version_of
from shoal_controller.jobs.records import JobEvent


class Answer(BaseModel):
    """What all answers have in common."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class WithCells(Answer):
    """What is said of cells is absent where it was not given: where a cell is one process. So is a GPU."""

    @model_serializer(mode="wrap")
    def _as_given(self, written: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]
        # What it returns has no annotation: OpenAPI would have that in place of the fields.
        return {name: value for name, value in written(self).items() if name in self.model_fields_set}


class WorkerCounts(Answer):
    """How many workers a job wants, has, and may have."""

    wanted: int
    active: int
    min: int
    max: int | None
    """None until the job's lanes are known."""
    spares: int
    """Wanted beyond `wanted`."""
    active_spares: int


class CellAnswer(Answer):
    """What a cell of a job is: how many processes train a lane together."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    processes: int
    """All of a cell."""

    @classmethod
    def of(cls, cell: Shape) -> Self:
        return cls(**{name: getattr(cell, name) for name in DIMENSIONS}, processes=cell.processes)


class CellCounts(Answer):
    """How many cells a job has, and wants."""

    full: int
    """Cells that train."""
    wanted: int
    """Whole cells that the wanted workers make; others are spare."""


class JobAnswer(WithCells):
    """A job."""

    job: str
    phase: Phase
    generation: int
    workers: WorkerCounts
    lanes: int | None
    """How many; None until a worker has said so."""
    idle_lane_ratio: float | None
    """Part of the capacity of the world's workers that idles because lanes do not divide; None while no step runs."""
    idle_lanes: str
    """The same in a sentence, with what other lanes would change; empty where next to nothing idles."""
    goodput: str
    """Which part of the wanted workers' time trained, and where the rest went; empty before the first world."""
    step: int
    max_steps: int | None
    """The last step; None until a worker has said it, or all scripts have ended where nothing else says it."""
    loss: float | None
    reports: dict[str, float | None]
    """The last number that the script has reported under each name, evaluations included; at most 32 names."""
    samples: int | None
    """Read in committed steps; None while a controller that was started again does not know yet."""
    last_checkpoint_step: int | None
    paused: bool
    """Whether it is to run no steps until it is resumed: also while its phase is another one, as it waits or changes
    its world."""
    reason: str
    """Why it is in this phase, in one sentence."""
    owner: str
    """Name of the token that it was created with; empty: no token was asked for, or it is a resource's."""
    created: float
    """Seconds since the epoch."""
    started: float | None
    """When its first world began, in seconds since the epoch; None: none has."""
    ended: float | None
    """When it was over, in seconds since the epoch; None: it is not."""
    version: str
    """Changes with whatever is asked of the job, not with its progress: to be sent as `If-Match`."""
    cell: CellAnswer | None = None
    """Absent where a cell is one process, or no worker has said yet what it is."""
    cells: CellCounts | None = None
    """Absent likewise."""

    @classmethod
    def of(cls, view: JobView) -> Self:
        counts = WorkerCounts(
            wanted=view.wanted, active=view.active, min=view.min_workers, max=view.max_workers or view.most_members,
            spares=view.spares, active_spares=view.active_spares,
        )  # fmt: skip
        of_cells: dict[str, Any] = {}
        if view.cell != ONE:
            counted = CellCounts(full=view.full_cells, wanted=view.wanted_cells)
            of_cells = {"cell": CellAnswer.of(view.cell), "cells": counted}
        return cls(
            job=view.job, phase=view.phase, generation=view.generation, workers=counts, lanes=view.lanes,
            idle_lane_ratio=idle_lane_ratio(view), idle_lanes=idle_lanes(view),
            goodput=goodput_sentence(view),
            step=view.step, max_steps=view.max_steps, loss=view.loss, reports=dict(view.reports),
            samples=view.samples,
            last_checkpoint_step=view.last_checkpoint_step, paused=view.paused, reason=view.reason,
            owner=view.owner,
            created=view.created_at, started=view.started_at, ended=view.ended_at, version=version_of(view),
            **of_cells,
        )  # fmt: skip


class JobsAnswer(Answer):
    jobs: list[JobAnswer]
    next: str | None
    """`after` of the next page; None: there is none."""


class ActivityAnswer(Answer):
    """What a worker's training thread does, as its last heartbeat said."""

    phase: str
    """Part of a step, such as `lanes` or `vote`; empty: not known."""
    seconds: float
    """For how long by now."""
    waits_for: list[str]
    """Workers without which it cannot go on."""
    sentence: str

    @classmethod
    def of(cls, view: WorkerView) -> Self:
        known = view.activity
        return cls(
            phase=known.phase.name.lower() if known is not None else "",
            seconds=known.seconds + view.activity_age_seconds if known is not None else 0.0,
            waits_for=list(known.waits_for) if known is not None else [],
            sentence=activity_sentence(view),
        )


class GpuAnswer(Answer):
    """What the GPU that a worker computes on is at; None: it does not tell that figure."""

    name: str
    """Its model; empty until it has been asked."""
    index: int
    """Its number on its host, as nvidia-smi shows it."""
    use_ratio: float | None
    """Share of the last moment in which a kernel ran on it."""
    memory_bytes: int | None
    """In use, by all processes."""
    memory_total_bytes: int | None
    celsius: float | None
    throttled: list[str] | None
    """Why its clocks are held down: `power_cap`, `heat`, `power_brake`, `slowdown`."""
    why: str
    """Why figures are missing; empty where none is."""

    @classmethod
    def of(cls, gpu: Gpu) -> Self:
        throttled = list(gpu.throttled.names) if gpu.throttled is not None else None
        return cls(
            name=gpu.name, index=gpu.index, use_ratio=gpu.use_ratio, memory_bytes=gpu.memory_bytes,
            memory_total_bytes=gpu.memory_total_bytes, celsius=gpu.celsius, throttled=throttled, why=gpu.why,
        )  # fmt: skip


class WorkerAnswer(WithCells):
    """A worker."""

    worker: str
    host: str
    pid: int | None
    state: State
    rank: int | None
    lanes: list[int]
    blocks: int
    mirrored_blocks: int
    step: int
    step_seconds: float
    memory_bytes: int
    """Resident memory of its process."""
    log: str
    pod: str
    """Empty where it is not a pod."""
    node: str
    """The machine that its pod runs on; empty until it has started."""
    why: str
    """Why it has not started, leaves or is gone; empty while it is as it should be."""
    domain: str
    """Its failure domain; empty until it has said hello."""
    heartbeat_age_seconds: float | None
    """Since it was last heard; None: it is gone, or has not been heard of."""
    waited_for_seconds: float
    """How long others have waited for it, while nothing goes on."""
    activity: ActivityAnswer
    coordinate: dict[str, int] | None = None
    """Its place in a cell, by the dimensions of which there is more than one; None: it has none yet. Absent where a
    cell is one process."""
    cell: int | None = None
    """Number of the cell that it trains in; None: it is spare, or no member. Absent where a cell is one process."""
    gpu: GpuAnswer | None = None
    """What it computes on. Absent where that is no NVIDIA GPU."""
    lane_seconds: float | None = None
    """What a lane takes there, without its waits for others. Absent where that is not known."""

    @classmethod
    def of(cls, view: WorkerView, shape: Shape) -> Self:
        """`shape`: what the job's cells are."""
        memory = view.memory_bytes.get("rss", sum(view.memory_bytes.values()))
        of_cells: dict[str, Any] = {}
        if shape != ONE:
            place = shape.place(view.coordinate) if view.coordinate is not None else None
            of_cells = {"coordinate": place, "cell": view.cell}
        more: dict[str, Any] = {"gpu": GpuAnswer.of(view.gpu)} if view.gpu is not None else {}
        more |= {"lane_seconds": view.lane_seconds} if view.lane_seconds else {}
        return cls(
            worker=view.worker, host=view.host, pid=view.pid, state=view.state, rank=view.rank,
            lanes=list(view.lanes), blocks=view.blocks, mirrored_blocks=view.mirrored_blocks, step=view.step,
            step_seconds=view.step_seconds, memory_bytes=memory, log=view.log, pod=view.pod,
            node=view.node, why=view.why, domain=view.domain, heartbeat_age_seconds=view.heartbeat_age_seconds,
            waited_for_seconds=view.waited_for_seconds, activity=ActivityAnswer.of(view),
            **of_cells, **more,
        )  # fmt: skip


class WorkersAnswer(Answer):
    workers: list[WorkerAnswer]
    next: str | None
    """`after` of the next page; None: there is none."""


class EventAnswer(Answer):
    """One entry of a job's history."""

    revision: int
    """Its number in the job, from 1 on."""
    time: float
    """Seconds since 1970."""
    kind: Annotated[str, Field(json_schema_extra={"enum": [kind.value for kind in EventKind]})]
    """What happened: docs/events.md lists all kinds."""
    generation: int
    worker: str
    """Empty where it concerns no single worker."""
    message: str
    data: dict[str, object]

    @classmethod
    def of(cls, event: JobEvent) -> Self:
        return cls(
            revision=event.revision, time=event.time, kind=event.kind, generation=event.generation,
            worker=event.worker, message=event.message, data=dict(event.data),
        )  # fmt: skip


class EventOfJobAnswer(EventAnswer):
    """One entry of the history of some job."""

    job: str

    @classmethod
    def made(cls, job: str, event: JobEvent) -> Self:
        return cls(job=job, **EventAnswer.of(event).model_dump())


class NewestEventsAnswer(Answer):
    events: list[EventOfJobAnswer]
    anew: bool
    """Whether events between `after` and these are not here any more."""
    next: str
    """`after` of the next request, or `Last-Event-ID` of a stream."""


class EventsAnswer(Answer):
    events: list[EventAnswer]
    next: int | None
    """`after` of the next page; None: there is none yet."""


class CheckpointAnswer(Answer):
    """A whole checkpoint."""

    step: int
    """At which training goes on from it."""
    generation: int
    """The generation in which it was saved."""
    path: str
    bytes: int
    saved: float | None
    """When its world told that it was saved, in seconds since the epoch; None: not known, as of one that was found in
    its folder, or that was saved while no controller was there."""
    verified: bool
    """Whether the copies of all its blocks were compared when it was saved, and agreed."""

    @classmethod
    def of(cls, reference: CheckpointRef) -> Self:
        return cls(
            step=reference.step, generation=reference.generation, path=reference.path, bytes=reference.bytes,
            saved=reference.saved_at, verified=reference.verified,
        )  # fmt: skip


class CheckpointsAnswer(Answer):
    checkpoints: list[CheckpointAnswer]
    next: str | None
    """`after` of the next page; None: there is none."""


class MovedBytes(Answer):
    """Bytes by the way they came."""

    pause: int
    fill: int
    """Of a generation that still trains: as of a minute ago at most."""
    checkpoint: int

    @classmethod
    def of(cls, resize: ResizeView) -> Self:
        return cls(pause=resize.pause_bytes, fill=resize.fill_bytes, checkpoint=resize.checkpoint_bytes)


class GenerationAnswer(Answer):
    """One world of a job: why it began, what it cost."""

    generation: int
    workers: int
    reason: str
    from_step: int
    pause_seconds: float
    phases: Mapping[str, float]
    promoted_blocks: int
    bytes: MovedBytes
    lost_steps: int

    @classmethod
    def of(cls, resize: ResizeView) -> Self:
        return cls(
            generation=resize.generation, workers=resize.workers, reason=resize.reason, from_step=resize.from_step,
            pause_seconds=resize.pause_seconds, phases=dict(resize.phases), promoted_blocks=resize.promoted_blocks,
            bytes=MovedBytes.of(resize), lost_steps=resize.lost_steps,
        )  # fmt: skip


class ReportAnswer(Answer):
    """The run report, as `--json` writes it."""

    job: str
    steps: int
    fingerprint: str
    """Empty until the job has succeeded."""
    final_loss: float | None
    generations: list[GenerationAnswer]
    step_seconds_median: float | None
    samples: int | None
    """Read in committed steps; None while a controller that was started again does not know yet."""
    goodput_ratio: float
    """Part of the seconds of wanted workers that trained."""
    stepping_ratio: float
    """Part of the time since the first step began that was spent in committed steps, by however few workers."""
    wanted_seconds: float
    """Seconds of wanted workers, since the job was made."""
    worker_seconds: dict[Use, float]
    """Seconds of workers by their use."""

    @classmethod
    def of(cls, view: JobView) -> Self:
        return cls(
            job=view.job, steps=view.step, fingerprint=view.fingerprint, final_loss=view.loss,
            generations=[GenerationAnswer.of(resize) for resize in view.resizes],
            step_seconds_median=view.step_seconds_median, samples=view.samples, goodput_ratio=view.goodput_ratio,
            stepping_ratio=view.stepping_ratio, wanted_seconds=view.wanted_seconds,
            worker_seconds=dict(view.worker_seconds),
        )  # fmt: skip


class HealthAnswer(Answer):
    status: str
    trouble: str = ""
    """What keeps the controller from deciding; empty while nothing does."""
    term: int = 0
    """The term in which it surely leads; 0: it does not."""


class Problem(Answer):
    """An error, as RFC 9457 has it. `detail` is the one sentence that matters."""

    type: str = "about:blank"
    code: ErrorCode
    """What a program goes by; docs/rest.md says what each means."""
    title: str
    status: int
    detail: str
    instance: str
