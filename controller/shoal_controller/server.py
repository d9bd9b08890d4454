"""A whole controller: REST, sessions, the store, and the election in which it leads or follows. Wiring, nothing else.

`async with serve(settings) as server` is used by the command and by tests. What a leader has besides is made for each
of its terms (`leadership/term.py`). Everything ends with the context, in the order in which nothing is said that cannot
be heard; when the controller must stop by itself, the body is cancelled and the context raises why.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal_protos.addresses import is_here, join_address, split_address
from shoal_protos.errors import StoreError, UserError
from shoal_protos.limits import check_address_space, check_open_files
from shoal_protos.release import RELEASE
from starlette.types import ASGIApp

from shoal_controller.access.client_tls import ClientTls
from shoal_controller.access.proxies import Proxies
from shoal_controller.access.token_register import TokenRegister
from shoal_controller.access.worker_tokens import WorkerTokens
from shoal_controller.api.app import ApiSettings, build_app
from shoal_controller.api.guard import CountedRequests, web_certificate
from shoal_controller.api.neighbours import Neighbours
from shoal_controller.api.web import Web
from shoal_controller.jobs.backups import check_restored
from shoal_controller.jobs.ports import SizeWriter
from shoal_controller.jobs.records import FORMAT
from shoal_controller.jobs.shell import Shell
from shoal_controller.jobs.streams import Streams
from shoal_controller.launchers.counted import CountedLauncher
from shoal_controller.launchers.kubernetes.request_outcomes import Asked
from shoal_controller.launchers.kubernetes.section import ClusterOptions, PodOptions
from shoal_controller.launchers.local import LocalLauncher, WorkerEnvironment
from shoal_controller.launchers.ownership import Claim, claim
from shoal_controller.launchers.registry import LAUNCHERS, LauncherMeans, Made
from shoal_controller.leadership.controller_state import ControllerState
from shoal_controller.leadership.election import ControllerPlace, Election
from shoal_controller.leadership.introductions import introductions
from shoal_controller.leadership.term import Means, leading
from shoal_controller.observe.curves import Curves
from shoal_controller.observe.metrics import Metrics, Sources
from shoal_controller.observe.own_figures import LoopLag
from shoal_controller.process import logs
from shoal_controller.process.descriptors import check_writable
from shoal_controller.process.owner import Owner
from shoal_controller.process.tasks import cancelled_when, end_task, guarded, only_logged
from shoal_controller.process.worker_port import WorkerPort, bind_again, remember
from shoal_controller.sessions.service import SessionService
from shoal_controller.sessions.settings import SessionSettings
from shoal_controller.settings import Settings, inherited_environment
from shoal_controller.store.etcd_store import parsed_etcd_url
from shoal_controller.store.open import open_store

END_SECONDS = 15.0
"""How long a leader may take to end its term: its jobs finish the write in hand."""

NEEDED_MEBIBYTES = 512
"""Address space of a controller: most of it is set aside for threads, and never used."""

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts on which a port is open to everybody, and how this machine reaches it itself."""


Resources = Callable[[Shell], AbstractAsyncContextManager[SizeWriter]]
"""What makes jobs of a shell from the resources of a cluster."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running controller, as others reach it."""

    http: str
    """`HOST:PORT` of REST."""
    grpc: str
    """`HOST:PORT` for workers."""
    scheme: str
    """`http` or `https`, of REST."""
    controller: ControllerState
    launcher: LocalLauncher
    app: ASGIApp
    """REST, as its port answers."""
    serves_page: bool = False

    @property
    def url(self) -> str:
        """Of REST."""
        return f"{self.scheme}://{self.http}"

    @property
    def page(self) -> str:
        """Where a browser finds the page; empty: none is served."""
        host, port = split_address(self.http)
        return f"{self.scheme}://{join_address(EVERYWHERE.get(host, host), port)}/" if self.serves_page else ""

    @property
    def shell(self) -> Shell:
        """Raises `NotLeading` where another controller leads."""
        return self.controller.leading()


