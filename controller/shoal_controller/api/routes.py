"""The REST routes under `/v1` and the headers that they read: each calls the shell and returns its answer.

Nothing is decided here. The routes of an operator's acts follow from `shoal_protos/acts.py`. `dependencies.py` finds
the shell, `problems.py` makes problems of the errors, which are raised as they are. A change may have `If-Match`
(`jobs/only_if.py` has its meaning), a new job an `Idempotency-Key`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from shoal_protos.acts import Act, OperatorRequest
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import Refused, UserError

from shoal_controller.access.callers import Role
from shoal_controller.api import event_routes, log_routes, page_routes, resource_rules, token_routes
from shoal_controller.api.answers import (
    CheckpointAnswer,
    CheckpointsAnswer,
    EventAnswer,
    EventsAnswer,
    JobAnswer,
    JobsAnswer,
    Problem,
    ReportAnswer,
    WorkerAnswer,
    WorkersAnswer,
)
from shoal_controller.api.dependencies import (
    AFilter,
    After,
    Leading,
    Limit,
    Readable,
    by_number,
    checkpoint_place,
    controller_of,
    cursor_of,
    page,
    place_of,
    shell_to_change,
    workers_in_order,
)
from shoal_controller.api.event_routes import A_STREAM
from shoal_controller.api.models import WITH_BODIES, JobBody, body_of
from shoal_controller.api.stream import Follower, event_stream, wants_stream
from shoal_controller.api.strict import StrictRoute, check_parameters
from shoal_controller.api.token_routes import ACaller, JoinTokenAnswer
from shoal_controller.core.machine.spec import JobSpec, JobView
from shoal_controller.jobs.event_bounds import EVENTS_KEPT
from shoal_controller.jobs.only_if import OnlyIf, version_of

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": Problem}, "5XX": {"model": Problem}}

router = APIRouter(prefix="/v1", responses=ERRORS, dependencies=[Depends(check_parameters)], route_class=StrictRoute)


def after_revision(
    after: Annotated[int, Query(ge=0, description="Revision of the last event that is not wanted.")] = 0,
    last_event_id: Annotated[int, Header(ge=0, include_in_schema=False)] = 0,
) -> int:
    """Of a reader that comes again, the header says what it has had."""
    return max(after, last_event_id)


AnAfterRevision = Annotated[int, Depends(after_revision)]


def _answer(response: Response, view: JobView) -> JobAnswer:
    """A job, with its version in the header."""
    tag(response, view)
    return JobAnswer.of(view)


def _add_acts(tag: str) -> None:
    """Add the routes of the acts that have this tag."""
    for act in (act for act in Act if act.tag == tag):
        _, reader = WITH_BODIES.get(act, (None, act.asks))  # without a body the path says all
        asked_of_it = Depends(reader)

        async def carry_out(
            job: str, caller: ACaller, only_if: AnOnlyIf, request: Request, response: Response,
            asked: OperatorRequest = asked_of_it,
        ) -> JobAnswer:  # fmt: skip
            done = await resource_rules.carry_out(controller_of(request), job, asked, caller, only_if)
            return _answer(response, done)

        router.add_api_route(
            f"/jobs/{{job}}{act.below}", carry_out, methods=[act.method], name=act.operation,
            description=act.asks.__doc__, tags=[tag], status_code=202,
        )  # fmt: skip


@router.get("/jobs", tags=["jobs"])
async def list_jobs(shell: Readable, limit: Limit = None, after: After = None) -> JobsAnswer:
    """List all jobs by name, including finished ones."""
    begin = None if after is None else (after,)
    found, more = page(shell.jobs(), lambda view: (view.job,), begin, limit)
    return JobsAnswer(jobs=[JobAnswer.of(view) for view in found], next=found[-1].job if more else None)


@router.post("/jobs", tags=["jobs"], status_code=202)
async def create_job(
    body: JobBody, shell: Leading, caller: ACaller, key: AKey, request: Request, response: Response
) -> JobAnswer:
    """Create a job. A finished job with the same name is replaced."""
    settings = request.app.state.settings
    if body.launcher not in settings.launchers:
        raise Refused(
            f"`launcher` is {body.launcher}; this controller allows {', '.join(sorted(settings.launchers))} "
            "(its SHOAL_LAUNCHERS)"
        ).coded(ErrorCode.LAUNCHER_NOT_ALLOWED)
    spec = keyed(body.spec(settings.default_workers), body, key)
    view = await resource_rules.create(shell, spec, caller)
    tag(response, view)
    response.headers["Location"] = f"/v1/jobs/{view.job}"
    return JobAnswer.of(view)


@router.get("/jobs/{job}", tags=["jobs"])
async def get_job(job: str, shell: Readable, response: Response) -> JobAnswer:
    """Show a job."""
    return _answer(response, shell.view(job))


@router.get("/jobs/{job}/spec", tags=["jobs"], response_model=JobBody)
async def get_job_spec(job: str, shell: Readable, caller: ACaller) -> JSONResponse:
    """Show what a job was made with, defaults filled in, as it could be made again.

    A role that may only view sees the names of environment variables, not their values.
    """
    spec, view = shell.spec(job), shell.view(job)
    answer = JSONResponse(body_of(spec, shows_values=caller.role.includes(Role.OPERATE)))
    tag(answer, view)
    return answer


_add_acts("jobs")


@router.get("/jobs/{job}/workers", tags=["workers"])
async def list_workers(job: str, shell: Readable, limit: Limit = None, after: After = None) -> WorkersAnswer:
    """List the job's workers by their numbers, including those that are lost or have left."""
    begin = None if after is None else by_number(after)
    shown = shell.view(job)
    found, more = page(workers_in_order(shown.workers), lambda view: by_number(view.worker), begin, limit)
    answers = [WorkerAnswer.of(view, shown.cell) for view in found]
    return WorkersAnswer(workers=answers, next=found[-1].worker if more else None)


