"""The route of what a worker has printed: the end of its log, or all of it as server-sent events.

A stream reads the next part when its reader has taken the one before, so that none is kept in memory. It counts among
those that follow events (`stream.py`), ends with its reader's token, and says by an event `problem` why it breaks off.
"""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import NotFound, ShoalError
from shoal_protos.rest import OVER
from shoal_protos.text import shown_name

from shoal_controller.api.dependencies import AWorker, NamedWorker, Readable, controller_of
from shoal_controller.api.event_routes import A_STREAM
from shoal_controller.api.page_answers import LogAnswer
from shoal_controller.api.stream import IDLE_SECONDS, Follower, streaming, wants_stream
from shoal_controller.core.machine.spec import State, WorkerView
from shoal_controller.jobs.shell import Shell
from shoal_controller.launchers.worker_logs import IsOver, LogFiles, WorkerLogs
from shoal_controller.process.tasks import with_pauses

LOG_BYTES, MOST_LOG_BYTES = 16 << 10, 64 << 10
"""What is read where nobody says otherwise, and at most."""
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
    if not wants_stream(request):
        read = await logs.read(at.job, worker, count)
        return LogAnswer(worker=at.worker, path=read.path, bytes=read.size, begin=read.begin, text=read.text)
    follower = Follower.of(request)
    follower.check()
    return streaming(_events(await logs.stream(at.job, worker, _end_of(shell, at) if follow else None), follower))


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


def _end_of(shell: Shell, at: NamedWorker) -> IsOver:
    def is_over() -> bool:
        try:
            worker = _worker(shell, at)
            return worker is None or worker.state in (State.LOST, State.LEFT) or shell.view(at.job).phase in OVER
        except ShoalError:
            return True  # the job is forgotten

    return is_over


async def _events(parts: AsyncGenerator[bytes], follower: Follower) -> AsyncGenerator[bytes]:
    decoder = getincrementaldecoder("utf-8")("replace")
    with follower.counted():
        try:
            async with aclosing(with_pauses(parts, IDLE_SECONDS)) as found:
                async for part in found:
                    if not follower.is_let_in():
                        return
                    if part is None:
                        yield KEEPALIVE_COMMENT
                    elif text := decoder.decode(part):
                        yield _event(text)
        except ShoalError as error:
            yield format_sse_event(data_str=json.dumps({"detail": str(error)}), event=PROBLEM)
        if rest := decoder.decode(b"", final=True):
            yield _event(rest)


def _event(text: str) -> bytes:
    return format_sse_event(data_str=json.dumps({"text": text}))
