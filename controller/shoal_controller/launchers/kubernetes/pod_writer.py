"""Makes and deletes pods, so many at a time, and the secrets with their jobs' tokens.

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
from shoal_controller.launchers.kubernetes.options import PodOptions
from shoal_controller.launchers.kubernetes.pod_manifest import (
    JOB,
    RUN,
    WORKER,
    PodTerms,
    labels_of,
    owners,
    pod,
    run_label,
    secret,
    secret_name,
    section_of,
)
from shoal_controller.launchers.kubernetes.pod_state import is_terminating
from shoal_controller.launchers.kubernetes.section import Json
from shoal_controller.launchers.kubernetes.tracked_pod import TrackedPod

AT_A_TIME = 20
"""Pods that are made or deleted at the same time."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 20.0
"""Before a pod that could not be made is tried again."""
NAME_FREE_SECONDS = 1.0
"""How often it is looked whether a name is free that a pod of another run still has."""
MOMENT = {"gracePeriodSeconds": 1}
"""● The kubelet confirms the end: with no grace at all the name is free while the process still runs."""
BY_FORCE = {"gracePeriodSeconds": 0}

log = structlog.get_logger("shoal.kubernetes")


class PodWriter:
    """Whatever is written to the cluster."""

    def __init__(self, api: ClusterApi, options: PodOptions) -> None:
        self._api, self._options = api, options
        self._turns = asyncio.Semaphore(AT_A_TIME)
        self._secrets: dict[tuple[str, str], asyncio.Lock] = {}
        self._written: set[tuple[str, str]] = set()
        """Jobs and runs whose secret is there."""

    @property
    def pods(self) -> str:
        """The path of all pods."""
        return f"/api/v1/namespaces/{self._api.namespace}/pods"

    @property
    def secrets(self) -> str:
        return f"/api/v1/namespaces/{self._api.namespace}/secrets"

    # ---- making

    async def make(self, tracked: TrackedPod, waits: Callable[[Waiting], None]) -> Json | None:
        """Make a worker's pod, whenever that is possible; None: it was told to end first. `waits` hears what for."""
        pause = FIRST_PAUSE_SECONDS
        while not tracked.is_killed:
            async with self._turns:
                if tracked.is_killed:
                    return None
                try:
                    return await self._made(tracked)
                except _NameTaken as error:
                    waits(Waiting(tracked.worker, PendingReason.REFUSED, str(error), hopeless=not error.passes))
                    pause = NAME_FREE_SECONDS
                except ClusterRefusal as error:
                    waits(_wait_of(error, tracked, self._api.namespace))
                except ClusterSilence as error:
                    waits(Waiting(tracked.worker, PendingReason.CLUSTER, str(error)))
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return None

    async def _made(self, tracked: TrackedPod) -> Json:
        spec = tracked.spec
        terms = PodTerms(spec, section_of(spec), self._options.controllers(), self._options.tokens is not None)
        await self._ensure_secret(spec)
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
        """Written once in a controller's life; another run's is replaced. It is never read."""
        run = spec.job, spec.run
        if self._options.tokens is None or run in self._written:
            return
        async with self._secrets.setdefault(run, asyncio.Lock()):
            if run in self._written:
                return
            wanted = secret(spec, self._options.tokens.join(spec.job, spec.run))
            try:
                await self._api.create(self.secrets, wanted)
            except ClusterRefusal as error:
                if error.why != "AlreadyExists":
                    raise
                metadata = {"labels": labels_of(spec), "ownerReferences": None, **owners(spec)}
                changed = {"metadata": metadata, "stringData": wanted["stringData"]}
                await self._api.patch(f"{self.secrets}/{secret_name(spec.job)}", changed)
            self._written.add(run)

    # ---- deleting

    async def delete(self, found: Json, *, by_force: bool = False) -> bool:
        """End this very pod; returns whether it was there. Raises `ClusterRefusal` and `ClusterSilence`."""
        name, uid = found["metadata"]["name"], found["metadata"]["uid"]
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        try:
            await self._api.delete(f"{self.pods}/{name}", options | (BY_FORCE if by_force else MOMENT))
        except ClusterRefusal as error:
            if error.code in (404, 409):  # it is gone, or another one has its name
                return False
            raise
        return True

    async def delete_secret(self, job: str) -> None:
        try:
            await self._api.delete(f"{self.secrets}/{secret_name(job)}", {"apiVersion": "v1", "kind": "DeleteOptions"})
        except ClusterRefusal as error:
            if error.code != 404:
                raise
        self._written = {run for run in self._written if run[0] != job}

    async def in_turn(self, found: Json) -> None:
        """Delete it when others leave room."""
        async with self._turns:
            await self.delete(found)


class _NameTaken(Exception):
    """Another pod has the worker's name. `passes`: it is on its way out."""

    def __init__(self, tracked: TrackedPod, *, passes: bool) -> None:
        state = "is ending" if passes else f"is not one of job {tracked.spec.job}; delete it or name the job otherwise"
        super().__init__(f"the pod {tracked.name}, which has this worker's name, {state}")
        self.passes = passes


def _wait_of(error: ClusterRefusal, tracked: TrackedPod, namespace: str) -> Waiting:
    """What a refusal to make a pod means for its worker."""
    worker, job = tracked.worker, tracked.spec.job
    if error.code == 403 and "exceeded quota" in str(error):
        return Waiting(worker, PendingReason.QUOTA, str(error))
    if error.code == 403:
        sentence = (
            f"the controller may not do this in namespace {namespace}: {error}. Give its service account the rights"
        )
        return Waiting(worker, PendingReason.REFUSED, sentence, hopeless=True)
    if error.code == 404:
        sentence = f"namespace {namespace} cannot be used: {error}"
        return Waiting(worker, PendingReason.REFUSED, sentence, hopeless=True)
    if error.code in (400, 405, 409, 413, 422):
        again = error.code == 409
        return Waiting(worker, PendingReason.REFUSED, f"the cluster refuses the pod of job {job}: {error}", not again)
    return Waiting(worker, PendingReason.CLUSTER, f"the cluster answers {error.code}: {error}")
