"""The routes of what the page shows besides jobs, workers, events and checkpoints: for programs as well as for it.

They only read. What is to be thought of a job is decided by `core/overview/`, from what people see of it.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import NotFound, UserError
from shoal_protos.quoting import shown_name
from shoal_protos.release import RELEASE

from shoal_controller.api.act_requests import AnAct
from shoal_controller.api.answers import EventAnswer
from shoal_controller.api.dependencies import AWorker, Readable, controller_of
from shoal_controller.api.log_tail import LOG_BYTES, MOST_LOG_BYTES, log_folders, read_log
from shoal_controller.api.page_answers import (
    AboutAnswer,
    HoldingsAnswer,
    JobRow,
    LogAnswer,
    OverviewAnswer,
    PreviewAnswer,
    SeriesAnswer,
    TimelineAnswer,
    WorldsAnswer,
    worlds_of,
)
from shoal_controller.api.recent_overview import RecentOverview
from shoal_controller.api.token_routes import ACaller
from shoal_controller.core.overview.attention import attention
from shoal_controller.core.overview.previews import preview
from shoal_controller.only_if import version_of
from shoal_controller.series.job_series import Span
from shoal_controller.series.recorded_since import since_sentence
from shoal_controller.series.timeline import timeline
from shoal_controller.shell import MOST_JOBS

MOST_GENERATION = (1 << 63) - 1

LATEST = 253_402_300_800.0
"""The year 10000, in seconds since the epoch."""

MostJobs = Annotated[int, Query(ge=1, le=MOST_JOBS, description=f"Most jobs of the answer. Default: {MOST_JOBS}.")]
WithSeries = Annotated[bool, Query(description="Whether each job comes with its last hour. Default: true.")]
MostBytes = Annotated[
    int, Query(alias="bytes", ge=1, le=MOST_LOG_BYTES, description=f"Most bytes of the answer. Default: {LOG_BYTES}.")
]
AGeneration = Annotated[int, Path(ge=1, le=MOST_GENERATION, description="Number of the world.")]
ASpan = Annotated[Span, Query(description="`hour`: every second; `day`: every 30 s. Default: `hour`.")]
AfterTime = Annotated[
    float,
    Query(ge=0, le=LATEST, description="Seconds since the epoch: only later points. Default: as many as there are."),
]

router = APIRouter()


@router.get("/about", tags=["controller"])
async def get_about(shell: Readable, caller: ACaller, request: Request) -> AboutAnswer:
    """Show this controller's version and clock, and what the token of the request may do."""
    state, site = request.app.state, request.app.state.site
    return AboutAnswer(
        version=RELEASE, page=site.digest if site is not None else "", time=shell.clock(), token=caller.token,
        role=caller.role, token_required=state.tokens.is_required, leads=controller_of(request).is_leading,
        history_since=shell.since, history=since_sentence(shell.since),
    )  # fmt: skip


@router.get("/overview", tags=["jobs"], response_model=OverviewAnswer)
async def get_overview(
    shell: Readable, request: Request, limit: MostJobs = MOST_JOBS, series: WithSeries = True
) -> Response:
    """Show all jobs, those that need attention first, each with why, its last change and its last hour."""
    recent: RecentOverview = request.app.state.overview
    found, now = await recent.rows(shell), shell.clock()
    rows = found[:limit]
    if series:
        rows = [row.with_hour(shell.runners[row.job.job].series, now) for row in rows if row.job.job in shell.runners]
    more = max(0, len(found) - limit)
    answer = OverviewAnswer.model_construct(time=now, history_since=shell.since, jobs=rows, more=more)
    return Response(answer.model_dump_json(), media_type="application/json")  # looked at once is enough for so many


@router.get("/jobs/{job}/summary", tags=["jobs"])
async def get_summary(job: str, shell: Readable) -> JobRow:
    """Show a job as the overview has it."""
    view, now = shell.view(job), shell.clock()
    series = shell.runner(job).series
    return JobRow.of(view, attention(view, now), series, now).with_hour(series, now)


