"""The client of REST: one method per operation, by its name there (docs/rest.md), and two that wait.

`ActCalls` has the acts of an operator, `TokenCalls` the operations on tokens, of people and programs and of workers.
The client decides which requests may be sent again.

A request is sent again until `retry_seconds` have passed: where no connection came about, where the controller says
that it cannot now (429, 503; it waits `Retry-After`), and, of what may be repeated, where the answer was lost
(`Repeats`). `Controllers` is that at the client's address, or, where it was given none, those that the commands find
here: asked anew with every call, because runs begin and end while a program lives. Nothing is kept between calls.
"""

from __future__ import annotations

import os
import ssl
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

import httpx
from shoal_protos.acts import ActCalls
from shoal_protos.bearer import shown_token
from shoal_protos.errors import NoController
from shoal_protos.living_runs import Run, answering_runs
from shoal_protos.path_part import path_part
from shoal_protos.pem import believed
from shoal_protos.rest import (
    AnswerObject,
    Json,
    RestAddress,
    RestProblem,
    causes,
    job_path,
    problem_in,
    reason_of,
    request_of,
    stream_of,
)

from shoal.client.rest_answers import (
    CheckpointInfo,
    EventInfo,
    EventOfJobInfo,
    JobInfo,
    ReportInfo,
    TokenInfo,
    WorkerInfo,
)

PAGE = 500
"""Entries of a list that are asked for at a time."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0
NOT_NOW = (429, 503)
"""Statuses with `Retry-After`: nothing was done."""
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(slots=True)
class Repeats:
    """The pauses of one request that is sent again; its last failure is raised."""

    address: RestAddress
    is_repeatable: bool
    """It does nothing more if it is sent again."""
    until: float
    """By the clock of `now`."""
    pause: float = FIRST_PAUSE_SECONDS

    def after_silence(self, error: httpx.TransportError, now: float) -> float:
        """Return the seconds to wait where nothing was answered."""
        if not (self.is_repeatable or isinstance(error, NOT_SENT)):
            raise NoController(
                f"the controller at {self.address.url} went away before it answered ({reason_of(error)}); the request "
                "may have been carried out: look before you send it again",
                may_be_done=True,
            )
        failure = self.address.no_answer(error, "give another url (SHOAL_URL)")
        about_tls = any(isinstance(cause, ssl.SSLError) for cause in causes(error))  # another attempt would be, too
        return self._wait(failure, not about_tls, self.pause, now)

    def after_problem(self, answer: httpx.Response, now: float) -> float:
        """Return the seconds to wait where the controller has not done it; its own, where it says some."""
        failure, given = problem_in(answer), answer.headers.get("retry-after", "")
        again = answer.status_code in NOT_NOW and (self.is_repeatable or not failure.may_be_done)
        return self._wait(failure, again, float(given) if given.isdecimal() else self.pause, now)

    def _wait(self, failure: NoController | RestProblem, again: bool, seconds: float, now: float) -> float:
        if not again or now + seconds > self.until:
            raise failure
        self.pause = min(2 * self.pause, LONGEST_PAUSE_SECONDS)
        return seconds


class RestSender:
    """The connection to one controller."""

    def __init__(self, url: str, token: str | None, folder: Path, retry_seconds: float) -> None:
        """`token`: default SHOAL_TOKEN, else, for a controller of this machine, the one that it keeps in `folder`.

        Raises `UserError` for what cannot be used.
        """
        self.address = RestAddress(url)
        self._retry_seconds = retry_seconds
        authorities = os.environ.get("SHOAL_CA")
        self._http = httpx.Client(
            **self.address.settings(shown_token(token, folder if self.address.is_here else None)),
            verify=believed(Path(authorities) if authorities else None) if self.address.is_tls else False,
        )

    def close(self) -> None:
        self._http.close()

    def ask(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        headers: Mapping[str, str] | None = None,
        is_repeatable: bool = False,
    ) -> AnswerObject:
        """The answer's object. `is_repeatable`: it does nothing more if it is sent again."""
        answer = self._sent(request_of(self._http, method, path, body, headers), is_repeatable or method == "GET")
        return self.address.answered(answer, f"{method} {path}")

    def pages(self, path: str, name: str, after: Any = None) -> Iterator[AnswerObject]:
        """The entries of a list, from `after` on; each page is asked for when its first entry is."""
        while True:
            query = {"limit": PAGE} if after is None else {"limit": PAGE, "after": after}
            answer = self.ask("GET", f"{path}?{urlencode(query)}")
            yield from answer.entries(name)
            if (after := answer.get("next")) is None:
                return

    def lines(self, path: str) -> Iterator[str]:
        """The lines of a stream of events; ends where the connection does."""
        with closing(self._sent(stream_of(self._http, path), is_repeatable=True, stream=True)) as answer:
            try:
                yield from answer.iter_lines()
            except httpx.TransportError:
                return  # the caller asks again, and gets the reason then

    def _sent(self, request: httpx.Request, is_repeatable: bool, stream: bool = False) -> httpx.Response:
        repeats = Repeats(self.address, is_repeatable, time.monotonic() + self._retry_seconds)
        while True:
            try:
                answer = self._http.send(request, stream=stream)
            except httpx.TransportError as error:
                wait = repeats.after_silence(error, time.monotonic())
            else:
                if not answer.is_error:
                    return answer
                with closing(answer):
                    answer.read()
                wait = repeats.after_problem(answer, time.monotonic())
            time.sleep(wait)


