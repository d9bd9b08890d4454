"""A whole controller: store, shell, sessions, launchers and REST, wired together. Nothing else is here.

`async with running(settings) as server` is used by the command and by tests. Everything ends with the context, in the
order in which nothing is said that cannot be heard; when the controller must stop by itself, the body is cancelled
and the context raises why.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

from shoal_protos.addresses import is_here, join_address, split_address
from shoal_protos.errors import StoreError

from shoal_controller import logs
from shoal_controller.api.app import ApiSettings, build_app
from shoal_controller.api.web import Web
from shoal_controller.launchers.local import LocalLauncher, WorkerEnvironment
from shoal_controller.metrics import Metrics, Sources
from shoal_controller.planner_process import PlannerProcess
from shoal_controller.ports import Outside
from shoal_controller.sessions.service import SessionService
from shoal_controller.sessions.settings import SessionSettings
from shoal_controller.sessions.streams import Streams
from shoal_controller.settings import Settings, inherited_environment
from shoal_controller.shell import Shell
from shoal_controller.store.open import open_store
from shoal_controller.token_register import TokenRegister
from shoal_controller.worker_port import bind_again


@dataclass(frozen=True, slots=True)
class Server:
    """A running controller, as others reach it."""

    http: str
    """`HOST:PORT` of REST."""
    grpc: str
    """`HOST:PORT` for workers."""
    shell: Shell
    launcher: LocalLauncher


@asynccontextmanager
async def serve(settings: Settings) -> AsyncIterator[Server]:
    """A controller that serves for as long as the context lasts."""
    logs.configure(settings.log_level)
    async with AsyncExitStack() as ends:
        metrics = Metrics()
        store = await open_store(settings.store, metrics.timed, settings.etcd)
        ends.push_async_callback(store.close)
        shell = Shell(store, forget_after_seconds=settings.forget_after_seconds)
        http_host, http_port = split_address(settings.http)
        tokens = TokenRegister(store, _secret(settings))
        ends.push_async_callback(tokens.stop)
        web = Web(http_host, http_port)
        ends.push_async_callback(web.stop)
        streams = Streams()
        sessions = SessionService(shell, streams, _session_settings(settings))
        ends.push_async_callback(sessions.stop)
        port = bind_again(settings.folder, settings.grpc, sessions.bind)
        grpc = join_address(split_address(settings.grpc)[0], port)
        launcher = LocalLauncher(settings.folder, _worker_environment(settings, grpc), shell.submit)
        ends.push_async_callback(launcher.close)
        launchers = {"local": launcher} if "local" in settings.allowed_launchers else {}
        planner = PlannerProcess()
        ends.push_async_callback(planner.stop)
        shell.connect(Outside(streams, launchers, planner.answer))
        metrics.show(Sources(shell.jobs, lambda: not shell.stopped.done(), streams.states))
        ends.push_async_callback(shell.stop)
        await shell.start()
        await tokens.start(shell.give_up)
        app = build_app(shell, metrics.scrape, _api_settings(settings), tokens)
        await web.start(app, shell.give_up)
        await sessions.serve()
        with _cancelled_when(shell.stopped):
            yield Server(join_address(http_host, web.port), grpc, shell, launcher)


def _session_settings(settings: Settings) -> SessionSettings:
    return SessionSettings(
        token=settings.token, certificate=settings.grpc_certificate, key=settings.grpc_key,
        client_ca=settings.grpc_client_ca,
    )  # fmt: skip


def _api_settings(settings: Settings) -> ApiSettings:
    here_only = is_here(split_address(settings.http)[0])
    return ApiSettings(settings.default_workers, here_only, settings.allowed_launchers)


def _secret(settings: Settings) -> str | None:
    return None if settings.token is None else settings.token.get_secret_value()


def _worker_environment(settings: Settings, grpc: str) -> WorkerEnvironment:
    """What local workers get. They reach a port that is open to everybody by this machine's own address."""
    host, port = split_address(grpc)
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return WorkerEnvironment(join_address(near, port), _secret(settings), inherited_environment())


@contextmanager
def _cancelled_when(stopped: asyncio.Future[BaseException]) -> Iterator[None]:
    """Cancels the body when the controller has stopped by itself, and raises why."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()

    def cancel(_: asyncio.Future[BaseException]) -> None:
        task.cancel()

    stopped.add_done_callback(cancel)
    try:
        yield
    except asyncio.CancelledError:
        if stopped.done() and task.uncancel() <= before:
            raise StoreError(f"the controller has stopped: {stopped.result()}") from stopped.result()
        raise
    finally:
        stopped.remove_done_callback(cancel)