_add_acts("workers")


@router.get("/jobs/{job}/events", tags=["events"], response_model=EventsAnswer, responses=A_STREAM)
async def list_events(
    job: str,
    shell: Readable,
    request: Request,
    after: AnAfterRevision,
    only: AFilter,
    limit: Limit = None,
) -> EventsAnswer | StreamingResponse:
    """List the job's events after a revision. With `Accept: text/event-stream`, stream them as they happen."""
    if wants_stream(request):
        return event_stream(shell_to_change(request), job, after, Follower.of(request), only)
    most = limit or EVENTS_KEPT
    kept = await shell.events(job, after, most + 1 if only.admits_all else 0)
    found = [event for event in kept if only.admits(event)][: most + 1]
    following = found[most - 1].revision if len(found) > most else None
    return EventsAnswer(events=[EventAnswer.of(event) for event in found[:most]], next=following)


@router.get("/jobs/{job}/report", tags=["jobs"])
async def get_report(job: str, shell: Readable) -> ReportAnswer:
    """Show the run report, as `--json` writes it."""
    return ReportAnswer.of(shell.view(job))


@router.get("/jobs/{job}/checkpoints", tags=["checkpoints"])
async def list_checkpoints(job: str, shell: Readable, limit: Limit = None, after: After = None) -> CheckpointsAnswer:
    """List the job's checkpoints, newest first."""
    begin = None if after is None else checkpoint_place(after)
    found, more = page(sorted(shell.view(job).checkpoints, key=place_of), place_of, begin, limit)
    answers = [CheckpointAnswer.of(one) for one in found]
    return CheckpointsAnswer(checkpoints=answers, next=cursor_of(found[-1]) if more else None)


_add_acts("checkpoints")


@router.post("/jobs/{job}/token", tags=["tokens"])
async def get_join_token(
    job: str, shell: Leading, caller: ACaller, request: Request, response: Response
) -> JoinTokenAnswer:
    """Show the join token for workers of this run of the job; it opens sessions of that run and nothing else."""
    return token_routes.join_token(request, response, caller, job, shell.spec(job).run)


router.include_router(token_routes.router)
router.include_router(event_routes.router)
router.include_router(page_routes.router)
router.include_router(log_routes.router)


TAG = r'(?:W/)?"[^"]*"'
TAGS = re.compile(rf"\s*{TAG}(?:\s*,\s*{TAG})*\s*")
KEY = re.compile(r"[!-~]{1,255}")

IfMatchHeader = Header(
    alias="If-Match",
    description="A version of the job, in quotes, as `ETag` and `version` have it: if the job has another one by now, "
    "nothing is done and the answer is 412, with its version now. Default, and `*`: whatever its version is.",
)
KeyHeader = Header(
    alias="Idempotency-Key",
    description="1 to 255 visible ASCII characters of the client's choice: a request that comes once more with it, "
    "because its answer was lost, gets the job that it has made. Kept with the job.",
)


def only_if(if_match: Annotated[str | None, IfMatchHeader] = None) -> OnlyIf | None:
    """What `If-Match` asks for; None: nothing. A weak tag matches nothing (RFC 9110)."""
    if if_match is None or if_match.strip() == "*":
        return None
    if not TAGS.fullmatch(if_match):
        raise UserError(
            f"the header `If-Match` is {if_match[:80]!r}; expected a version of the job in double quotes, as `ETag` "
            "has it, or *"
        )
    tags = re.findall(TAG, if_match)
    return OnlyIf(tuple(tag.strip('"') for tag in tags if not tag.startswith("W/")))


def request_key(idempotency_key: Annotated[str | None, KeyHeader] = None) -> str:
    """The key of the request; empty: it has none."""
    if idempotency_key is not None and not KEY.fullmatch(idempotency_key):
        raise UserError(
            f"the header `Idempotency-Key` is {idempotency_key[:80]!r}; expected 1 to 255 visible ASCII characters"
        )
    return idempotency_key or ""


AnOnlyIf = Annotated[OnlyIf | None, Depends(only_if)]
AKey = Annotated[str, Depends(request_key)]


def keyed(spec: JobSpec, body: JobBody, key: str) -> JobSpec:
    """The spec, with the key of the request and what tells it from another one."""
    if not key:
        return spec
    return replace(spec, request_key=key, request_digest=hashlib.sha256(body.model_dump_json().encode()).hexdigest())


def tag(response: Response, view: JobView) -> None:
    """Have an answer with a job say its version. It is no tag of the whole answer, which changes with every step: no
    cache may go by it.
    """
    response.headers["ETag"] = f'"{version_of(view)}"'
    response.headers["Cache-Control"] = "no-store"