DEFAULT_URL = "http://127.0.0.1:7070"


class Controllers:
    """The connections of a client."""

    def __init__(self, url: str | None, token: str | None, retry_seconds: float) -> None:
        """As `Client` has them. Raises `UserError` for what cannot be used."""
        self._token, self._retry_seconds = token, retry_seconds
        self._folder = Path(os.environ.get("SHOAL_DATA") or ".shoal")
        self._given = RestSender(url or os.environ.get("SHOAL_URL") or DEFAULT_URL, token, self._folder, retry_seconds)
        self._of_runs: dict[tuple[str, int], RestSender] = {}

    def close(self) -> None:
        for sender in (self._given, *self._of_runs.values()):
            sender.close()

    def of(self, job: str = "") -> RestSender:
        """The controller of the run that trains the job, or else the first one."""
        return self.all(job)[0]

    def all(self, job: str = "") -> list[RestSender]:
        """The controller of the run that trains the job, or all of them."""
        if self._given.address.url != DEFAULT_URL:
            return [self._given]
        return [self._given if run is None else self._of_run(run) for run in answering_runs(self._folder, job)]

    def _of_run(self, run: Run) -> RestSender:
        process = run.url, run.pid
        if process not in self._of_runs:
            self._of_runs[process] = RestSender(run.url, self._token, run.folder, self._retry_seconds)
        return self._of_runs[process]


class TokenCalls:
    """Part of `Client`."""

    def __init__(self, controllers: Controllers) -> None:
        self._controllers = controllers

    def get_join_token(self, job: str) -> str:
        """The token for workers of this run of a job."""
        return str(self._controllers.of(job).ask("POST", job_path(job, "token"), is_repeatable=True)["token"])

    def list_tokens(self) -> Iterator[TokenInfo]:
        """All named tokens, without their secrets, by name."""
        return (TokenInfo.read(one) for one in self._controllers.of().pages("/tokens", "tokens"))

    def create_token(self, name: str, role: str, *, days: int | None = None) -> TokenInfo:
        """Create a named token of role `view`, `operate` or `admin`; the answer has its secret, this once."""
        asked = {"name": name, "role": role, "days": days}
        return TokenInfo.read(self._controllers.of().ask("POST", "/tokens", asked))

    def rotate_token(self, name: str, *, keep_seconds: float | None = None) -> TokenInfo:
        """Give a token a new secret; the old one stays valid for a while."""
        body = {} if keep_seconds is None else {"keep_seconds": keep_seconds}
        return TokenInfo.read(self._controllers.of().ask("POST", f"/tokens/{path_part(name)}/rotate", body))

    def revoke_token(self, name: str) -> TokenInfo:
        """Revoke a token: from now on it opens nothing."""
        return TokenInfo.read(self._controllers.of().ask("DELETE", f"/tokens/{path_part(name)}"))


RETRY_SECONDS = 10.0
LOOK_SECONDS = 0.5
"""Between two looks at a job that is waited for."""
REJOIN_SECONDS = 0.5
"""Before a stream that brought nothing is opened again."""


