"""The way from a command to the controller in its own process: no port, so that no stranger at the port is in the way.

Made by `serve.py` for the client of `shoal run` and `shoal demo`. An answer has a deadline, as over a connection.
"""

from __future__ import annotations

import asyncio

import httpx
from starlette.types import ASGIApp

from shoal_controller.cli.client import ANSWER_SECONDS
from shoal_controller.tasks import end_task

HERE = ("127.0.0.1", 0)
"""Address of the caller, as the history of a job shows it."""


class InProcess(httpx.AsyncBaseTransport):
    """Answers whole requests; event streams need a port."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = httpx.ASGITransport(app, raise_app_exceptions=False, client=HERE)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answers: list[httpx.Response] = []

        async def answer() -> None:
            answers.append(await self._app.handle_async_request(request))

        # In a task of its own: REST answers a request that is cancelled, and its caller would not see its own end.
        answering = asyncio.create_task(answer(), name=f"{request.method} {request.url.path}")
        try:
            await asyncio.wait([answering], timeout=ANSWER_SECONDS)
            if not answering.done():
                raise httpx.ReadTimeout(f"no answer within {ANSWER_SECONDS:g} s", request=request)
            answering.result()
        finally:
            await end_task(answering)
        return answers[0]