@asynccontextmanager
async def serve(settings: Settings) -> AsyncIterator[Server]:
    """A controller that serves for as long as the context lasts. It answers for its health at once; the context is
    entered when a controller leads, this or another one.
    """
    check_address_space("a controller", NEEDED_MEBIBYTES)
    check_open_files("a controller")
    logs.configure(settings.log_level)
    if _starts_here(settings):
        _check_folders(settings)
    stopped: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def fail(error: BaseException) -> None:
        if not stopped.done():
            stopped.set_result(error)

    async with AsyncExitStack() as ends:
        session_settings = _session_settings(settings)
        worker_tokens = session_settings.worker_tokens()
        metrics, controller, streams = Metrics(), ControllerState(), Streams(worker_tokens)
        lag = LoopLag()
        ends.push_async_callback(end_task, guarded("loop lag", lag.run(), only_logged))
        metrics.show(
            Sources(
                controller.jobs, lambda: controller.term, streams.states, lambda: streams.refusals.counts,
                lambda: lag.recent.most, lambda: controller.clock_correction,
            )
        )  # fmt: skip
        http_host, http_port = split_address(settings.http)
        neighbours = Neighbours(ClientTls(settings.ca))
        web = Web(http_host, http_port, _tls(settings))
        ends.push_async_callback(web.stop)
        sessions = SessionService(controller, streams, session_settings)
        ends.push_async_callback(sessions.stop)
        found = bind_again(settings.folder, settings.grpc, sessions.bind, settings.adopt)
        grpc = join_address(split_address(settings.grpc)[0], found.port)
        tokens = TokenRegister(_secret(settings))
        app = build_app(controller, metrics.scrape, _api_settings(settings, worker_tokens), tokens, neighbours)
        counted = CountedRequests(app, metrics.own.requested)
        await web.start(counted, fail)
        ends.enter_context(cancelled_when(stopped, partial(_why_it_stopped, stopped)))
        alone = settings.store.startswith("embedded:")
        store = await open_store(settings.store, metrics.own.timed, settings.etcd)
        ends.push_async_callback(store.close)
        await check_restored(store, patient=not alone)
        ends.push_async_callback(tokens.stop)  # before: it may be told to end while it reads
        await tokens.start(store, fail)
        me = _place_of(settings, web.port, grpc)
        election = Election(store, me, neighbours.term_of)
        controller.join(store, election, await introductions(store, me.id, patient=not alone))
        curves = Curves(settings.folder)
        ends.push_async_callback(end_task, guarded("curves", curves.run(), only_logged))
        environment = _worker_environment(grpc, controller, worker_tokens, settings)
        claimed = await _claimed(settings, found if alone else WorkerPort(found.port), ends)  # or they find others
        launcher = LocalLauncher(settings.folder, environment, controller.report, claimed, settings.log_folder)
        parts = _launcher_means(settings, launcher, controller, worker_tokens, metrics.own.asked)
        allowed = ((kind, one) for kind, one in LAUNCHERS.items() if kind in settings.allowed_launchers)
        made = {kind: await ends.enter_async_context(one.make(parts)) for kind, one in allowed}
        launchers = {kind: CountedLauncher(one.launcher, metrics.own.launches(kind)) for kind, one in made.items()}
        controller.pod_logs = next((one.logs for one in made.values() if one.logs is not None), None)
        patience, resources = settings.forget_after_seconds, _resources(made.values())
        filled = settings.job_defaults.filled
        means = Means(store, streams, controller, launchers, curves.keep, patience, fail, filled, resources)
        electing = guarded("election", election.run(partial(leading, means)), fail)
        ends.push_async_callback(end_task, electing, END_SECONDS)
        ends.callback(controller.end)
        await controller.settled()
        await sessions.serve()
        http = join_address(http_host, web.port)
        yield Server(http, grpc, settings.http_scheme, controller, launcher, counted, settings.page)


def _starts_here(settings: Settings) -> bool:
    """Whether a launcher that jobs may use starts processes of this machine."""
    return any(one.is_here for kind, one in LAUNCHERS.items() if kind in settings.allowed_launchers)


def _check_folders(settings: Settings) -> None:
    """What local workers need. Raises `UserError` where nothing can be written there."""
    other = "--data, or allow no local workers (SHOAL_LAUNCHERS=none)"
    check_writable(settings.folder, "records and logs of local workers", other)
    if settings.log_folder is not None:
        check_writable(settings.log_folder, "logs of local workers", "SHOAL_LOG_DIR")


