"""The Kubernetes launcher: a pod for each worker, or for several, made, watched and deleted by name and uid.

The job decides which workers come and go, and the cluster follows: each request is noted and done in the background,
and what the watches of pods and nodes show is reported to the job in order. A pod of the right name with another uid is
not ours. The shell calls `spawn`, `kill` and `adopt`; reports go out by `submit`. `PodsByJob` finds a job's pods by
their labels without a pass over all pods. `server.py` opens connection and launcher where Kubernetes is allowed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import structlog
from shoal_protos.errors import PeerError, ShoalError, StoreError
from shoal_protos.plan import Plan, WorkerId

from shoal_controller.core.machine.durable import Place
from shoal_controller.core.machine.events import Exited, Waiting
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.kubernetes.cluster_api import ClusterApi, ClusterRefusal, ClusterSilence, ObjectWatch
from shoal_controller.launchers.kubernetes.pod_manifest import JOB, MANAGED, RUN, pod_name, pods_of, run_label
from shoal_controller.launchers.kubernetes.pod_state import gone, is_terminating, node_of, state_of, worker_of
from shoal_controller.launchers.kubernetes.pod_writer import PodWriter
from shoal_controller.launchers.kubernetes.request_outcomes import Asked, nobody_counts
from shoal_controller.launchers.kubernetes.section import ClusterOptions, Json, PodOptions
from shoal_controller.launchers.kubernetes.tracked_pod import News, TrackedPod, TrackedPods
from shoal_controller.launchers.kubernetes.world_annotations import WorldAnnotations, annotated
from shoal_controller.process.tasks import end_task, guarded, only_logged

NODES = "/api/v1/nodes"
AGAIN_SECONDS = 0.5
"""Before a job that could not hear is told again."""
ADOPT_SECONDS = 40.0
"""How long an adoption waits until all pods are known."""
KEPT_PODS = 20
"""Ended pods of a job that stay, for their logs; the oldest are deleted."""
FORGET_SECONDS = 45.0
"""How long the pods of a job that is forgotten may take to be gone."""

log = structlog.get_logger("shoal.kubernetes")

Submit = Callable[[str, str, News], Awaitable[None]]
"""To a run of a job."""


class KubernetesLauncher:
    """A `Launcher`. All calls come from one event loop."""

    def __init__(self, api: ClusterApi, pods: PodOptions, cluster: ClusterOptions, submit: Submit) -> None:
        self._api, self._cluster, self._submit = api, cluster, submit
        self._writer = PodWriter(api, pods)
        self._pods = ObjectWatch(api, self._writer.pods, MANAGED, self._on_pod)
        self._nodes = ObjectWatch(api, NODES, "", self._on_node)
        self._tracked = TrackedPods()
        self._by_job = PodsByJob()
        self._leaving: dict[str, str] = {}
        """Old pods that are being deleted: their uids by name."""
        self._annotations = WorldAnnotations(api, self._tracked)
        self._untold: dict[str, None] = {}
        """Names of pods of which there may be news, in order."""
        self._news = asyncio.Event()
        self._watching: list[asyncio.Task[None]] = []
        self._writing: set[asyncio.Task[None]] = set()

    # ---- what the shell asks

    async def spawn(self, worker: WorkerId, spec: JobSpec) -> Place:
        """Ask for a pod of this worker, unless one was asked for another of its workers. What it waits for, and that it
        runs, is told as it comes.
        """
        self._watch()
        known = self._tracked.by_worker.get((spec.job, worker))
        if known is None or known.spec.run != spec.run or known.end is not None or len(known.workers) == 1:
            known = self._tracked.add(TrackedPod.of(worker, spec))
            self._write(f"pod {known.name}", self._make(known))
        return Place.of_pod(known.name)

    async def kill(self, worker: WorkerId, spec: JobSpec) -> None:
        """Delete the worker's pod, with all in it; by force where its node does not answer. One that is not there has
        ended.
        """
        tracked = self._tracked.by_worker.get((spec.job, worker)) or await self._found(worker, spec)
        tracked.is_killed = True
        if tracked.uid:
            await self._delete(tracked)

    async def adopt(self, workers: Sequence[WorkerId], spec: JobSpec) -> Mapping[WorkerId, Place | None]:
        """The pods that an earlier controller has made for this run, as the cluster has them now; None: one of
        `workers` that it has not made. Pods of another run are deleted.
        """
        self._watch()
        await self._know_pods(spec.job)
        places: dict[WorkerId, Place | None] = dict.fromkeys(workers)
        for pod in self._by_job.of(spec.job):
            if pod["metadata"]["name"] != pod_name(spec.job, worker_of(pod)):
                continue  # somebody's copy of a worker's pod, with its labels
            if pod["metadata"]["labels"].get(RUN) != run_label(spec.run):
                self._delete_old(pod)
                continue
            tracked = self._tracked.by_name.get(pod["metadata"]["name"])
            if tracked is None:
                tracked = self._tracked.add(TrackedPod.of(worker_of(pod), spec))
            tracked.uid, tracked.annotated = pod["metadata"]["uid"], annotated(pod)
            self._judge(tracked, pod)
            for worker in tracked.workers:
                places.pop(worker, None)
                if tracked.end is None and tracked.state is not None:
                    places[worker] = tracked.state.place
        return places

    async def _know_pods(self, job: str) -> None:
        """● One list, made in this term, serves all jobs that are adopted: a thousand of them ask for two pages."""
        try:
            async with asyncio.timeout(ADOPT_SECONDS):
                await self._pods.synced.wait()
        except TimeoutError as error:
            why = self._pods.trouble or "the cluster's API server does not answer"
            raise PeerError(f"the pods of job {job} are not known yet: {why}") from error

    def world_began(self, world: Plan, spec: JobSpec) -> None:
        """Its members' pods will say so, each in its annotations."""
        self._annotations.began(world, spec)

    async def forget(self, job: str) -> None:
        """Delete what is left of a job that is over: pods, secret, PodGroup. Raises `OSError`."""
        self._annotations.forget(job)
        for tracked in self._tracked.of(job):
            tracked.is_killed = True
            self._tracked.remove(tracked)
        try:
            async with asyncio.timeout(FORGET_SECONDS):
                await self._writer.settle(job)
                found, _ = await self._api.list(self._writer.pods, pods_of(job))
                await asyncio.gather(*map(self._writer.delete, found))
                await self._writer.delete_belongings(job)
        except (PeerError, TimeoutError) as error:
            raise OSError(f"its pods cannot be deleted: {error}") from error

    async def release(self) -> None:
        """Let go of everything; the pods live on, and whoever leads next adopts them."""
        await asyncio.gather(*map(end_task, [*self._watching, *self._writing]))
        self._watching.clear()
        self._writer.release()
        self._tracked.clear()
        self._annotations.clear()
        self._untold.clear()
        self._by_job.clear()
        self._leaving.clear()
        self._pods = ObjectWatch(self._api, self._writer.pods, MANAGED, self._on_pod)
        self._nodes = ObjectWatch(self._api, NODES, "", self._on_node)

    async def _found(self, worker: WorkerId, spec: JobSpec) -> TrackedPod:
        """A worker whose pod nobody here has made or adopted: perhaps there is none."""
        self._watch()
        tracked = self._tracked.add(TrackedPod.of(worker, spec))
        try:
            pod = await self._api.get(f"{self._writer.pods}/{tracked.name}")
        except PeerError as error:
            if isinstance(error, ClusterRefusal) and error.code == 404:
                self._end(tracked, f"there is no pod {tracked.name}")
                return tracked
            self._tracked.remove(tracked)  # else the next kill would take it for one that is being made
            raise
        if pod["metadata"].get("labels", {}).get(RUN) == run_label(spec.run) and worker_of(pod) == tracked.worker:
            tracked.uid = pod["metadata"]["uid"]
            self._pods.learn(pod)
        else:
            self._end(tracked, f"the pod {tracked.name} is another's")
        return tracked

    # ---- watching

    def _watch(self) -> None:
        """From the first worker on."""
        if self._watching:
            return
        self._watching = [
            guarded("watch of pods", self._pods.run(), only_logged),
            guarded("news of pods", self._tell(), only_logged),
            guarded("annotations of pods", self._annotations.run(), only_logged),
        ]
        if self._cluster.nodes:
            self._nodes.listed = self._on_nodes_listed
            self._watching.append(guarded("watch of nodes", self._nodes.run(), only_logged))
        else:
            log.warning("nodes may not be read: no taint, cordon or lost node is seen")

    def _on_pod(self, name: str, pod: Json | None) -> None:
        self._by_job.note(name, pod)
        if pod is None:
            self._leaving.pop(name, None)
        tracked = self._tracked.by_name.get(name)
        if tracked is None or not tracked.uid:
            return
        if pod is None or pod["metadata"]["uid"] != tracked.uid:
            self._end(tracked, f"its pod {name} was deleted")
        else:
            self._judge(tracked, pod)

    def _on_node(self, name: str, _: Json | None) -> None:
        """A node has changed: its pods may be told something else."""
        for tracked in list(self._tracked.by_name.values()):
            pod = self._pods.items.get(tracked.name)
            if pod is not None and node_of(pod) == name and pod["metadata"]["uid"] == tracked.uid:
                self._judge(tracked, pod)

    def _on_nodes_listed(self) -> None:
        """A node that an adopted pod runs on may have gone while nobody looked."""
        for tracked in list(self._tracked.by_name.values()):
            pod = self._pods.items.get(tracked.name)
            if pod is not None and pod["metadata"]["uid"] == tracked.uid and node_of(pod) not in self._nodes.items:
                self._judge(tracked, pod)

    async def _look_at_node(self, tracked: TrackedPod, name: str) -> None:
        """● That a node is gone is asked for by name: a list may be older than the pod that was placed there."""
        try:
            self._nodes.learn(await self._api.get(f"{NODES}/{name}"))
            tracked.looked_for = ""
        except ClusterSilence:
            tracked.looked_for = ""  # it is asked for again with the next news of its pod, or of a list of nodes
            raise
        except ClusterRefusal as error:
            if error.code == 404:
                self._end(tracked, f"its node {name} is not there any more")
                await self._delete(tracked)

    def _judge(self, tracked: TrackedPod, pod: Json) -> None:
        """What a pod and its node say now."""
        node = node_of(pod)
        tracked.sees_node = not node or not self._cluster.nodes or node in self._nodes.items
        tracked.state = state_of(pod, self._nodes.items.get(node), self._cluster.taints, time.time())
        if node not in ("", tracked.looked_for, *self._nodes.items) and self._nodes.synced.is_set():
            tracked.looked_for = node
            self._write(f"look at node {node}", self._look_at_node(tracked, node))
        if tracked.state.end is not None:
            tracked.end = tracked.end or tracked.state.end
            if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
                self._write(f"end of {tracked.name}", self._delete(tracked))
        self._annotations.look(tracked)
        self._mark(tracked)

    def _end(self, tracked: TrackedPod, why: str) -> None:
        known = self._pods.items.get(tracked.name)
        same = known is not None and known["metadata"]["uid"] == tracked.uid
        tracked.end = tracked.end or (gone(known, why) if same and known else Exited(tracked.worker, None, why))
        self._mark(tracked)

    # ---- writing

    def _write(self, purpose: str, work: Awaitable[None]) -> None:
        async def run() -> None:
            try:
                await work
            except PeerError as error:
                log.warning("the cluster was not changed", purpose=purpose, error=str(error))

        task = guarded(purpose, run(), only_logged)
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _make(self, tracked: TrackedPod) -> None:
        def waits(wait: Waiting) -> None:
            tracked.refusal = wait
            self._mark(tracked)

        made = await self._writer.make(tracked, waits)
        tracked.refusal = None
        if made is None:
            return self._end(tracked, f"its pod {tracked.name} was never made")
        tracked.uid = made["metadata"]["uid"]
        self._pods.learn(made)
        known = self._pods.items.get(tracked.name)
        if known is None or known["metadata"]["uid"] != tracked.uid:
            return self._end(tracked, f"its pod {tracked.name} was deleted")
        self._judge(tracked, known)
        if tracked.is_killed:
            await self._delete(tracked)
        return None

    async def _delete(self, tracked: TrackedPod) -> None:
        """● Its end is told when the pod is gone or has ended, for until then its process may live."""
        pod = self._pods.items.get(tracked.name)
        if pod is None or pod["metadata"]["uid"] != tracked.uid:
            return self._end(tracked, f"its pod {tracked.name} was deleted")
        by_force = tracked.end is not None or not await self._node_answers(node_of(pod))
        if not await self._writer.delete(pod, by_force=by_force):
            self._pods.forget(tracked.name, pod)
        return None

    def _delete_old(self, pod: Json) -> None:
        """One whose end is of interest to nobody. It is asked for once, however often it is seen before it is gone."""
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]

        async def delete() -> None:
            try:
                await self._writer.delete(pod)
            except PeerError:
                self._leaving.pop(name, None)
                raise

        if self._leaving.get(name) != uid:
            self._leaving[name] = uid
            self._write(f"old pod {name}", delete())

    async def _node_answers(self, name: str) -> bool:
        """Whether a node is there to confirm that a pod has ended."""
        if not name or not self._cluster.nodes:
            return True
        node = self._nodes.items.get(name)
        conditions = (node or {}).get("status", {}).get("conditions") or ()
        return node is not None and all(one.get("status") == "True" for one in conditions if one.get("type") == "Ready")

    # ---- telling

    def _mark(self, tracked: TrackedPod) -> None:
        self._untold[tracked.name] = None
        self._news.set()

    async def _tell(self) -> None:
        """Tell the jobs, one thing at a time, in order; what a job could not hear is told again."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._untold:
                name = next(iter(self._untold))
                del self._untold[name]
                if (tracked := self._tracked.by_name.get(name)) is not None:
                    await self._tell_of(tracked)

    async def _tell_of(self, tracked: TrackedPod) -> None:
        while (news := tracked.news()) is not None and self._tracked.by_name.get(tracked.name) is tracked:
            try:
                for worker in tracked.workers:
                    await self._tell_one(tracked, replace(news, worker=worker))
            except StoreError as error:
                log.warning("a job was not told yet", job=tracked.spec.job, worker=tracked.worker, error=str(error))
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            tracked.was_told(news)
            if isinstance(news, Exited):
                self._tracked.remove(tracked)
                self._keep_few(tracked)

    async def _tell_one(self, tracked: TrackedPod, news: News) -> None:
        """Raises `StoreError` where the job cannot hear. What it was told already makes no difference then."""
        try:
            await self._submit(tracked.spec.job, tracked.spec.run, news)
        except StoreError:
            raise
        except ShoalError as error:
            log.info("a job does not know this worker", job=tracked.spec.job, error=str(error))

    def _keep_few(self, tracked: TrackedPod) -> None:
        """Delete the oldest ended pods of a job: their logs are no longer asked for."""
        ended = [
            pod
            for pod in self._by_job.of(tracked.spec.job)
            if pod.get("status", {}).get("phase") in ("Succeeded", "Failed") and not is_terminating(pod)
        ]
        ended.sort(key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
        for pod in ended[:-KEPT_PODS]:
            self._delete_old(pod)


class PodsByJob:
    """The pods of each job. Told of each pod that changes or goes."""

    def __init__(self) -> None:
        self._pods: dict[str, dict[str, Json]] = {}
        self._jobs: dict[str, str] = {}
        """By the name of the pod."""

    def note(self, name: str, pod: Json | None) -> None:
        """It is so now; None: it is gone."""
        before = self._jobs.pop(name, None)
        if before is not None:
            self._drop(before, name)
        if pod is not None:
            self._jobs[name] = job = str(pod["metadata"].get("labels", {}).get(JOB, ""))
            self._pods.setdefault(job, {})[name] = pod

    def of(self, job: str) -> Sequence[Json]:
        return list(self._pods.get(job, {}).values())

    def clear(self) -> None:
        self._pods.clear()
        self._jobs.clear()

    def _drop(self, job: str, name: str) -> None:
        del self._pods[job][name]
        if not self._pods[job]:
            del self._pods[job]


@asynccontextmanager
async def connected(cluster: ClusterOptions, asked: Asked = nobody_counts) -> AsyncIterator[ClusterApi]:
    """For as long as the context lasts. `asked` hears of all requests. Raises `UserError` where there is no cluster."""
    api = await ClusterApi.connect(cluster.kubeconfig, cluster.namespace, asked)
    try:
        yield api
    finally:
        await api.close()


@asynccontextmanager
async def kubernetes_launcher(
    api: ClusterApi, pods: PodOptions, cluster: ClusterOptions, submit: Submit
) -> AsyncIterator[KubernetesLauncher]:
    """For as long as the context lasts; its pods outlive it."""
    launcher = KubernetesLauncher(api, pods, cluster, submit)
    try:
        yield launcher
    finally:
        await launcher.release()
