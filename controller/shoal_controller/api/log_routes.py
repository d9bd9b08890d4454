"""The route of what a worker has printed: the end of its log, or all of it as server-sent events.

A stream reads the next part when its reader has taken the one before, so that none is kept in memory. It counts among
those that follow events (`stream.py`), ends with its reader's token, and says by an event `problem` why it breaks off.
While nothing comes it is looked whether the worker has ended or the controller stops: a silent kubelet ends nothing.
"""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import NotFound, ShoalError, UserError
from shoal_protos.text import shown_name

from shoal_controller.api.dependencies import AWorker, NamedWorker, Readable, controller_of, shell_to_change
from shoal_controller.api.event_routes import A_STREAM
from shoal_controller.api.page_answers import LogAnswer
from shoal_controller.api.stream import IDLE_SECONDS, MEDIA_TYPE, Follower, Following, wants_stream
from shoal_controller.core.machine.spec import WorkerView
from shoal_controller.jobs.runner import Runner
from shoal_controller.jobs.shell import Shell
from shoal_controller.launchers.worker_logs import IsOver, LogFiles, WorkerLogs
from shoal_controller.process.tasks import with_pauses

LOG_BYTES, MOST_LOG_BYTES = 16 << 10, 64 << 10
"""Bytes of an answer: the default, and the most."""
LOOK_SECONDS = 0.25
"""How often it is looked whether a stream to which nothing comes goes on."""
END_SECONDS = 5.0
"""How long nothing must come after a worker's end: it may be under way from a kubelet."""
PROBLEM = "problem"
"""Name of the server-sent event that says why a log breaks off."""

MostBytes = Annotated[
    int, Query(alias="bytes", ge=1, le=MOST_LOG_BYTES, description=f"Most bytes of the answer. Default: {LOG_BYTES}.")
]
Follows = Annotated[bool, Query(description="Whether a stream goes on until the worker has ended. Default: false.")]

router = APIRouter()


@router.get("/jobs/{job}/workers/{worker}/log", tags=["workers"], response_model=LogAnswer, responses=A_STREAM)
async def get_log(
    at: AWorker, shell: Readable, request: Request, count: MostBytes = LOG_BYTES, follow: Follows = False
) -> LogAnswer | StreamingResponse:
    """Show the end of what a worker has printed, from its file on the leading controller's machine or from its pod.

    With `Accept: text/event-stream`, stream all of it in parts, `{"text": …}`, with `follow` as it grows. An event
    `problem`, `{"detail": …}`, says why it breaks off.
    """
    worker = _worker(shell, at)
    if worker is None:
        raise NotFound(f"job {at.job} has no worker {shown_name(at.worker)}").coded(ErrorCode.WORKER_UNKNOWN)
    logs = _logs_of(request, worker)
    if follow and not wants_stream(request):
        accept = request.headers.get("accept", "")
        raise UserError(
            f"`follow` is true and `Accept` is {accept[:80]!r}; expected `Accept: {MEDIA_TYPE}`, or no `follow`"
        )
    if not wants_stream(request):
        read = await logs.read(at.job, worker, count)
        return LogAnswer(worker=at.worker, path=read.path, bytes=read.size, begin=read.begin, text=read.text)
    runner = (shell_to_change(request) if follow else shell).runner(at.job)
    is_over = partial(runner.has_ended, at.worker) if follow else None
    follower = Follower.of(request)
    with follower.place() as place:
        parts = await logs.stream(at.job, worker, is_over)
        return Following(_events(parts, follower, runner, is_over), place.pop_all())


def _worker(shell: Shell, at: NamedWorker) -> WorkerView | None:
    return next((one for one in shell.view(at.job).workers if one.worker == at.worker), None)


def _logs_of(request: Request, worker: WorkerView) -> WorkerLogs:
    settings = request.app.state.settings
    if not worker.pod:
        return LogFiles(settings.folder, settings.log_folder)
    logs = controller_of(request).pod_logs
    if logs is None:
        raise NotFound(
            f"{worker.worker} runs in the pod {worker.pod}; this controller has no cluster to ask for its log"
        )
    return logs


async def _events(
    parts: AsyncGenerator[bytes], follower: Follower, runner: Runner, is_over: IsOver | None
) -> AsyncGenerator[bytes]:
    decoder = getincrementaldecoder("utf-8")("replace")
    quiet = ended = 0.0
    try:
        async with aclosing(with_pauses(parts, LOOK_SECONDS)) as found:
            async for part in found:
                if not follower.is_let_in():
                    return
                if runner.halted is not None:
                    yield _problem(runner.halted)
                    return
                if part is not None:
                    quiet = ended = 0.0
                    if text := decoder.decode(part):
                        yield _event(text)
                    continue
                quiet += LOOK_SECONDS
                ended += LOOK_SECONDS if is_over is not None and is_over() else 0.0
                if ended >= END_SECONDS:
                    break
                if quiet >= IDLE_SECONDS:
                    quiet = 0.0
                    yield KEEPALIVE_COMMENT
    except ShoalError as error:
        yield _problem(error)
    if rest := decoder.decode(b"", final=True):
        yield _event(rest)


def _event(text: str) -> bytes:
    return format_sse_event(data_str=json.dumps({"text": text}))


def _problem(error: ShoalError) -> bytes:
    return format_sse_event(data_str=json.dumps({"detail": str(error)}), event=PROBLEM)
