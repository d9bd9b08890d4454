"""A controller that does what a test tells it: the real protocol over real gRPC, and no opinion of its own.

    with SmallController() as controller:
        hello = controller.receives(Hello)
        controller.sends(hello.worker, Prepare(1))

What workers say waits until the test asks for it. It welcomes every hello, unless told otherwise.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from ports import free_port
from shoal_protos.channel import CHANNEL_OPTIONS, METHOD
from shoal_protos.messages import Hello, Refusal, ToController, ToWorker, Welcome
from shoal_protos.wire import decode_worker, encode_controller

PATIENCE_SECONDS = 100.0
NO_HEARTBEAT_SECONDS = 3600.0
"""So that only what is said at once is heard."""

UNBOUNDED = ("grpc.max_send_message_length", -1)
OPTIONS = (*(option for option in CHANNEL_OPTIONS if option[0] != UNBOUNDED[0]), UNBOUNDED, ("grpc.so_reuseport", 0))

Message = TypeVar("Message", bound=ToController)
Context = grpc.aio.ServicerContext[bytes, bytes]


class SmallController:
    """Listens on `address` while it is started; `stop` and `start` are its deaths and lives."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self._credentials = credentials
        self.heartbeat_seconds = NO_HEARTBEAT_SECONDS
        self.reconnect_seconds = 10.0
        self.refusals: deque[Refusal] = deque()
        """Each answers one hello in place of the welcome."""
        self.metadata: dict[str, Any] = {}
        self._received: list[tuple[str, ToController]] = []
        self._arrived = threading.Condition()
        self._streams: dict[str, Context] = {}
        self._given = 0
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="small controller")

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- what a test asks

    def start(self) -> None:
        self._do(self._start())

    def stop(self) -> None:
        """Every stream breaks."""
        self._do(self._server.stop(None))
        self._streams.clear()

    def receives(
        self, kind: type[Message], matching: Callable[[Message], bool] = lambda _: True, by: str = ""
    ) -> Message:
        """The oldest such message that no test has asked for; what its worker said before is forgotten."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: self._find(kind, matching, by) is not None, PATIENCE_SECONDS), (
                f"no such {kind.__name__} came, last {[(w, str(m)[:300]) for w, m in self._received[-3:]]}"
            )
            place = self._find(kind, matching, by)
            assert place is not None
            worker, message = self._received[place]
            self._received = [entry for at, entry in enumerate(self._received) if at > place or entry[0] != worker]
            assert isinstance(message, kind)
            return message

    def sends(self, worker: str, *messages: ToWorker | bytes) -> None:
        for message in messages:
            data = message if isinstance(message, bytes) else encode_controller(message)
            self._do(self._streams[worker].write(data))

    # ---- the server

    def _find(self, kind: type[ToController], matching: Callable[[Any], bool], by: str) -> int | None:
        for place, (worker, message) in enumerate(self._received):
            if isinstance(message, kind) and by in ("", worker) and matching(message):
                return place
        return None

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_SECONDS)

    async def _start(self) -> None:
        self._server = grpc.aio.server(options=OPTIONS)
        service, _, method = METHOD.removeprefix("/").partition("/")
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        address = f"127.0.0.1:{self._port}"
        if self._credentials is None:
            self._server.add_insecure_port(address)
        else:
            self._server.add_secure_port(address, self._credentials)
        await self._server.start()

    async def _serve(self, _: object, context: Context) -> None:
        worker = ""
        while isinstance(data := await context.read(), bytes):
            message = decode_worker(data)
            if isinstance(message, Hello):
                if self.refusals:
                    refusal = self.refusals.popleft()
                    await context.write(encode_controller(refusal))
                    return
                worker = message.worker or self._name()
                self.metadata = dict(context.invocation_metadata() or ())
                self._streams[worker] = context
                await context.write(
                    encode_controller(Welcome(worker, self.heartbeat_seconds, self.reconnect_seconds, 1800.0))
                )
            with self._arrived:
                self._received.append((worker, message))
                self._arrived.notify_all()

    def _name(self) -> str:
        self._given += 1
        return f"given{self._given}"