async def _claimed(settings: Settings, port: WorkerPort, ends: AsyncExitStack) -> Claim:
    """Whose the local workers are that live, now that the store is this controller's. Raises `UserError`."""
    kind, _, rest = settings.store.partition(":")
    owner = Owner.of_folder(Path(rest)) if kind == "embedded" else Owner(str(parsed_etcd_url(settings.store)))
    found = Claim(owner)
    if _starts_here(settings):
        try:
            found = await asyncio.to_thread(
                claim, settings.folder, settings.log_folder, owner, settings.adopt, port.lost
            )
        except OSError as error:
            raise UserError(f"the records of local workers in {settings.folder} cannot be used: {error}") from error
    for descriptor in found.held:
        ends.callback(os.close, descriptor)
    remember(settings.folder, settings.grpc, port.port)
    return found


def _place_of(settings: Settings, http_port: int, grpc: str) -> ControllerPlace:
    """This controller, as the others and their workers reach it."""
    places = [(split_address(settings.http)[0], http_port), split_address(grpc)]
    http, workers = (join_address(settings.advertise or _reached_at(host), port) for host, port in places)
    return ControllerPlace(secrets.token_hex(8), http, workers, settings.http_scheme, RELEASE, FORMAT)


def _reached_at(host: str) -> str:
    return socket.gethostname() if host in EVERYWHERE else host


def _tls(settings: Settings) -> ssl.SSLContext | None:
    """With what REST is served; None: plain HTTP."""
    if settings.http_certificate is None or settings.http_key is None:
        return None
    return web_certificate(settings.http_certificate, settings.http_key)


def _session_settings(settings: Settings) -> SessionSettings:
    return SessionSettings(
        token=settings.token, certificate=settings.grpc_certificate, key=settings.grpc_key,
        client_ca=settings.grpc_client_ca,
    )  # fmt: skip


def _api_settings(settings: Settings, tokens: WorkerTokens | None) -> ApiSettings:
    here_only = is_here(split_address(settings.http)[0])
    launchers, folder, proxies = settings.allowed_launchers, settings.folder, Proxies.named(settings.proxies)
    workers = settings.default_workers
    return ApiSettings(workers, here_only, launchers, tokens, folder, settings.page, settings.log_folder, proxies)


def _secret(settings: Settings) -> str | None:
    return None if settings.token is None else settings.token.get_secret_value()


def _worker_environment(
    grpc: str, controller: ControllerState, tokens: WorkerTokens | None, settings: Settings
) -> WorkerEnvironment:
    """What local workers get. They reach a port that is open to everybody by this machine's own address."""
    host, port = split_address(grpc)
    near = join_address(EVERYWHERE.get(host, host), port)

    def controllers() -> Sequence[str]:
        return tuple(dict.fromkeys([near, *controller.places()]))

    return WorkerEnvironment(controllers, tokens, inherited_environment(), settings.devices, settings.warm_start)


def _listed(text: str) -> tuple[str, ...]:
    """What a setting names, with commas between."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def _launcher_means(
    settings: Settings,
    local: LocalLauncher,
    controller: ControllerState,
    tokens: WorkerTokens | None,
    asked: Asked,
) -> LauncherMeans:
    given, taints = _listed(settings.kubernetes_controllers), _listed(settings.kubernetes_taints)
    pods = PodOptions(lambda: given or controller.places(), tokens)
    cluster = ClusterOptions(settings.kubeconfig, settings.kubernetes_namespace, settings.kubernetes_nodes, taints)
    return LauncherMeans(local, pods, cluster, asked, controller.report)


def _resources(launchers: Iterable[Made]) -> Resources | None:
    """Return what makes jobs from the resources of a launcher's cluster, imported where there is one; None: nothing."""
    cluster = next((one.cluster for one in launchers if one.cluster is not None), None)
    if cluster is None:
        return None
    from shoal_controller.elastic_jobs.reconciler import reconciling

    return partial(reconciling, cluster)


def _why_it_stopped(stopped: asyncio.Future[BaseException]) -> StoreError:
    error = StoreError(f"the controller has stopped: {stopped.result()}")
    error.__cause__ = stopped.result()
    return error
