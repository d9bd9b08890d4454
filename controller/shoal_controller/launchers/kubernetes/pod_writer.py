"""Makes and deletes pods, so many at a time, and what a job has once: the secret with its token, and its PodGroup.

● An answer that was lost may have made the pod: one that exists is looked at, and is ours where job, run and worker
are.
What the cluster refuses is no exception here but what a worker waits for: a quota may be raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from shoal_controller.core.machine.events import Waiting
from shoal_controller.core.machine.pending import PendingReason
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.kubernetes.cluster_api import ClusterApi, ClusterRefusal, ClusterSilence
from shoal_controller.launchers.kubernetes.gang import VOLCANO_GROUP, pod_group, pod_group_name, pod_groups_path
from shoal_controller.launchers.kubernetes.job_defaults import section_of
from shoal_controller.launchers.kubernetes.pod_manifest import (
    JOB,
    RUN,
    WORKER,
    PodTerms,
    labels_of,
    owners,
    pod,
    pods_path,
    run_label,
    secret,
    secret_name,
)
from shoal_controller.launchers.kubernetes.pod_state import is_terminating
from shoal_controller.launchers.kubernetes.section import Json, PodOptions
from shoal_controller.launchers.kubernetes.tracked_pod import TrackedPod

AT_A_TIME = 20
"""Pods that are made at the same time, and so many that are deleted: what is slow to be made delays no end."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 20.0
"""Before a pod that could not be made is tried again."""
NAME_FREE_SECONDS = 1.0
"""How often it is looked whether a name is free that a pod of another run still has."""
CONFLICTS, FIRST_CONFLICT_SECONDS = 6, 0.05
"""How often a deletion is tried that meets a conflict, and the first pause; each further one is twice as long."""
MOMENT = {"gracePeriodSeconds": 1}
"""● The kubelet confirms the end: with no grace at all the name is free while the process still runs."""
BY_FORCE = {"gracePeriodSeconds": 0}

QUOTA_WORDS = ("exceeded quota", "status unknown for quota")
"""Of refusals that pass: a quota may be raised, and one that was just made is counted in a moment."""

_Belonging = tuple[str, str, str]
"""Job, run, and the path of the kind."""

log = structlog.get_logger("shoal.kubernetes")


