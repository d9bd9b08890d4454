"""The driver of the client: it finds the controllers, sends to them, and sends again what may be sent again.

A request is sent again until `retry_seconds` have passed: where no connection came about, where the controller says
that it cannot now (429, 503; it waits `Retry-After`), and, of what may be repeated, where the answer was lost
(`Repeats`). `Controllers` is that at the client's address, or, where it was given none, those that the commands find
here: asked anew with every call, because runs begin and end while a program lives. Called by `rest_client.py`.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
from shoal_protos.bearer import shown_token
from shoal_protos.errors import NoController
from shoal_protos.living_runs import Run, answering_runs
from shoal_protos.pem import believed
from shoal_protos.rest import (
    AnswerObject,
    Json,
    RestAddress,
    RestProblem,
    causes,
    problem_in,
    reason_of,
    request_of,
    stream_of,
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
