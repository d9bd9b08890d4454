"""What goes wrong between a controller and an API server: 403, 404, 409, 429, 500, late and cut answers, news that come
twice or in the wrong order, watches that end or are too old. One of them answers itself (`api_server.py`), another asks
a real cluster (`cluster_proxy.py`).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Json = dict[str, Any]


@dataclass
class Fault:
    """What happens to the next requests that match."""

    method: str
    part: str
    """Of the path, with its query."""
    status: int = 0
    """0: it is carried out, and the answer is cut off."""
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    """It is only late."""
    gate: asyncio.Event | None = None
    """It is only late, until the test opens this."""
    message: str = "drawn by the test"

    @property
    def is_a_cut(self) -> bool:
        return not (self.status or self.seconds or self.gate is not None)


class Refused(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class ApiFaults:
    """See the module's text. Whoever inherits has `_answered`, which may raise `Refused`."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.forbidden: set[str] = set()
        """Paths that nobody may use."""
        self.undefined: set[str] = set()
        """Paths of custom resources whose definition nobody has installed."""
        self.dropped: set[str] = set()
        """Keys of statuses that the definition does not have."""
        self.doubles = False
        """Every news of a watch comes twice."""
        self.reverses = False
        """The news that a watch has not sent yet come in the wrong order."""
        self.held = 0
        """Requests that have come to a gate so far."""
        self._watches: set[web.StreamResponse] = set()

    def fail(self, method: str, part: str, status: int = 0, **fields: Any) -> None:
        self.faults.append(Fault(method, part, status, **fields))

    def hold(self, method: str, part: str) -> asyncio.Event:
        """Whatever matches waits until the event that this returns is set; `held` counts what has come."""
        self.held, gate = 0, asyncio.Event()
        self.fail(method, part, times=1_000_000, gate=gate)
        return gate

    def asked(self, method: str, path: str) -> int:
        """How often."""
        return self.requests.count((method, path))

    def break_watches(self) -> None:
        for watch in list(self._watches):
            if watch._req is not None and watch._req.transport is not None:
                watch._req.transport.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        fault = next(
            (f for f in self.faults if f.method == request.method and f.part in request.path_qs and f.times), None
        )
        if fault is not None:
            fault.times -= 1
            if fault.gate is not None:
                self.held += 1
                await fault.gate.wait()
            elif fault.seconds:
                await asyncio.sleep(fault.seconds)
            elif fault.status:
                return answer(fault.status, status_of(fault.status, "Drawn", fault.message), fault.headers)
        try:
            await asyncio.sleep(0)
            self._check(request.path)
            found = await self._answered(request)
        except Refused as error:
            return answer(error.status, status_of(error.status, error.reason, str(error)))
        if fault is not None and fault.is_a_cut and request.transport is not None:
            request.transport.close()
        return found

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        raise NotImplementedError

    def _check(self, whole: str) -> None:
        def is_within(path: str) -> bool:
            return whole == path or whole.startswith(f"{path}/")

        if any(map(is_within, self.undefined)):
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        for path in filter(is_within, self.forbidden):
            resource = path.rpartition("/")[2]
            raise Refused(403, "Forbidden", f'{resource} is forbidden: User "shoal" cannot use resource "{resource}"')

    def thinned(self, path: str, body: Json) -> Json:
        """What a definition keeps of it."""
        if not self.dropped or not path.endswith("/status"):
            return body
        return {**body, "status": {key: one for key, one in body["status"].items() if key not in self.dropped}}


def status_of(code: int, reason: str, message: str) -> Json:
    found = {"status": "Failure", "code": code, "reason": reason, "message": message}
    return {"apiVersion": "v1", "kind": "Status", "metadata": {}, **found}


def answer(status: int, item: Json, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(item, status=status, headers=headers)


@asynccontextmanager
async def served(cluster: ApiFaults, port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """The address at which it is served for as long as the context lasts."""
    application = web.Application(client_max_size=1 << 24)
    application.router.add_route("*", "/{path:.*}", cluster.handle)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls)
    await site.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
    finally:
        cluster.break_watches()
        await runner.cleanup()
        handlers = [task for task in asyncio.all_tasks() if "RequestHandler" in str(task.get_coro())]
        if handlers:
            await asyncio.wait(handlers, timeout=100)
