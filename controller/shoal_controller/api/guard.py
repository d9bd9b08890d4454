"""The layers around every REST request: its token and role, the size of its body, its port's TLS, and its count.

`Guard` refuses requests without the right token, bodies that are too large and requests of foreign pages, and lets no
exception out. A web page elsewhere cannot make a browser start a job: a request for another site's page is refused;
without tokens, a controller that only this machine reaches answers only under this machine's names, and any other
controller trusts no page under a name that an attacker could register (DNS rebinding).

`CountedRequests` is the outermost layer, so refused and forwarded requests count too. It counts by route; a path
without a route is `other`, so that clients cannot create series. `web_certificate` gives the port its TLS: the files
are checked before each handshake and read again when they change; open connections keep theirs. `app.py` adds the
guard, `server.py` the rest.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import ssl
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from fastapi.routing import APIRoute
from shoal_protos.addresses import is_here
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import Refused, ShoalError, UserError
from shoal_protos.release import RELEASE, RELEASE_HEADER
from shoal_protos.strict_json import MOST_BODY_BYTES
from shoal_protos.text import shown, shown_name
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal_controller.access.callers import Caller, Role, Unauthorized
from shoal_controller.access.failed_logins import FailedLogins, TooManyFailures
from shoal_controller.access.proxies import FORWARDED, Proxies
from shoal_controller.access.token_register import TokenRegister
from shoal_controller.api import event_routes, log_routes, page_routes, routes, token_routes
from shoal_controller.api.problems import BUG, CODES, TooLarge, problem, problem_of
from shoal_controller.leadership.controller_state import ENDING, ControllerState
from shoal_controller.leadership.introductions import HEADER, HandedOn
from shoal_controller.page.site import is_of_the_page
from shoal_controller.process.renewed_files import RenewedFiles, load_pair
from shoal_controller.store.store import UnknownOutcome

TOO_LARGE = f"the body is larger than {MOST_BODY_BYTES} bytes, the most that is accepted"

TWO_LENGTHS = (
    "the request has both Content-Length and Transfer-Encoding, and a proxy before this controller may see another end "
    "of it; send one of them"
)

CUT_SHORT = f"{ENDING} and has not answered in time; it may have been done: look before you try again"

OPEN_PATHS = ("/healthz", "/readyz", "/docs", "/openapi.json")
"""Need no token: probes of a cluster have none, and the documentation is not secret. Nothing is at `/docs`, where
people look for it; what they are told there names the document.
"""

TOKENS_PATH = "/v1/tokens"
"""What only an admin may read or change."""

NOT_A_BEARER = "\n"
"""Stands for a header of another scheme: no token has this character."""

log = structlog.get_logger("shoal.api")


class Guard:
    """ASGI middleware around the whole app."""

    def __init__(
        self, app: ASGIApp, tokens: TokenRegister, here_only: bool, controller: ControllerState, proxies: Proxies
    ) -> None:
        """`controller` and `proxies` know the clients for whom neighbours and proxies ask."""
        self._app = app
        self._controller = controller
        self._tokens = tokens
        self._here_only = here_only
        self._proxies = proxies
        self._failed_logins = FailedLogins()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begun = finished = False

        async def noted(message: Message) -> None:
            nonlocal begun, finished
            if message["type"] == "http.response.start" and scope["state"]["caller"] is not None:
                MutableHeaders(scope=message).setdefault(RELEASE_HEADER, RELEASE)
            await send(message)
            begun, finished = True, message["type"] == "http.response.body" and not message.get("more_body", False)

        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            answer = problem_of(scope["path"], UserError(TWO_LENGTHS))
            answer.headers["Connection"] = "close"
            return await answer(scope, receive, send)
        try:
            state = scope.setdefault("state", {})
            state["caller"] = self._check(headers, scope)
            state["is_let_in"] = partial(self._is_let_in, headers)
            await self._app(scope, _limited(scope, receive), noted)
        except Unauthorized as error:
            await problem_of(scope["path"], await self._refusal(scope, error))(scope, receive, send)
        except ShoalError as error:
            await problem_of(scope["path"], error)(scope, receive, send)
        except HTTPException as error:
            code = CODES.get(error.status_code, ErrorCode.INVALID_REQUEST)
            await problem(scope["path"], error.status_code, error.detail, code)(scope, receive, send)
        except asyncio.CancelledError:  # by the server, which stops and has waited for this request
            if begun:
                raise
            await problem_of(scope["path"], UnknownOutcome(CUT_SHORT))(scope, receive, send)
        except Exception as error:
            log.error("a request failed", path=scope["path"], error=str(error), exc_info=error)
            if begun and not finished:
                raise  # only the end of the connection can say so now
            if not begun:
                await problem(scope["path"], ShoalError.http_status, BUG, ErrorCode.BUG)(scope, receive, send)

    def _check(self, headers: Headers, scope: Scope) -> Caller | None:
        """Who asks; None where anybody may."""
        if self._here_only and not self._tokens.is_required and not _names_this_machine(headers.get("host", "")):
            raise Refused(
                f"the request names the host {shown(headers.get('host', ''))}; a controller without a token "
                "answers only to localhost. Set SHOAL_TOKEN to let others in."
            ).coded(ErrorCode.HOST_REFUSED)
        if scope["path"] in OPEN_PATHS or is_of_the_page(scope["path"]):
            return None
        self._check_page(headers)
        caller = self._caller(headers, self._address(scope))
        _check_role(caller, scope["method"], scope["path"])
        return caller

    async def _refusal(self, scope: Scope, error: Unauthorized) -> ShoalError:
        """Return what a request with a wrong token is told, once it has waited; at once where the server stops."""
        address = self._address(scope)
        try:
            self._failed_logins.check(address)
            await self._failed_logins.delay(address)
        except TooManyFailures as too_many:
            return too_many
        except asyncio.CancelledError:  # by the server, which ends all requests: this one is over with its answer
            return error
        return error

    def _caller(self, headers: Headers, address: str) -> Caller:
        if not self._tokens.is_required:
            return Caller("", Role.ADMIN, address)
        return self._tokens.caller(_shown(headers.get("authorization", "")), address)

    def _is_let_in(self, headers: Headers) -> bool:
        """Whether a request that was let in would be again: its token may be revoked, or expire, while it lasts."""
        try:
            self._caller(headers, "")
        except Unauthorized:
            return False
        return True

    def _address(self, scope: Scope) -> str:
        """Return where the request comes from: the other end of its connection, or the client for whom a neighbour or
        a named proxy asks.
        """
        headers, neighbours = Headers(scope=scope), self._controller.introductions
        peer = str(scope["client"][0]) if scope.get("client") else ""
        address = self._proxies.client(peer, headers.getlist(FORWARDED))
        if HEADER not in headers or neighbours is None:
            return address
        return neighbours.address(headers[HEADER], HandedOn.of(scope, neighbours.me)) or address

    def _check_page(self, headers: Headers) -> None:
        """● Only browsers send these headers, and always for a page of another site."""
        origin, host = headers.get("origin"), headers.get("host", "")
        own = origin is None or (_place_of(origin) == host and (self._tokens.is_required or _is_literal(host)))
        if not own or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Refused(
                f"the request comes from a web page of {shown_name(origin or 'another site')}; a controller answers "
                "to programs and to its own pages only"
            ).coded(ErrorCode.PAGE_REFUSED)


def needed_role(method: str, path: str) -> Role:
    """● What a request needs: to read `view`, to change a job `operate`, all about tokens `admin`."""
    if path == TOKENS_PATH or path.startswith(f"{TOKENS_PATH}/"):
        return Role.ADMIN
    return Role.VIEW if method in ("GET", "HEAD", "OPTIONS") else Role.OPERATE


def _check_role(caller: Caller, method: str, path: str) -> None:
    needed = needed_role(method, path)
    if not caller.role.includes(needed):
        raise Refused(
            f"the token {caller.token} has the role {caller.role}; {method} {shown_name(path)} needs {needed}. "
            "Ask an admin for a token with that role"
        ).coded(ErrorCode.ROLE_TOO_LOW)


def _shown(authorization: str) -> str:
    """The token in the header; empty where there is no header."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else NOT_A_BEARER if authorization else ""


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