class PodWriter:
    """Whatever is written to the cluster."""

    def __init__(self, api: ClusterApi, options: PodOptions) -> None:
        self._api, self._options = api, options
        self._makes, self._deletions = asyncio.Semaphore(AT_A_TIME), asyncio.Semaphore(AT_A_TIME)
        self._writing: dict[_Belonging, asyncio.Lock] = {}
        self._written: set[_Belonging] = set()
        """What is there."""
        self._under_way: dict[asyncio.Event, str] = {}
        """Attempts to make a pod, with their jobs; each event is set when its attempt is over."""

    @property
    def pods(self) -> str:
        """The path of all pods."""
        return pods_path(self._api.namespace)

    @property
    def secrets(self) -> str:
        return f"/api/v1/namespaces/{self._api.namespace}/secrets"

    # ---- making

    async def make(self, tracked: TrackedPod, waits: Callable[[Waiting], None]) -> Json | None:
        """Make a worker's pod, whenever that is possible; None: it was told to end first. `waits` hears what for."""
        pause = FIRST_PAUSE_SECONDS
        while not tracked.is_killed:
            async with self._makes:
                if tracked.is_killed:
                    return None
                over = asyncio.Event()
                self._under_way[over] = tracked.spec.job
                try:
                    return await self._made(tracked)
                except _NameTaken as error:
                    waits(Waiting(tracked.worker, PendingReason.REFUSED, str(error), hopeless=not error.passes))
                    pause = NAME_FREE_SECONDS
                except _GangRefused as error:
                    waits(Waiting(tracked.worker, PendingReason.REFUSED, str(error), hopeless=True))
                except ClusterRefusal as error:
                    waits(_wait_of(error, tracked, self._api.namespace))
                except ClusterSilence as error:
                    waits(Waiting(tracked.worker, PendingReason.CLUSTER, str(error)))
                finally:
                    del self._under_way[over]
                    over.set()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return None

    def release(self) -> None:
        """What is there is others' to write now."""
        self._written.clear()
        self._writing.clear()

    async def settle(self, job: str) -> None:
        """● Wait for what is under way: a secret that is made after the job's was deleted would stay for ever."""
        for over in [event for event, name in self._under_way.items() if name == job]:
            await over.wait()

    async def _made(self, tracked: TrackedPod) -> Json:
        spec = tracked.spec
        terms = PodTerms(spec, section_of(spec), self._options.controllers(), self._options.tokens is not None)
        await self._ensure_secret(spec)
        await self._ensure_pod_group(terms)
        try:
            return await self._api.create(self.pods, pod(tracked.worker, terms))
        except ClusterRefusal as error:
            if error.why != "AlreadyExists":
                raise
        return await self._own(tracked)

    async def _own(self, tracked: TrackedPod) -> Json:
        """The pod that has the name already: made by us, with an answer that was lost; or it is in the way."""
        try:
            found = await self._api.get(f"{self.pods}/{tracked.name}")
        except ClusterRefusal as error:
            if error.code == 404:  # it has just gone
                raise _NameTaken(tracked, passes=True) from error
            raise
        labels = found["metadata"].get("labels") or {}
        if labels.get(JOB) != tracked.spec.job or labels.get(WORKER) != tracked.worker:
            raise _NameTaken(tracked, passes=is_terminating(found))
        if labels.get(RUN) != run_label(tracked.spec.run) or is_terminating(found):
            await self.delete(found)
            raise _NameTaken(tracked, passes=True)
        return found

    async def _ensure_secret(self, spec: JobSpec) -> None:
        if self._options.tokens is not None:
            wanted = secret(spec, self._options.tokens.join(spec.job, spec.run))
            await self._ensure(spec, self.secrets, wanted, "stringData")

    async def _ensure_pod_group(self, terms: PodTerms) -> None:
        """Before the first pod: Volcano places no pod whose PodGroup it does not find."""
        if terms.section.gang == "volcano":
            wanted = pod_group(terms.spec, terms.section, {"labels": labels_of(terms.spec), **owners(terms.spec)})
            try:
                await self._ensure(terms.spec, pod_groups_path(self._api.namespace), wanted, "spec")
            except ClusterRefusal as error:
                raise _GangRefused(terms.spec, self._api.namespace, error) from error

    async def _ensure(self, spec: JobSpec, path: str, wanted: Json, part: str) -> None:
        """Written once in a term; another run's is replaced. It is never read."""
        key = spec.job, spec.run, path
        async with self._writing.setdefault(key, asyncio.Lock()):
            if key in self._written:
                return
            metadata = {"labels": labels_of(spec), "ownerReferences": None, **owners(spec)}
            await self._put(path, wanted, {"metadata": metadata, part: wanted[part]})
            self._written.add(key)

    async def _put(self, path: str, wanted: Json, change: Json) -> None:
        """● One that exists may go before it is changed: a cluster collects what an owner that is gone has left."""
        try:
            await self._api.create(path, wanted)
            return
        except ClusterRefusal as error:
            if error.why != "AlreadyExists":
                raise
        try:
            await self._api.patch(f"{path}/{wanted['metadata']['name']}", change)
        except ClusterRefusal as error:
            if error.code != 404:
                raise
            await self._api.create(path, wanted)

    # ---- deleting

    async def delete(self, found: Json, *, by_force: bool = False) -> bool:
        """End this very pod; returns whether it was there. Raises `ClusterRefusal` and `ClusterSilence`.

        ● A conflict says that another pod has its name, or only that somebody has written: it is looked which.
        """
        name, uid = found["metadata"]["name"], found["metadata"]["uid"]
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        path, pause = f"{self.pods}/{name}", FIRST_CONFLICT_SECONDS
        for _ in range(CONFLICTS):
            try:
                async with self._deletions:
                    await self._api.delete(path, options | (BY_FORCE if by_force else MOMENT))
                return True
            except ClusterRefusal as error:
                if error.code == 404:
                    return False
                if error.code != 409:
                    raise
            if await self._uid_of(path) != uid:
                return False
            await asyncio.sleep(pause)
            pause *= 2
        raise ClusterSilence(f"the pod {name} was not deleted: others have written it {CONFLICTS} times meanwhile")

    async def _uid_of(self, path: str) -> str:
        """Of the pod that has this name now; empty where there is none."""
        try:
            return str((await self._api.get(path))["metadata"]["uid"])
        except ClusterRefusal as error:
            if error.code == 404:
                return ""
            raise

    async def delete_belongings(self, job: str) -> None:
        """What a job has once. Whether it had a PodGroup is not known any more; a cluster without Volcano has none."""
        groups = pod_groups_path(self._api.namespace)
        for path, harmless in (
            (f"{self.secrets}/{secret_name(job)}", (404,)),
            (f"{groups}/{pod_group_name(job)}", (403, 404)),
        ):
            try:
                await self._api.delete(path, {"apiVersion": "v1", "kind": "DeleteOptions"})
            except ClusterRefusal as error:
                if error.code not in harmless:
                    raise
        self._written = {key for key in self._written if key[0] != job}
        self._writing = {key: lock for key, lock in self._writing.items() if key[0] != job}


