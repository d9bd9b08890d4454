"""The common part of the two clients of a controller's REST API: `shoal.client`, and that of the `shoal` command.

It reads the URL of a controller, makes requests, reads answers and makes errors of problems. Each client sends by a
driver of its own (`shoal/client/sending.py` over httpx.Client, `cli/client.py` over httpx.AsyncClient): nothing is
sent, waited for or read from files here. The acts of an operator are in `acts.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx

from shoal_protos.addresses import is_here
from shoal_protos.bearer import is_sendable
from shoal_protos.errors import NoController, ShoalError, UserError
from shoal_protos.path_part import NOT_FINITE, NOT_TEXT, path_part
from shoal_protos.release import RELEASE, RELEASE_HEADER
from shoal_protos.text import of_shoal

Json = dict[str, Any]
"""A job, a worker, an event or a report, as REST returns it."""

OVER = ("succeeded", "failed", "cancelled")
"""Phases of a job that is over."""

ANSWER_SECONDS = 30.0
"""An answer waits for the store at most; a controller that needs longer is in trouble."""
FOLLOW_SECONDS = 60.0
"""A stream of events says something at least every 10 s (server-sent comments)."""


# ---- requests


def job_path(job: str, *below: str) -> str:
    """Return the path of a job, or of something of it, below `/v1`. Raises `UserError` for a wrong name."""
    return "/".join(["/jobs", *map(path_part, (job, *below))])


class RestAddress:
    """The URL of a controller, and the errors that name it."""

    def __init__(self, url: str) -> None:
        """Raises `UserError` for a wrong URL."""
        self.url = url.rstrip("/")
        parts, host = _split_url(self.url)
        self.is_here = is_here(host)
        self.is_tls = parts.scheme == "https"

    def settings(self, token: str) -> dict[str, Any]:
        """Return the arguments of either of httpx's clients."""
        return {
            "base_url": f"{self.url}/v1",
            "timeout": ANSWER_SECONDS,
            "headers": {"Authorization": f"Bearer {token}"} if token else {},
            "trust_env": not self.is_here,  # no proxy stands between two processes of one machine
        }

    def object_in(self, text: str | bytes, request: str, release: str = "") -> AnswerObject:
        """Return the object that was answered to a request. `release`: the controller's; empty: not known."""

        def unread(why: str = "") -> NoController:
            found = f"{self.url} returned an unknown answer to {request}{f' ({why})' if why else ''}"
            if not release:
                return NoController(f"{found}; is it a Shoal controller? This is {of_shoal(RELEASE)}")
            both = f"its controller is of {of_shoal(release)}, this is {of_shoal(RELEASE)}. Use one release for both"
            return NoController(f"{found}; {both}")

        try:
            content = json.loads(text, object_hook=partial(AnswerObject, unread))
        except ValueError:
            content = None
        if not isinstance(content, AnswerObject):
            raise unread()
        return content

    def answered(self, answer: httpx.Response, request: str) -> AnswerObject:
        """Return the object of a whole answer."""
        return self.object_in(answer.content, request, answer.headers.get(RELEASE_HEADER, ""))

    def no_answer(self, error: httpx.TransportError, otherwise: str) -> NoController:
        """Return the error where none answers. `otherwise`: the other remedy than to start a controller."""
        why = f"no controller answers at {self.url} ({reason_of(error)})"
        return NoController(f"{why}; start one with `shoal controller`, or {otherwise}")


def _split_url(url: str) -> tuple[SplitResult, str]:
    """Return the parts of a URL, and its host. Raises `UserError`, which does not repeat a password."""
    if "@" in url:
        raise UserError("the controller's URL has a user or a password in it; set SHOAL_TOKEN instead")
    expected = "expected something like http://127.0.0.1:7070"
    try:
        parts, _ = urlsplit(url), httpx.URL(url).host  # each refuses what the other takes
        _ = parts.port  # which is looked at only now
    except (ValueError, httpx.InvalidURL) as error:
        raise UserError(f"the controller's URL is {url!r} ({error}); {expected}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"the controller's URL is {url!r}; {expected}")
    return parts, parts.hostname


def request_of(
    http: httpx.Client | httpx.AsyncClient,
    method: str,
    path: str,
    body: Json | None = None,
    headers: Mapping[str, str] | None = None,
) -> httpx.Request:
    """Return a request. Raises `UserError` for one that cannot be sent."""
    for name, value in (headers or {}).items():
        if not is_sendable(value):
            raise UserError(f"the header {name} is {value[:80]!a}; expected printable ASCII, no blanks around it")
    try:
        return http.build_request(method, path, json=body, headers=headers)
    except UnicodeEncodeError:
        raise UserError(NOT_TEXT) from None
    except ValueError:
        raise UserError(NOT_FINITE) from None


def stream_of(http: httpx.Client | httpx.AsyncClient, path: str) -> httpx.Request:
    """Return a request for events as they happen."""
    return http.build_request("GET", path, headers={"Accept": "text/event-stream"}, timeout=FOLLOW_SECONDS)


# ---- answers


class AnswerObject(dict[str, Any]):
    """An object of an answer. Where a key is missing, the controller is of another release, or is no controller."""

    def __init__(self, unread: Callable[[str], NoController], content: Mapping[str, Any]) -> None:
        """`unread`: what is wrong with the answer → the error."""
        super().__init__(content)
        self.unread = unread

    def __missing__(self, key: str) -> Any:
        raise self.unread(f"it has no {key}")

    def entries(self, name: str) -> list[AnswerObject]:
        """Return a list of jobs, workers or events."""
        found = self[name]
        if not isinstance(found, list) or not all(isinstance(one, AnswerObject) for one in found):
            raise self.unread(f"its {name} are no list of objects")
        return found


class RestProblem(ShoalError):
    """The controller's answer to what it has not done (RFC 9457). `str(error)` is its sentence."""

    def __init__(self, sentence: str, code: str, status: int, version: str = "") -> None:
        super().__init__(sentence)
        self.code = code
        """What a program goes by, such as `job_unknown`: docs/rest.md, "Problems"."""
        self.status = status
        """The HTTP status."""
        self.version = version
        """With code `version_mismatch`: the version that the job has now."""

    @property
    def may_be_done(self) -> bool:
        """Whether the request may have been carried out: look before you send it again."""
        return self.code == "outcome_unknown"


def problem_in(answer: httpx.Response) -> RestProblem | NoController:
    """Return the error that an answer means. One that is no problem comes from something else than a controller."""
    try:
        problem = answer.json()
        is_a_problem = answer.headers.get("content-type", "").startswith("application/problem+json")
        code = str(problem.get("code") or "" if is_a_problem else problem["code"])
        sentence = str(problem.get("detail") or problem["title"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return NoController(
            f"{answer.request.url} answered with status {answer.status_code} and no reason; is it a Shoal controller? "
            f"This is {of_shoal(RELEASE)}"
        )
    version = answer.headers.get("etag", "").strip('"')
    return RestProblem(sentence, code, answer.status_code, version)


def reason_of(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it came of."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
