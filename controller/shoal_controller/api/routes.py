"""The REST routes under `/v1`: each calls the shell and returns what it says.

A controller that does not lead has forwarded what it could (`forwarding.py`); what comes here nevertheless is read from
the store, or refused. Nothing is decided here. Errors are raised as they are and become problems in `problems.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from shoal_protos.errors import Refused

from shoal_controller.api import resource_rules, token_routes
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
from shoal_controller.api.models import DrainBody, JobBody, ScaleBody
from shoal_controller.api.stream import Follower, event_stream, wants_stream
from shoal_controller.api.token_routes import ACaller, JoinTokenAnswer
from shoal_controller.core.machine.events import ConfirmLost, DrainWorker, Pause, Resume, Save, Scale
from shoal_controller.leadership.controller_state import ControllerState
from shoal_controller.shell import Shell

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": Problem}, "5XX": {"model": Problem}}

A_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
"""What else events may come as."""

router = APIRouter(prefix="/v1", responses=ERRORS)


def controller_of(request: Request) -> ControllerState:
    """What `app.py` was given."""
    controller = request.app.state.controller
    assert isinstance(controller, ControllerState)
    return controller


async def shell_to_read(request: Request) -> Shell:
    """All jobs, as far as this controller knows them."""
    return await controller_of(request).readable()


def shell_to_change(request: Request) -> Shell:
    """All jobs, of the controller that leads."""
    return controller_of(request).leading()


Readable = Annotated[Shell, Depends(shell_to_read)]
Leading = Annotated[Shell, Depends(shell_to_change)]


@router.get("/jobs")
async def list_jobs(shell: Readable) -> JobsAnswer:
    """List all jobs, including finished ones."""
    return JobsAnswer(jobs=[JobAnswer.of(view) for view in shell.jobs()])


@router.post("/jobs", status_code=202)
async def create_job(body: JobBody, shell: Leading, caller: ACaller, request: Request, response: Response) -> JobAnswer:
    """Create a job. A finished job with the same name is replaced."""
    settings = request.app.state.settings
    if body.launcher not in settings.launchers:
        raise Refused(
            f"`launcher` is {body.launcher}; this controller allows {', '.join(sorted(settings.launchers))} "
            "(its SHOAL_LAUNCHERS)"
        )
    view = await resource_rules.create(shell, body.spec(settings.default_workers), caller)
    response.headers["Location"] = f"/v1/jobs/{view.job}"
    return JobAnswer.of(view)


@router.get("/jobs/{job}")
async def get_job(job: str, shell: Readable) -> JobAnswer:
    """Show a job."""
    return JobAnswer.of(shell.view(job))


@router.delete("/jobs/{job}", status_code=202)
async def delete_job(job: str, shell: Leading, caller: ACaller) -> JobAnswer:
    """Stop a job; its events stay. Forget a finished job, with its events and logs; its checkpoints stay."""
    return JobAnswer.of(await resource_rules.delete(shell, job, caller))


@router.post("/jobs/{job}/scale", status_code=202)
async def scale_job(job: str, body: ScaleBody, caller: ACaller, request: Request) -> JobAnswer:
    """Set the number of workers, or its bounds, in the job's resource where it was made from one."""
    asked = Scale(body.workers, body.min, body.max)
    return JobAnswer.of(await resource_rules.scale(controller_of(request), job, asked, caller))


@router.post("/jobs/{job}/pause", status_code=202)
async def pause_job(job: str, shell: Leading, caller: ACaller) -> JobAnswer:
    """Pause training; workers stay connected."""
    await shell.submit(job, Pause(), caller)
    return JobAnswer.of(shell.view(job))


@router.post("/jobs/{job}/resume", status_code=202)
async def resume_job(job: str, shell: Leading, caller: ACaller) -> JobAnswer:
    """Resume a paused job."""
    await shell.submit(job, Resume(), caller)
    return JobAnswer.of(shell.view(job))


@router.get("/jobs/{job}/workers")
async def list_workers(job: str, shell: Readable) -> WorkersAnswer:
    """List the job's workers, including those that are lost or have left."""
    return WorkersAnswer(workers=[WorkerAnswer.of(view) for view in shell.view(job).workers])


@router.post("/jobs/{job}/workers/{worker}/drain", status_code=202)
async def drain_worker(
    job: str, worker: str, shell: Leading, caller: ACaller, body: DrainBody | None = None
) -> JobAnswer:
    """Drain a worker: copy its blocks elsewhere, then let it go."""
    asked = body or DrainBody()
    await shell.submit(job, DrainWorker(worker, asked.grace_seconds, asked.why), caller)
    return JobAnswer.of(shell.view(job))


@router.post("/jobs/{job}/workers/{worker}/lost", status_code=202)
async def lose_worker(job: str, worker: str, shell: Leading, caller: ACaller) -> JobAnswer:
    """Confirm that a silent worker is dead, so that nobody waits for it."""
    await shell.submit(job, ConfirmLost(worker), caller)
    return JobAnswer.of(shell.view(job))


@router.get("/jobs/{job}/events", response_model=EventsAnswer, responses=A_STREAM)
async def list_events(
    job: str,
    shell: Readable,
    caller: ACaller,
    request: Request,
    after: Annotated[int, Query(ge=0)] = 0,
    last_event_id: Annotated[int, Header(ge=0, include_in_schema=False)] = 0,
) -> EventsAnswer | StreamingResponse:
    """List the job's events after a revision. With `Accept: text/event-stream`, stream them as they happen."""
    after = max(after, last_event_id)
    if wants_stream(request):
        follower = Follower(caller.token, request.state.is_let_in)
        return event_stream(shell_to_change(request), job, after, follower, request.app.state.followers)
    return EventsAnswer(events=[EventAnswer.of(event) for event in await shell.events(job, after)])


@router.get("/jobs/{job}/report")
async def get_report(job: str, shell: Readable) -> ReportAnswer:
    """Show the run report, as `--json` writes it."""
    return ReportAnswer.of(shell.view(job))


@router.get("/jobs/{job}/checkpoints")
async def list_checkpoints(job: str, shell: Readable) -> CheckpointsAnswer:
    """List the job's checkpoints, newest first."""
    return CheckpointsAnswer(checkpoints=[CheckpointAnswer.of(one) for one in shell.view(job).checkpoints])


@router.post("/jobs/{job}/checkpoints", status_code=202)
async def save_checkpoint(job: str, shell: Leading, caller: ACaller) -> JobAnswer:
    """Save a checkpoint after the next step; it is listed once it is complete."""
    await shell.submit(job, Save(), caller)
    return JobAnswer.of(shell.view(job))


@router.post("/jobs/{job}/token")
async def get_join_token(
    job: str, shell: Leading, caller: ACaller, request: Request, response: Response
) -> JoinTokenAnswer:
    """Show the join token for workers of this run of the job; it opens sessions of that run and nothing else."""
    return token_routes.join_token(request, response, caller, job, shell.spec(job).run)


router.include_router(token_routes.router)