class _NameTaken(Exception):
    """Another pod has the worker's name. `passes`: it is on its way out."""

    def __init__(self, tracked: TrackedPod, *, passes: bool) -> None:
        state = "is ending" if passes else f"is not one of job {tracked.spec.job}; delete it or name the job otherwise"
        super().__init__(f"the pod {tracked.name}, which has this worker's name, {state}")
        self.passes = passes


class _GangRefused(Exception):
    """The cluster makes no PodGroup."""

    def __init__(self, spec: JobSpec, namespace: str, error: ClusterRefusal) -> None:
        wants = f"`kubernetes.gang` of job {spec.job} is volcano, but"
        if error.code == 404 and f'namespaces "{namespace}"' not in str(error):
            why = f"the cluster has no podgroups.{VOLCANO_GROUP}; install Volcano in it, or leave `gang` out"
        elif _lacks_rights(error):
            why = f"the controller may not make its PodGroup: {error}. Set `rbac.volcano` of the chart to true"
        else:
            why = f"the cluster refuses its PodGroup in namespace {namespace}: {error}"
        super().__init__(f"{wants} {why}")


def _lacks_rights(error: ClusterRefusal) -> bool:
    """Other refusals with this status are of policies: quotas, pod security, webhooks."""
    return error.code == 403 and 'User "' in str(error) and " cannot " in str(error)


def _wait_of(error: ClusterRefusal, tracked: TrackedPod, namespace: str) -> Waiting:
    """What a refusal to make a pod means for its worker."""
    worker, job = tracked.worker, tracked.spec.job
    if error.code == 403 and any(words in str(error) for words in QUOTA_WORDS):
        return Waiting(worker, PendingReason.QUOTA, str(error))
    if _lacks_rights(error):
        sentence = (
            f"the controller may not do this in namespace {namespace}: {error}. Give its service account the rights"
        )
        return Waiting(worker, PendingReason.REFUSED, sentence, hopeless=True)
    if error.code == 404:
        sentence = f"namespace {namespace} cannot be used: {error}"
        return Waiting(worker, PendingReason.REFUSED, sentence, hopeless=True)
    if error.code in (400, 403, 405, 409, 413, 422):
        again = error.code == 409
        return Waiting(worker, PendingReason.REFUSED, f"the cluster refuses the pod of job {job}: {error}", not again)
    return Waiting(worker, PendingReason.CLUSTER, f"the cluster answers {error.code}: {error}")
