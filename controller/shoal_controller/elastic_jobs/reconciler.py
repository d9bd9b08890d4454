"""All ElasticJobs of a namespace, for the controller that leads: watched, looked at when something is new or due.

It knows the cluster by `ObjectWatch` and `ResourceWriter`, the jobs by the shell, and is the one writer of the size of
a job that has a resource. ● Nothing is taken for deleted before all resources have been listed.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice

import structlog
from shoal_protos.acts import Scale
from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import Conflict, PeerError, ShoalError, StoreError, UserError

from shoal_controller.core.machine.spec import JobView
from shoal_controller.elastic_jobs.owned_job import OwnedJob, Surroundings
from shoal_controller.elastic_jobs.resource_writer import ResourceWriter
from shoal_controller.jobs.shell import Shell
from shoal_controller.launchers.kubernetes.cluster_api import ClusterApi, ClusterRefusal, ObjectWatch
from shoal_controller.launchers.kubernetes.resource_kind import API_VERSION, FULL_NAME, uid_of
from shoal_controller.launchers.kubernetes.section import Json
from shoal_controller.process.tasks import end_task, guarded, only_logged

LOOK_SECONDS = 0.5
"""How often it is seen which jobs have news."""
AT_A_TIME = 20
"""Resources that are looked at at the same time."""
AGAIN_SECONDS = 1.0
"""After a look that failed."""
NO_STATUS = (
    f"the definition of {FULL_NAME} in this cluster has no subresource `status`, so nothing can be told there; apply "
    "crd/elasticjobs.yaml of the chart's version"
)

log = structlog.get_logger("shoal.elastic_jobs")


class Reconciler:
    """Of one term. `run` as a task, beside that of the watch."""

    def __init__(self, api: ClusterApi, shell: Shell, instance: str) -> None:
        self._shell, self._namespace = shell, api.namespace
        writer = ResourceWriter(api, instance)
        self.copy = ObjectWatch(api, writer.resources, "", self._on_resource)
        self.copy.listed, self.copy.explain = self._on_listed, self._explained
        self._writer = writer
        self._owned: dict[str, OwnedJob] = {}
        self._surroundings = Surroundings(shell, self.copy, writer, lambda: len(self._owned))
        self._changed: dict[str, None] = {}
        """Names of resources that are to be looked at, in this order."""
        self._listed_at = float("-inf")
        """When it was seen last which ones are due."""
        self._news = asyncio.Event()
        self._looks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        await self.copy.synced.wait()
        while True:
            self._news.clear()
            if time.monotonic() - self._listed_at >= LOOK_SECONDS:
                self._list_due()
            self._begin_looks()
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def stop(self) -> None:
        """Jobs go on; whoever leads next looks after them."""
        await asyncio.gather(*map(end_task, self._looks.values()))

    def _list_due(self) -> None:
        """All of them are gone through so seldom: with a thousand that takes milliseconds."""
        self._listed_at = now = time.monotonic()
        due = [name for name, owned in self._owned.items() if now >= owned.due or owned.has_news]
        self._changed |= dict.fromkeys(due)

    def _begin_looks(self) -> None:
        for name in list(islice(self._changed, 2 * AT_A_TIME)):
            if len(self._looks) >= AT_A_TIME:
                return
            if name in self._looks:
                continue
            del self._changed[name]
            if (owned := self._owned.get(name)) is not None:
                self._looks[name] = guarded(f"look at {FULL_NAME} {name}", self._look(owned), only_logged)
                self._looks[name].add_done_callback(partial(self._end_look, name))

    def _end_look(self, name: str, _: object) -> None:
        """One more may begin."""
        self._looks.pop(name, None)
        if self._owned[name].is_over:
            del self._owned[name]
        self._news.set()

    async def _look(self, owned: OwnedJob) -> None:
        try:
            await owned.look()
            owned.trouble = ""
        except (ShoalError, OSError) as error:
            owned.due = time.monotonic() + AGAIN_SECONDS
            sentence = str(error)
            if isinstance(error, ClusterRefusal) and error.code in (404, 409):
                is_there = await self._read_again(owned.name)
                if error.code == 409 or not is_there:
                    return
                sentence = NO_STATUS
            if sentence != owned.trouble:
                log.warning("a resource is looked at again later", job=owned.name, error=sentence)
                owned.trouble = sentence

    async def _read_again(self, name: str) -> bool:
        """Somebody has written meanwhile. Returns whether the resource is there."""
        try:
            found = await self._writer.read(name)
        except PeerError as error:
            log.warning("a resource cannot be read", job=name, error=str(error))
            return False
        if found is not None:
            self.copy.learn(found)
        return found is not None

    # ---- the watch

    def _on_resource(self, name: str, _: Json | None) -> None:
        if name not in self._owned:
            self._owned[name] = OwnedJob(name, self._surroundings)
        self._changed[name] = None
        self._news.set()

    def _on_listed(self) -> None:
        """Jobs whose resource went while nobody looked."""
        for view in self._shell.jobs():
            if self._shell.spec(view.job).resource and view.job not in self._owned:
                self._on_resource(view.job, None)

    def _explained(self, error: Exception) -> str:
        if isinstance(error, ClusterRefusal) and error.code in (401, 403):
            return (
                f"ElasticJobs of namespace {self._namespace} cannot be served: {error}. Give the controllers' service "
                "account the rights of the chart (rbac.create)"
            )
        if isinstance(error, ClusterRefusal) and error.code == 404:
            return (
                f"this cluster has no {FULL_NAME} of version {API_VERSION}, so no job is made from resources; install "
                "the chart with crd.install, or apply its crd/elasticjobs.yaml"
            )
        return str(error)

    def trouble(self, name: str) -> str:
        """Why the last look at a resource has failed; empty where it has not."""
        return self._owned[name].trouble if name in self._owned else ""

    # ---- for REST

    async def write_size(self, view: JobView, asked: Scale) -> None:
        """Write into a job's resource the size that it is to have. Raises `ShoalError` where it cannot be so many."""
        item = self.copy.items.get(view.job)
        if item is None or uid_of(item) != self._shell.spec(view.job).resource:
            trouble = self.copy.trouble or "it is deleted, or not known yet"
            raise StoreError(
                f"the resource {FULL_NAME}/{view.job}, which has the job's size, cannot be read: {trouble}"
            )
        try:
            self.copy.learn(await self._writer.write_size(item, asked))
        except ClusterRefusal as error:
            if error.code == 409:
                raise Conflict(f"the resource {FULL_NAME}/{view.job} has changed meanwhile; try again").coded(
                    ErrorCode.JOB_OF_A_RESOURCE
                ) from error
            if error.code in (400, 422):
                raise UserError(f"the resource {FULL_NAME}/{view.job} does not take this size: {error}").coded(
                    ErrorCode.SIZE_IMPOSSIBLE
                ) from error
            raise


@asynccontextmanager
async def reconciling(api: ClusterApi, shell: Shell) -> AsyncIterator[Reconciler]:
    """For as long as a term lasts."""
    reconciler = Reconciler(api, shell, socket.gethostname())
    tasks = [
        guarded("watch of elasticjobs", reconciler.copy.run(), only_logged),
        guarded("elasticjobs", reconciler.run(), only_logged),
    ]
    try:
        yield reconciler
    finally:
        await asyncio.gather(*map(end_task, tasks))
        await reconciler.stop()