@router.get("/jobs/{job}/series", tags=["jobs"])
async def get_series(job: str, shell: Readable, span: ASpan = Span.HOUR, after: AfterTime = 0.0) -> SeriesAnswer:
    """Show a job's last hour or day: its steps, loss, speed and workers, as far as this controller remembers them."""
    series = shell.runner(job).series
    now = shell.clock()
    columns = series.points(span, after, now)
    since = series.since if shell.since is not None else None
    return SeriesAnswer.model_validate(
        {
            "job": job, "time": now, "run": shell.spec(job).run, "span": span,
            "every_seconds": span.every_seconds, "since": since, "sentence": since_sentence(since),
            "times": columns.pop("time"), **columns,
        }
    )  # fmt: skip


@router.get("/jobs/{job}/worlds", tags=["jobs"])
async def list_worlds(job: str, shell: Readable) -> WorldsAnswer:
    """List the worlds that a job went through, oldest first, each with its lanes, its reason and what it cost."""
    return WorldsAnswer(job=job, time=shell.clock(), worlds=worlds_of(shell.view(job), shell.runner(job).series))


@router.get("/jobs/{job}/worlds/{generation}", tags=["jobs"])
async def get_world(job: str, generation: AGeneration, shell: Readable) -> TimelineAnswer:
    """Show how one world came about: who noticed what when, whom the others waited for, seconds per phase."""
    worlds = {world.generation: world for world in worlds_of(shell.view(job), shell.runner(job).series)}
    if generation not in worlds:
        names = f"from {min(worlds)} to {max(worlds)}" if worlds else "none"
        raise NotFound(f"job {job} has no world {generation}; those that are remembered are {names}")
    found = timeline(await shell.events(job), generation, worlds[generation].reason)
    return TimelineAnswer(
        **dict(worlds[generation]), noticed_by=found.noticed_by, waited_for=list(found.waited_for),
        slowest=found.slowest, timeline=[EventAnswer.of(event) for event in found.events],
    )  # fmt: skip


@router.get("/jobs/{job}/holdings", tags=["jobs"])
async def get_holdings(job: str, shell: Readable) -> HoldingsAnswer:
    """Show who holds what: lanes, blocks and mirrors of each worker, copies that are missing, failure domains."""
    return HoldingsAnswer.of(shell.view(job))


@router.get("/jobs/{job}/preview", tags=["jobs"])
async def preview_act(job: str, asked: AnAct, shell: Readable) -> PreviewAnswer:
    """Show what a request would do, in one sentence, without doing it."""
    view, request = shell.view(job), asked.request()
    answer = {"act": asked.act, "possible": True, "code": None, "version": version_of(view)}
    try:
        sentence = preview(request, view, shell.runner(job).preview(request))
    except UserError as refused:
        answer |= {"possible": False, "code": refused.problem_code}
        sentence = str(refused)
    return PreviewAnswer.model_validate({**answer, "sentence": sentence})


@router.get("/jobs/{job}/workers/{worker}/log", tags=["workers"])
async def get_log(at: AWorker, shell: Readable, request: Request, count: MostBytes = LOG_BYTES) -> LogAnswer:
    """Show the end of what a worker has printed, where its log is on the machine of the controller that leads."""
    found = next((one for one in shell.view(at.job).workers if one.worker == at.worker), None)
    if found is None:
        raise NotFound(f"job {at.job} has no worker {shown_name(at.worker)}").coded(ErrorCode.WORKER_UNKNOWN)
    settings = request.app.state.settings
    folders = log_folders(settings.folder, settings.log_folder, at.job)
    read = await asyncio.to_thread(read_log, folders, found, count)
    return LogAnswer(worker=at.worker, path=read.path, bytes=read.size, begin=read.begin, text=read.text)
