"""The read-only routes of what the page shows besides jobs, workers, events and checkpoints.

Programs may use them too. `core/overview/` judges a job; nothing is decided here.

`RecentOverview`, which `app.py` makes, computes the overview once for all readers that ask at about the same time.
100 jobs of 100 workers each take a fifth of a second, so it lets the event loop run between jobs, and keeps the answer
for a time that grows with its cost, at most `MOST_SECONDS`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, fields
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi import Path as PathParameter
from shoal_protos.acts import Act, OperatorRequest
from shoal_protos.errors import NotFound, UserError
from shoal_protos.release import RELEASE

from shoal_controller.api.answers import EventAnswer
from shoal_controller.api.dependencies import Readable, controller_of
from shoal_controller.api.models import MOST_WORKERS
from shoal_controller.api.page_answers import (
    AboutAnswer,
    HoldingsAnswer,
    JobRow,
    OverviewAnswer,
    PreviewAnswer,
    SeriesAnswer,
    TimelineAnswer,
    WorldsAnswer,
    worlds_of,
)
from shoal_controller.api.token_routes import ACaller
from shoal_controller.core.overview.attention import attention, by_attention
from shoal_controller.core.overview.previews import preview
from shoal_controller.jobs.only_if import version_of
from shoal_controller.jobs.shell import MOST_JOBS, Shell
from shoal_controller.jobs.timeline import timeline
from shoal_controller.observe.job_series import Span, since_sentence

MOST_GENERATION = (1 << 63) - 1
MOST_NAME = 300

LATEST = 253_402_300_800.0
"""The year 10000, in seconds since the epoch."""

MostJobs = Annotated[int, Query(ge=1, le=MOST_JOBS, description=f"Most jobs of the answer. Default: {MOST_JOBS}.")]
WithSeries = Annotated[bool, Query(description="Whether each job comes with its last hour. Default: true.")]
AGeneration = Annotated[int, PathParameter(ge=1, le=MOST_GENERATION, description="Number of the world.")]
ASpan = Annotated[Span, Query(description="`hour`: every second; `day`: every 30 s. Default: `hour`.")]
AfterTime = Annotated[
    float,
    Query(ge=0, le=LATEST, description="Seconds since the epoch: only later points. Default: as many as there are."),
]


def _acts_with(name: str) -> str:
    return " and ".join(f"`{act}`" for act in Act if name in _names(act))


def _names(act: Act) -> set[str]:
    return {field.name for field in fields(act.asks)}


@dataclass(frozen=True, slots=True)
class AskedAct:
    """What an operator would ask for, as the query of a preview has it: the requests of the routes that carry them out,
    whose bodies say what is valid.
    """

    act: Annotated[Act, Query(description="What would be asked for.")]
    workers: Annotated[
        int | None, Query(ge=1, le=MOST_WORKERS, description=f"Of {_acts_with('workers')}: how many workers.")
    ] = None
    worker: Annotated[
        str | None, Query(max_length=MOST_NAME, description=f"Of {_acts_with('worker')}: id of the worker.")
    ] = None

    def request(self) -> OperatorRequest:
        """Raises `UserError` where something is missing."""
        names = _names(self.act)
        if "workers" in names and self.workers is None:
            raise UserError(f"`workers` is missing; expected a whole number from 1 to {MOST_WORKERS} to scale to")
        if "worker" in names and not self.worker:
            raise UserError(f"`worker` is missing; expected the id of the worker that {self.act} concerns, such as w3")
        given = {"workers": self.workers, "worker": self.worker}
        return self.act.asks(**{name: value for name, value in given.items() if name in names})


AnAct = Annotated[AskedAct, Depends(AskedAct)]

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


MOST_SECONDS = 1.0
"""How old an answer may be."""

KEPT_TIMES = 5.0
"""How many times as long as it took an answer is kept: readers cost a sixth of the loop's time at most."""


class RecentOverview:
    """The overview of all jobs, for one API."""

    def __init__(self) -> None:
        self._making = asyncio.Lock()
        self._rows: list[JobRow] = []
        self._of: Shell | None = None
        self._until = 0.0

    async def rows(self, shell: Shell) -> list[JobRow]:
        """Without their last hours, those that need attention first."""
        async with self._making:
            if self._of is not shell or time.monotonic() >= self._until:
                began = time.monotonic()
                self._rows = await _made(shell)
                now = time.monotonic()
                self._of, self._until = shell, now + min(MOST_SECONDS, KEPT_TIMES * (now - began))
            return self._rows


async def _made(shell: Shell) -> list[JobRow]:
    views, series = [], {}
    for name, runner in list(shell.runners.items()):
        await asyncio.sleep(0)
        views.append(runner.view())
        series[name] = runner.series
    now = shell.clock()
    return [JobRow.of(view, why, series[view.job], now) for view, why in by_attention(views, now)]