class Client(ActCalls[JobInfo], TokenCalls):
    """One controller, by the URL of its REST API; without one, those of the runs that live in this folder. Close it, or
    use it in a `with` statement.

    Every method raises `RestProblem`, with a stable `code`, for what the controller refuses, and `NoController` where
    none answers.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, *, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        """`url`: default SHOAL_URL, else those of the runs that live in `.shoal` (SHOAL_DATA), else
        http://127.0.0.1:7070. `token`: default SHOAL_TOKEN, else, for a controller of this machine, the one that it
        keeps there. `retry_seconds`: how long a request is sent again that a controller did not take; 0: it is sent
        once.
        """
        super().__init__(Controllers(url, token, retry_seconds))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End its connections."""
        self._controllers.close()

    # ---- jobs

    def list_jobs(self) -> Iterator[JobInfo]:
        """All jobs by name, finished ones too. Pages are asked for while you iterate."""
        return (JobInfo.read(one) for to in self._controllers.all() for one in to.pages("/jobs", "jobs"))

    def create_job(self, spec: Mapping[str, Any], *, key: str | None = None) -> JobInfo:
        """Create a job from its specification, the object of a `job.yaml`. A finished job of that name is replaced.

        `key`: the Idempotency-Key. Default: a new one for every call, so that a lost answer makes no second job. Keep
        one of your own where your program may be started again.
        """
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        return JobInfo.read(self._controllers.of().ask("POST", "/jobs", dict(spec), headers, is_repeatable=True))

    def get_job(self, job: str) -> JobInfo:
        """A job as it is now."""
        return JobInfo.read(self._controllers.of(job).ask("GET", job_path(job)))

    def get_job_spec(self, job: str) -> Json:
        """What a job was made with, defaults filled in: `create_job` takes it."""
        return self._controllers.of(job).ask("GET", job_path(job, "spec"))

    def get_report(self, job: str) -> ReportInfo:
        """The report of a job's run, as `shoal run --json` writes it."""
        return ReportInfo.read(self._controllers.of(job).ask("GET", job_path(job, "report")))

    def wait_for_job(self, job: str, *, timeout_seconds: float | None = None) -> JobInfo:
        """Wait until a job is over. Raises `TimeoutError`."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not (seen := self.get_job(job)).is_over:
            if deadline is not None and time.monotonic() + LOOK_SECONDS > deadline:
                raise TimeoutError(
                    f"job {job} is {seen.phase} at step {seen.step} after {timeout_seconds:g} s: {seen.reason}"
                )
            time.sleep(LOOK_SECONDS)
        return seen

    # ---- workers

    def list_workers(self, job: str) -> Iterator[WorkerInfo]:
        """A job's workers by their numbers, those that are gone too."""
        return (WorkerInfo.read(one) for one in self._controllers.of(job).pages(job_path(job, "workers"), "workers"))

    # ---- events and checkpoints

    def list_events(self, job: str, after: int = 0) -> Iterator[EventInfo]:
        """A job's events after a revision, oldest first, up to the present one."""
        return (
            EventInfo.read(one) for one in self._controllers.of(job).pages(job_path(job, "events"), "events", after)
        )

    def follow_events(self, job: str, after: int = 0) -> Iterator[EventInfo]:
        """The same, and then every event as it happens. It never ends by itself, also where the job does; it comes
        again where the connection breaks, and misses nothing.
        """
        while True:
            before, controller = after, self._controllers.of(job)
            for line in controller.lines(f"{job_path(job, 'events')}?after={after}"):
                if line.startswith("data:"):
                    event = EventInfo.read(controller.address.object_in(line.removeprefix("data:"), "GET /events"))
                    after = event.revision
                    yield event
            if after == before:
                time.sleep(REJOIN_SECONDS)

    def list_newest_events(self) -> list[EventOfJobInfo]:
        """The newest events of all jobs that the controller has in memory, oldest first."""
        return [EventOfJobInfo.read(one) for one in self._controllers.of().ask("GET", "/events")["events"]]

    def follow_newest_events(self) -> Iterator[EventOfJobInfo | None]:
        """The events of all jobs from now on, as they happen; it never ends by itself, and comes again where the
        connection breaks. None: what lay between is not there any more, so look at everything again.
        """
        controller, is_anew = self._controllers.of(), False
        after = str(controller.ask("GET", "/events")["next"])
        while True:
            before = after
            for line in controller.lines(f"/events?{urlencode({'after': after})}"):
                name, _, value = line.partition(":")
                if name == "event":
                    is_anew = value.strip() == "anew"
                elif name == "id":
                    after = value.strip()
                elif name == "data":
                    yield None if is_anew else EventOfJobInfo.read(controller.address.object_in(value, "GET /events"))
                    is_anew = False
            if after == before:
                time.sleep(REJOIN_SECONDS)

    def list_checkpoints(self, job: str) -> Iterator[CheckpointInfo]:
        """A job's complete checkpoints, newest first."""
        found = self._controllers.of(job).pages(job_path(job, "checkpoints"), "checkpoints")
        return (CheckpointInfo.read(one) for one in found)

    # ---- inside

    def _changed(self, job: str, method: str, path: str, body: Json | None, headers: Mapping[str, str]) -> JobInfo:
        return JobInfo.read(self._controllers.of(job).ask(method, path, body, headers))
