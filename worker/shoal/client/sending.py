"""The one place of the client that speaks HTTP: it finds the token, sends, and sends again what may be sent again.

A request is sent again until `retry_seconds` have passed: where no connection came about, where the controller says
that it cannot now (429, 503; it waits `Retry-After`), and, of what may be repeated, where the answer was lost.
Called by `rest_client.py`; which controllers there are says `controllers.py`.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
from shoal_protos.addresses import is_here
from shoal_protos.answer_object import AnswerObject, is_list_of_objects, unread_answer
from shoal_protos.bearer import UNSENDABLE, is_sendable, kept_token
from shoal_protos.controller_url import split_url
from shoal_protos.errors import UserError
from shoal_protos.path_part import NOT_FINITE, NOT_TEXT
from shoal_protos.release import RELEASE_HEADER

from shoal.client.rest_errors import NoController, RestProblem, problem_in

ANSWER_SECONDS = 30.0
"""An answer waits for the store at most; a controller that needs longer is in trouble."""
FOLLOW_SECONDS = 60.0
"""A stream of events says something at least every 10 s (server-sent comments)."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0
PAGE = 500
"""Entries of a list that are asked for at a time."""
NOT_NOW = (429, 503)
"""Statuses with `Retry-After`: nothing was done."""

NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)

Json = dict[str, Any]


class RestSender:
    """The connection to one controller."""

    def __init__(self, url: str, token: str | None, folder: Path, retry_seconds: float) -> None:
        """`token`: default SHOAL_TOKEN, else, for a controller of this machine, the one that it keeps in `folder`.

        Raises `UserError` for what cannot be used.
        """
        self.url = url.rstrip("/")
        parts, host = split_url(self.url)
        here = is_here(host)
        if token is None:
            token = os.environ.get("SHOAL_TOKEN") or (kept_token(folder) if here else "")
        if not is_sendable(token):
            raise UserError(UNSENDABLE)
        self._retry_seconds = retry_seconds
        self._http = httpx.Client(
            base_url=f"{self.url}/v1",
            timeout=ANSWER_SECONDS,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            trust_env=not here,  # no proxy stands between two processes of one machine
            verify=_authorities() if parts.scheme == "https" else False,
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
        answer = self._sent(self._request(method, path, body, headers or {}), is_repeatable or method == "GET")
        return self.object_in(answer.content, f"{method} {path}", answer.headers.get(RELEASE_HEADER, ""))

    def object_in(self, text: str | bytes, request: str, release: str = "") -> AnswerObject:
        """The object that was answered to a request. `release`: the controller's; empty: not known."""

        def unread(why: str = "") -> NoController:
            return NoController(unread_answer(self.url, request, release, why))

        try:
            content = json.loads(text, object_hook=partial(AnswerObject, unread))
        except ValueError:
            content = None
        if not isinstance(content, AnswerObject):
            raise unread()
        return content

    def pages(self, path: str, name: str, after: Any = None) -> Iterator[AnswerObject]:
        """The entries of a list, from `after` on; each page is asked for when its first entry is."""
        while True:
            query = {"limit": PAGE} if after is None else {"limit": PAGE, "after": after}
            answer = self.ask("GET", f"{path}?{urlencode(query)}")
            if not is_list_of_objects(answer[name]):
                raise answer.unread(f"its {name} are no list of objects")
            yield from answer[name]
            if (after := answer.get("next")) is None:
                return

    def lines(self, path: str) -> Iterator[str]:
        """The lines of a stream of events; ends where the connection does."""
        request = self._http.build_request("GET", path, headers={"Accept": "text/event-stream"}, timeout=FOLLOW_SECONDS)
        with closing(self._sent(request, is_repeatable=True, stream=True)) as answer:
            try:
                yield from answer.iter_lines()
            except httpx.TransportError:
                return  # whoever follows comes again, and hears then why not

    def _request(self, method: str, path: str, body: Json | None, headers: Mapping[str, str]) -> httpx.Request:
        for name, value in headers.items():
            if not is_sendable(value):
                raise UserError(f"the header {name} is {value[:80]!a}; expected printable ASCII, no blanks around it")
        try:
            return self._http.build_request(method, path, json=body, headers=headers)
        except UnicodeEncodeError:
            raise UserError(NOT_TEXT) from None
        except ValueError:
            raise UserError(NOT_FINITE) from None

    def _sent(self, request: httpx.Request, is_repeatable: bool, stream: bool = False) -> httpx.Response:
        deadline, pause = time.monotonic() + self._retry_seconds, FIRST_PAUSE_SECONDS
        while True:
            failure: NoController | RestProblem
            wait = pause
            try:
                answer = self._http.send(request, stream=stream)
            except httpx.TransportError as error:
                is_sent = not isinstance(error, NOT_SENT)
                failure = self._unanswered(error, is_sent and not is_repeatable)
                again = (is_repeatable or not is_sent) and not _is_about_tls(error)
            else:
                if not answer.is_error:
                    return answer
                with closing(answer):
                    answer.read()
                failure = problem_in(answer)
                again = answer.status_code in NOT_NOW and (is_repeatable or not failure.may_be_done)
                wait = _retry_after(answer, pause)
            if not again or time.monotonic() + wait > deadline:
                raise failure
            time.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _unanswered(self, error: httpx.TransportError, may_be_done: bool) -> NoController:
        why = str(error) or type(error).__name__
        if may_be_done:
            return NoController(
                f"the controller at {self.url} went away before it answered ({why}); the request may have been "
                "carried out: look before you send it again",
                may_be_done=True,
            )
        return NoController(
            f"no controller answers at {self.url} ({why}); start one with `shoal controller`, or give another url "
            "(SHOAL_URL)"
        )


def _retry_after(answer: httpx.Response, pause: float) -> float:
    """Seconds, as the controller says; `pause` where it does not."""
    given = answer.headers.get("retry-after", "")
    return float(given) if given.isdecimal() else pause


def _is_about_tls(error: BaseException) -> bool:
    """Whether a certificate was refused: another attempt would be too."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _authorities() -> ssl.SSLContext:
    """Those of SHOAL_CA, else those that this system trusts."""
    file = os.environ.get("SHOAL_CA")
    try:
        return ssl.create_default_context(cafile=file or None)
    except (ssl.SSLError, OSError) as error:
        raise UserError(
            f"SHOAL_CA is {file}, which cannot be used ({error}); expected a PEM file with the authorities that sign "
            "the controllers' certificates"
        ) from None
