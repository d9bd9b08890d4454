"""The command's REST client: one method per route, an error's own sentence instead of a status.

Every command but `worker` goes through it, also those that run the controller in their own process. It knows nothing
of how anything is shown.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
from shoal_protos.acts import ActCalls
from shoal_protos.bearer import shown_token
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import Conflict, NoController, NotFound, PeerError, Refused, ShoalError, StoreError, UserError
from shoal_protos.rest import (
    OVER,
    AnswerObject,
    Json,
    RestAddress,
    RestProblem,
    job_path,
    problem_in,
    reason_of,
    request_of,
    stream_of,
)

from shoal_controller.access.client_tls import ClientTls, https_instead
from shoal_controller.access.worker_tokens import is_for_workers


class IsOver(Conflict):
    """There is nothing to end."""


class NotTraining(Conflict):
    """No world of the job trains, as far as the controller has heard of its workers."""


class Changed(UserError):
    """The job has another version than the one that was looked at. Nothing was done."""


class NotNow(StoreError):
    """The controller has too much to do for this caller now; the same request may be sent again."""


class BrokeOff(NotFound):
    """A log ends before its worker does."""


ERRORS: dict[int, type[ShoalError]] = {
    401: Refused, 403: Refused, 404: NotFound, 409: Conflict, 412: Changed, 429: NotNow, 502: PeerError,
    503: StoreError,
}  # fmt: skip


def local_folder() -> Path:
    """Where a controller that was started in this folder keeps its token."""
    return Path(os.environ.get("SHOAL_DATA") or ".shoal")


class Client(ActCalls[Awaitable[Json]]):
    """One controller, by the URL of its REST API. An async context manager."""

    def __init__(self, url: str, token: str | None = None, way: httpx.AsyncBaseTransport | None = None) -> None:
        """`token`: the operators'. Default: SHOAL_TOKEN, else what `shoal run` keeps in this folder. `way`: to a
        controller of this process. Default: a connection; SHOAL_CA, else this system, says whom it trusts.
        """
        self.address = address = RestAddress(url)
        self.date = ""
        """What the controller's clock showed at its last answer, as HTTP writes it."""
        authorities = os.environ.get("SHOAL_CA") if address.is_tls else None
        self._tls = ClientTls(Path(authorities) if authorities else None)
        self._http = httpx.AsyncClient(
            **address.settings(shown_token(token, local_folder() if address.is_here else None)),
            verify=self._tls.context() if address.is_tls and way is None else False,
            transport=way,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    # ---- reading

    async def jobs(self) -> list[Json]:
        return await self._list("/jobs", "jobs")

    async def overview(self) -> list[Json]:
        """All jobs, those that need attention first, without their last hour."""
        return await self._list("/overview?series=false", "jobs")

    async def job(self, job: str) -> Json:
        return await self._ask("GET", job_path(job))

    async def spec(self, job: str) -> Json:
        return await self._ask("GET", job_path(job, "spec"))

    async def workers(self, job: str) -> list[Json]:
        return await self._list(job_path(job, "workers"), "workers")

    async def events(self, job: str, after: int = 0) -> list[Json]:
        return await self._list(f"{job_path(job, 'events')}?after={after}", "events")

    async def checkpoints(self, job: str) -> list[Json]:
        return await self._list(job_path(job, "checkpoints"), "checkpoints")

    async def report(self, job: str) -> Json:
        return await self._ask("GET", job_path(job, "report"))

    async def follow(self, job: str, after: int = 0) -> AsyncIterator[Json]:
        """Every event past `after` as it happens; ends when the controller ends the stream."""
        async with aclosing(self._stream(f"{job_path(job, 'events')}?after={after}")) as events:
            async for event in events:
                yield event

    async def log(self, job: str, worker: str, follow: bool) -> AsyncIterator[str]:
        """A worker's log in parts, from its beginning; `follow`: until the worker has ended. Raises `BrokeOff` where it
        breaks off.
        """
        path = f"{job_path(job, 'workers', worker, 'log')}?follow={'true' if follow else 'false'}"
        async with aclosing(self._stream(path)) as parts:
            async for part in parts:
                if "detail" in part:
                    raise BrokeOff(str(part["detail"]))
                yield str(part["text"])

    async def _stream(self, path: str) -> AsyncGenerator[AnswerObject]:
        """The objects of server-sent events."""
        answer = await self._send(stream_of(self._http, path), stream=True)
        async with aclosing(answer):
            try:
                async for line in answer.aiter_lines():
                    if line.startswith("data:"):
                        yield self.address.object_in(line.removeprefix("data:"), f"GET {path.partition('?')[0]}")
            except httpx.TransportError as error:
                raise NoController(f"the controller at {self.address.url} went away ({reason_of(error)})") from error

    # ---- changing

    async def create(self, spec: Json) -> Json:
        return await self._ask("POST", "/jobs", spec)

    async def stop(self, job: str) -> Json:
        """End a job. Raises `IsOver` for one that is over by then, which the same request would forget: it is asked of
        the very version that was looked at, and a job's end is another one.
        """
        while True:
            seen = await self.job(job)
            if seen["phase"] in OVER:
                raise IsOver(f"job {job} is over ({seen['phase']})")
            with suppress(Changed):
                return await self.delete_job(job, if_version=seen["version"])

    async def _changed(
        self, _: str, method: str, path: str, body: Json | None, headers: Mapping[str, str]
    ) -> AnswerObject:
        return await self._ask(method, path, body, headers)

    # ---- tokens

    async def join_token(self, job: str) -> str:
        return str((await self._ask("POST", job_path(job, "token")))["token"])

    async def tokens(self) -> list[Json]:
        return await self._list("/tokens", "tokens")

    async def change_token(self, method: str, path: str = "", body: Json | None = None) -> Json:
        """Create, rotate (`/NAME/rotate`) or revoke (`/NAME`) a token; the name is a `path_part`."""
        return await self._ask(method, f"/tokens{path}", body)

    # ---- the one place that speaks HTTP

    async def _list(self, path: str, name: str) -> list[Json]:
        return list((await self._ask("GET", path)).entries(name))

    async def _ask(
        self, method: str, path: str, body: Json | None = None, headers: Mapping[str, str] | None = None
    ) -> AnswerObject:
        answer = await self._send(request_of(self._http, method, path, body, headers))
        return self.address.answered(answer, f"{method} {path}")

    async def _send(self, request: httpx.Request, stream: bool = False) -> httpx.Response:
        try:
            answer = await self._http.send(request, stream=stream)
            self.date = answer.headers.get("date", "")
            if answer.is_error:
                await answer.aread()
                await answer.aclose()
        except httpx.TransportError as error:
            url = self.address.url
            if trouble := self._tls.trouble(error, url) or await https_instead(error, url):
                raise NoController(trouble) from error
            raise self.address.no_answer(error, "name another with --url or SHOAL_URL") from error
        if answer.is_error:
            raise _refusal(problem_in(answer), request)
        return answer


def _refusal(problem: RestProblem | NoController, request: httpx.Request) -> ShoalError:
    """The error that the controller meant, with its sentence."""
    if isinstance(problem, NoController):
        return problem
    if problem.code == ErrorCode.UNAUTHORIZED:
        return Refused(
            f"the controller at {request.url.copy_with(path='/', query=None)} {_found(request)}; set SHOAL_TOKEN to "
            "its token or one of `shoal token create`, or run this where `shoal run` keeps .shoal/token"
        )
    if problem.code == ErrorCode.NOT_TRAINING:
        return NotTraining(str(problem))
    return ERRORS.get(problem.status, UserError if problem.status < 500 else ShoalError)(str(problem))


def _found(request: httpx.Request) -> str:
    shown = request.headers.get("authorization", "")
    if is_for_workers(shown.removeprefix("Bearer ")):
        return "was shown a job's token, which is for its workers only"
    return "does not know the token that was shown" if shown else "asks for a token"
