"""What stands before every request: no foreign pages, no huge bodies, and no exception that reaches the server.

A web page elsewhere cannot get a browser to start a job here: what a browser sends for another site's page is refused,
and without a token a controller that listens on this machine only answers only requests that name this machine, one
that listens elsewhere believes no page under a name that anybody can give it (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import structlog
from shoal_protos.addresses import is_here
from shoal_protos.errors import Refused, ShoalError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal_controller.api.problems import DEFECT, TooLarge, Unauthorized, problem
from shoal_controller.tokens import is_for_workers, is_same

MOST_BODY_BYTES = 256 * 1024

TOO_LARGE = f"the body is larger than {MOST_BODY_BYTES} bytes, the most that is accepted"

OPEN_PATHS = ("/healthz", "/readyz", "/docs", "/openapi.json")
"""Need no token: probes of a cluster have none, and the documentation is no secret."""

log = structlog.get_logger("shoal.api")


class Guard:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, token: str | None, here_only: bool) -> None:
        self._app = app
        self._token = token
        self._here_only = here_only and token is None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begun = finished = False

        async def noted(message: Message) -> None:
            nonlocal begun, finished
            await send(message)
            begun, finished = True, message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            self._check(Headers(scope=scope), scope["path"])
            await self._app(scope, _limited(scope, receive), noted)
        except ShoalError as error:
            await problem(scope["path"], error.http_status, str(error))(scope, receive, send)
        except Exception as error:
            log.error("a request failed", path=scope["path"], error=str(error), exc_info=error)
            if begun and not finished:
                raise  # only the end of the connection can say so now
            if not begun:
                await problem(scope["path"], ShoalError.http_status, DEFECT)(scope, receive, send)

    def _check(self, headers: Headers, path: str) -> None:
        if self._here_only and not _names_this_machine(headers.get("host", "")):
            raise Refused(
                f"the request names the host {headers.get('host', '')!r}; a controller without a token answers only "
                "to localhost. Set SHOAL_TOKEN to let others in."
            )
        if path in OPEN_PATHS:
            return
        self._check_page(headers)
        if self._token is not None:
            _check_token(headers.get("authorization", ""), self._token)

    def _check_page(self, headers: Headers) -> None:
        """● Only browsers send these headers, and always for a page of another site."""
        origin, host = headers.get("origin"), headers.get("host", "")
        own = origin is None or (_place_of(origin) == host and (self._token is not None or _is_literal(host)))
        if not own or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Refused(
                f"the request comes from a web page of {origin or 'another site'}; a controller answers to programs "
                "and to its own pages only"
            )


def _check_token(given: str, token: str) -> None:
    if is_same(given, f"Bearer {token}"):
        return
    found = "another token" if given else "no token"
    if is_for_workers(given.removeprefix("Bearer ")):
        found = "a token for workers, which is not one for operators"
    raise Unauthorized(
        f"the request shows {found}; send the header `Authorization: Bearer TOKEN` with the controller's SHOAL_TOKEN "
        "(`shoal run` keeps its own in .shoal/token where it was started)"
    )


def _place_of(origin: str) -> str | None:
    """Host and port of a page's origin, None where it has none."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _name_in(host: str) -> str:
    """The host header without its port."""
    return host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]


def _names_this_machine(host: str) -> bool:
    return is_here(_name_in(host))


def _is_literal(host: str) -> bool:
    """Whether the host is a number or this very machine, which no foreign name server can make its own."""
    try:
        ipaddress.ip_address(_name_in(host))
    except ValueError:
        return _names_this_machine(host)
    return True


def _limited(scope: Scope, receive: Receive) -> Receive:
    """Bodies up to `MOST_BODY_BYTES`, however they are sent."""
    declared = Headers(scope=scope).get("content-length", "0")
    if declared.isdigit() and int(declared) > MOST_BODY_BYTES:
        raise TooLarge(TOO_LARGE)
    received = 0

    async def counted() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MOST_BODY_BYTES:
            raise HTTPException(TooLarge.http_status, TOO_LARGE)  # the one exception that the framework lets through
        return message

    return counted