CERTIFICATE, KEY = "SHOAL_HTTP_CERTIFICATE", "SHOAL_HTTP_KEY"
"""The settings that name the files."""


def web_certificate(certificate: Path, key: Path) -> ssl.SSLContext:
    """What the port is served with. Raises `UserError` for files that cannot be used."""

    def made() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_pair(context, (CERTIFICATE, certificate), (KEY, key))
        return context

    files = RenewedFiles((certificate, key), made)

    def on_handshake(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = files.latest()

    context = files.made
    context.sni_callback = on_handshake  # called whether the client names a server or not
    return context


OTHER = "other"
METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
WITHOUT_ROUTER = ("/healthz", "/readyz", "/metrics", "/openapi.json", "/", "/page/{name:path}")

PARTS = (token_routes, event_routes, log_routes, page_routes)
"""What `routes` includes."""

NO_ANSWER = "none"
"""The status of a request whose answer has not begun: its client has gone, as a rule."""

Requested = Callable[[str, str, str, float], None]
"""Called with the method, the route, the status, and the seconds until the answer began."""


def templates() -> tuple[str, ...]:
    """The paths of all routes."""
    known = [*WITHOUT_ROUTER, *_paths(routes.router.routes)]
    parts = [route for part in PARTS for route in part.router.routes]
    return (*known, *(routes.router.prefix + path for path in _paths(parts)))


def _paths(of: Sequence[object]) -> list[str]:
    return list(dict.fromkeys(route.path for route in of if isinstance(route, APIRoute)))


class CountedRequests:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp, requested: Requested) -> None:
        self._app, self._requested = app, requested
        self._routes: list[tuple[re.Pattern[str], str]] = [(compile_path(path)[0], path) for path in templates()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, has_begun = time.perf_counter(), False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._count(scope, str(message["status"]), time.perf_counter() - began)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            if not has_begun:
                self._count(scope, NO_ANSWER, time.perf_counter() - began)

    def _count(self, scope: Scope, status: str, seconds: float) -> None:
        method = scope["method"] if scope["method"] in METHODS else OTHER
        self._requested(method, self._route_of(scope["path"]), status, seconds)

    def _route_of(self, path: str) -> str:
        return next((template for pattern, template in self._routes if pattern.match(path)), OTHER)
