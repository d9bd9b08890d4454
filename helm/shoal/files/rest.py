"""REST as the chart's own jobs use it: where it is, its token and its authority come from the environment."""

from __future__ import annotations

import os
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import httpx

PAUSE_SECONDS = 1.0
REQUEST_SECONDS = 15.0


class Rest:
    """One controller's REST. What cannot be reached is tried again until the deadline."""

    def __init__(self, environment: Mapping[str, str], patience_seconds: float) -> None:
        authority = environment.get("SHOAL_CA")
        verify = ssl.create_default_context(cafile=authority) if authority else True
        self._patience = patience_seconds
        self._client = httpx.Client(
            base_url=environment["SHOAL_URL"], verify=verify, timeout=REQUEST_SECONDS,
            headers={"Authorization": f"Bearer {environment['SHOAL_TOKEN']}"},
        )  # fmt: skip

    def close(self) -> None:
        self._client.close()

    def ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """The answer. Ends the process with the controller's own sentence for what it refuses."""
        answer = self.answer(method, path, body)
        if answer.is_error:
            fail(f"{method} {path}: {answer.status_code} {_detail(answer)}")
        found: dict[str, Any] = answer.json()
        return found

    def answer(self, method: str, path: str, body: object = None) -> httpx.Response:
        """The answer, whatever it says, once the controller serves."""
        found: list[httpx.Response] = []

        def asked() -> str:
            try:
                found[:] = [self._client.request(method, path, json=body)]
            except httpx.TransportError as error:
                return f"{self._client.base_url} cannot be reached: {error!r}"
            return f"{method} {path}: 503 {_detail(found[0])}" if found[0].status_code == 503 else ""

        until(asked, self._patience)
        return found[0]


def until(reason: Callable[[], str], seconds: float) -> None:
    """Returns when there is no reason to wait any more; ends the process with the last one when the time is over."""
    deadline = time.monotonic() + seconds
    while why := reason():
        if time.monotonic() >= deadline:
            fail(f"{why} (waited {seconds:.0f} s)")
        time.sleep(PAUSE_SECONDS)


def fail(sentence: str) -> NoReturn:
    sys.exit(f"error: {sentence}")


def environment() -> Mapping[str, str]:
    return os.environ


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]
