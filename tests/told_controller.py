"""A controller that answers what it is told to, whatever it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any, ClassVar

import pytest


class Controller(BaseHTTPRequestHandler):
    """Answers every request with what the test has put in its place."""

    status, kind, body = 200, "application/json", "{}"
    requests: ClassVar[list[tuple[str, str, str, str | None]]] = []

    def answer(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length).decode()
        self.requests.append((self.command, self.path, body, self.headers.get("authorization")))
        self.send_response(self.status)
        self.send_header("content-type", self.kind)
        self.end_headers()
        self.wfile.write(self.body.encode())

    do_GET = do_POST = do_DELETE = answer

    def log_message(self, format: str, *args: Any) -> None:
        """Not on standard error."""


@pytest.fixture
def controller() -> Iterator[str]:
    """The URL of a controller that says what `Controller` is told to."""
    usual = Controller.status, Controller.kind, Controller.body
    Controller.requests = []
    try:
        with answering(Controller) as url:
            yield url
    finally:
        Controller.status, Controller.kind, Controller.body = usual


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The URL where it answers, one request at a time."""
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="a controller")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
