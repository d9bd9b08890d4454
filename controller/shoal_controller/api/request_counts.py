"""Counts every request by its route, and measures the time until its answer begins. The outermost layer of REST: what
the guard refuses is counted, and so is what a follower hands on.

A path that no route has counts as `other`, so that nobody can make series by asking for paths.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from fastapi.routing import APIRoute
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal_controller.api import event_routes, page_routes, routes, token_routes

OTHER = "other"
METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
WITHOUT_ROUTER = ("/healthz", "/readyz", "/metrics", "/openapi.json", "/", "/page/{name:path}")

PARTS = (token_routes, event_routes, page_routes)
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
