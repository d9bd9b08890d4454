"""The client of REST: one method per operation, by its name there (docs/rest.md), and two that wait.

`ActCalls` has the acts of an operator, `TokenCalls` the operations on tokens, of people and programs and of workers.
The client decides which requests may be sent again; `sending.py` does so, to the controller that it finds. Nothing is
kept between calls.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from shoal_protos.acts import ActCalls
from shoal_protos.path_part import path_part
from shoal_protos.rest import Json, job_path

from shoal.client.rest_answers import (
    CheckpointInfo,
    EventInfo,
    EventOfJobInfo,
    JobInfo,
    ReportInfo,
    TokenInfo,
    WorkerInfo,
)
from shoal.client.sending import Controllers


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
