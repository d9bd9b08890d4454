"""The command's REST client: one method per route, an error's own sentence instead of a status.

Every command but `worker` goes through it, also those that run the controller in their own process. It knows nothing
of how anything is shown.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from shoal_protos.acts import Act, ActCalls, given
from shoal_protos.addresses import is_here
from shoal_protos.answer_object import AnswerObject, is_list_of_objects, unread_answer
from shoal_protos.bearer import UNSENDABLE, is_sendable, kept_token
from shoal_protos.controller_url import split_url
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import Conflict, NotFound, Refused, ShoalError, StoreError, UserError
from shoal_protos.path_part import NOT_FINITE, NOT_TEXT, path_part
from shoal_protos.release import RELEASE, RELEASE_HEADER
from shoal_protos.text import of_shoal

from shoal_controller.access.client_tls import ClientTls, https_instead
from shoal_controller.access.worker_tokens import is_for_workers
from shoal_controller.cli.endings import Unreachable

Json = dict[str, Any]
"""A job, a worker, an event or a report, as REST returns it."""

OVER = ("succeeded", "failed", "cancelled")
"""Phases of a job that is over."""

ANSWER_SECONDS = 30.0
"""An answer waits for the store at most; a controller that needs longer is in trouble."""
FOLLOW_SECONDS = 60.0
"""A stream of events says something at least every 15 s (server-sent comments)."""


class IsOver(Conflict):
    """There is nothing to end."""


class NotTraining(Conflict):
    """No world of the job trains, as far as the controller has heard of its workers."""


class Changed(UserError):
    """The job has another version than the one that was looked at. Nothing was done."""


class NotNow(StoreError):
    """The controller has too much to do for this caller now; the same request may be sent again."""


ERRORS: dict[int, type[ShoalError]] = {
    401: Refused, 403: Refused, 404: NotFound, 409: Conflict, 412: Changed, 429: NotNow, 503: StoreError,
}  # fmt: skip


def local_folder() -> Path:
    """Where a controller that was started in this folder keeps its token."""
    return Path(os.environ.get("SHOAL_DATA") or ".shoal")


def _authorities() -> Path | None:
    given = os.environ.get("SHOAL_CA")
    return Path(given) if given else None


class Client(ActCalls[Awaitable[Json]]):
    """One controller, by the URL of its REST API. An async context manager."""

    def __init__(self, url: str, token: str | None = None, way: httpx.AsyncBaseTransport | None = None) -> None:
        """`token`: the operators'. Default: SHOAL_TOKEN, else what `shoal run` keeps in this folder. `way`: to a
        controller of this process. Default: a connection; SHOAL_CA, else this system, says whom it trusts.
        """
        self.url = url.rstrip("/")
        self.date = ""
        """What the controller's clock showed at its last answer, as HTTP writes it."""
        parts, host = split_url(self.url)
        here = is_here(host)
        self._tls = ClientTls(_authorities() if parts.scheme == "https" else None)
        if token is None:
            token = os.environ.get("SHOAL_TOKEN") or (kept_token(local_folder()) if here else "")
        if not is_sendable(token):
            raise UserError(UNSENDABLE)
        self._http = httpx.AsyncClient(
            base_url=f"{self.url}/v1",
            timeout=ANSWER_SECONDS,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            trust_env=not here,  # no proxy stands between two processes of one machine
            verify=self._tls.context() if parts.scheme == "https" and way is None else False,
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
        return await self._ask("GET", f"/jobs/{path_part(job)}")

    async def spec(self, job: str) -> Json:
        return await self._ask("GET", f"/jobs/{path_part(job)}/spec")

    async def workers(self, job: str) -> list[Json]:
        return await self._list(f"/jobs/{path_part(job)}/workers", "workers")

    async def events(self, job: str, after: int = 0) -> list[Json]:
        return await self._list(f"/jobs/{path_part(job)}/events?after={after}", "events")

    async def checkpoints(self, job: str) -> list[Json]:
        return await self._list(f"/jobs/{path_part(job)}/checkpoints", "checkpoints")

    async def report(self, job: str) -> Json:
        return await self._ask("GET", f"/jobs/{path_part(job)}/report")

    async def follow(self, job: str, after: int = 0) -> AsyncIterator[Json]:
        """Every event past `after` as it happens; ends when the controller ends the stream."""
        request = self._http.build_request(
            "GET",
            f"/jobs/{path_part(job)}/events?after={after}",
            headers={"Accept": "text/event-stream"},
            timeout=FOLLOW_SECONDS,
        )
        answer = await self._send(request, stream=True)
        async with aclosing(answer):
            try:
                async for line in answer.aiter_lines():
                    if line.startswith("data:"):
                        yield json.loads(line.removeprefix("data:"))
            except httpx.TransportError as error:
                raise Unreachable(f"the controller at {self.url} went away ({_why(error)})") from error

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

    async def _act(
        self, act: Act, job: str, worker: str = "", if_version: str | None = None, body: Json | None = None
    ) -> Json:
        return await self._ask(act.method, act.path_of(job, worker), given(body), if_version or "")

    # ---- tokens

    async def join_token(self, job: str) -> str:
        return str((await self._ask("POST", f"/jobs/{path_part(job)}/token"))["token"])

    async def tokens(self) -> list[Json]:
        return await self._list("/tokens", "tokens")

    async def change_token(self, method: str, path: str = "", body: Json | None = None) -> Json:
        """Create, rotate (`/NAME/rotate`) or revoke (`/NAME`) a token; the name is a `path_part`."""
        return await self._ask(method, f"/tokens{path}", body)

    # ---- the one place that speaks HTTP

    async def _list(self, path: str, name: str) -> list[Json]:
        answer = await self._ask("GET", path)
        if not is_list_of_objects(answer[name]):
            raise answer.unread(f"its {name} are no list of objects")
        return list(answer[name])

    async def _ask(self, method: str, path: str, body: Json | None = None, only_if: str = "") -> AnswerObject:
        """`only_if`: the version that a job must still have."""
        headers = {"If-Match": f'"{only_if}"'} if only_if else {}
        try:
            request = self._http.build_request(method, path, json=body, headers=headers)
        except UnicodeEncodeError:
            raise UserError(NOT_TEXT) from None
        except ValueError:
            raise UserError(NOT_FINITE) from None
        answer = await self._send(request)
        release = answer.headers.get(RELEASE_HEADER, "")

        def unread(why: str = "") -> Unreachable:
            return Unreachable(unread_answer(self.url, f"{method} {path}", release, why))

        try:
            content = answer.json(object_hook=partial(AnswerObject, unread))
        except ValueError:
            content = None
        if not isinstance(content, AnswerObject):
            raise unread()
        return content

    async def _send(self, request: httpx.Request, stream: bool = False) -> httpx.Response:
        try:
            answer = await self._http.send(request, stream=stream)
            self.date = answer.headers.get("date", "")
            if answer.is_error:
                await answer.aread()
                await answer.aclose()
        except httpx.TransportError as error:
            if trouble := self._tls.trouble(error, self.url) or await https_instead(error, self.url):
                raise Unreachable(trouble) from error
            raise Unreachable(
                f"no controller answers at {self.url} ({_why(error)}); "
                "start one with `shoal controller`, or name another with --url or SHOAL_URL"
            ) from error
        if answer.is_error:
            raise _refusal(answer)
        return answer


def _why(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__


def _refusal(answer: httpx.Response) -> ShoalError:
    """The error that the controller meant, with its sentence."""
    try:
        problem = answer.json()
        sentence = str(problem.get("detail") or problem["title"])
    except (ValueError, KeyError, AttributeError):
        return Unreachable(
            f"{answer.request.url} answered with status {answer.status_code} and no reason; is it a Shoal controller? "
            f"This is {of_shoal(RELEASE)}"
        )
    if problem.get("code") == ErrorCode.UNAUTHORIZED:
        return Refused(
            f"the controller at {answer.request.url.copy_with(path='/', query=None)} {_found(answer.request)}; set "
            "SHOAL_TOKEN to its token or one of `shoal token create`, or run this where `shoal run` keeps "
            ".shoal/token"
        )
    if problem.get("code") == ErrorCode.NOT_TRAINING:
        return NotTraining(sentence)
    if answer.status_code in ERRORS:
        return ERRORS[answer.status_code](sentence)
    return UserError(sentence) if answer.status_code < 500 else ShoalError(sentence)


def _found(request: httpx.Request) -> str:
    shown = request.headers.get("authorization", "")
    if is_for_workers(shown.removeprefix("Bearer ")):
        return "was shown a job's token, which is for its workers only"
    return "does not know the token that was shown" if shown else "asks for a token"
