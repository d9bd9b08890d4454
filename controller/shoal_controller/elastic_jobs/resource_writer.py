"""The writes of a controller to an ElasticJob: its finalizer, status, size and cluster events.

Every patch names the uid that it is meant for. If the resource was deleted and made again, the cluster answers 409; the
caller then reads again and decides anew.

`EventBursts`, which is pure, chooses the events of a job that the cluster is sent: the first of a kind at once, those
within the pause that follows as one event, with their count and the last sentence. The pause doubles while the storm
lasts, so a hundred kills make a handful of events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog
from shoal_protos.acts import Scale

from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.launchers.kubernetes.cluster_api import ClusterApi, ClusterRefusal, ClusterSilence
from shoal_controller.launchers.kubernetes.pod_manifest import pods_of, pods_path
from shoal_controller.launchers.kubernetes.pod_state import node_of
from shoal_controller.launchers.kubernetes.resource_kind import (
    API_VERSION,
    FINALIZER,
    KIND,
    REPORTER,
    resources_path,
    uid_of,
)
from shoal_controller.launchers.kubernetes.section import Json

LONGEST_NOTE = 1000
"""Characters of an event; Kubernetes takes 1 KiB."""
LIVE_PHASES = ("Pending", "Running")

log = structlog.get_logger("shoal.elastic_jobs")


class ResourceWriter:
    """The writes to the resources of one namespace."""

    def __init__(self, api: ClusterApi, instance: str) -> None:
        """`instance`: this controller, as events name it."""
        self._api, self._instance = api, instance
        self.resources = resources_path(api.namespace)
        self._events = f"/apis/events.k8s.io/v1/namespaces/{api.namespace}/events"
        self._pods = pods_path(api.namespace)
        self._event_trouble = ""

    async def read(self, name: str) -> Json | None:
        """As it is now; None: there is none."""
        try:
            return await self._api.get(f"{self.resources}/{name}")
        except ClusterRefusal as error:
            if error.code == 404:
                return None
            raise

    async def add_finalizer(self, item: Mapping[str, Any]) -> Json:
        return await self._set_finalizers(item, [*(item["metadata"].get("finalizers") or ()), FINALIZER])

    async def remove_finalizer(self, item: Mapping[str, Any]) -> Json | None:
        """The resource goes with it, if that was the last one."""
        others = [one for one in item["metadata"].get("finalizers") or () if one != FINALIZER]
        try:
            return await self._set_finalizers(item, others)
        except ClusterRefusal as error:
            if error.code == 404:
                return None
            raise

    async def _set_finalizers(self, item: Mapping[str, Any], finalizers: list[str]) -> Json:
        """● A list is replaced whole, so the version that it was read from must be the present one."""
        metadata = item["metadata"]
        written = {"uid": uid_of(item), "resourceVersion": metadata["resourceVersion"], "finalizers": finalizers}
        return await self._api.patch(f"{self.resources}/{metadata['name']}", {"metadata": written})

    async def patch_status(self, item: Mapping[str, Any], patch: Json) -> Json:
        name = item["metadata"]["name"]
        body = {"metadata": {"uid": uid_of(item)}, "status": patch}
        return await self._api.patch(f"{self.resources}/{name}/status", body)

    async def write_size(self, item: Mapping[str, Any], asked: Scale) -> Json:
        """What `kubectl scale` writes, and the bounds where they are asked for."""
        numbers = {"wanted": asked.workers, "min": asked.least, "max": asked.most, "spares": asked.spares}
        workers = {name: number for name, number in numbers.items() if number is not None}
        body = {"metadata": {"uid": uid_of(item)}, "spec": {"workers": workers}}
        return await self._api.patch(f"{self.resources}/{item['metadata']['name']}", body)

    async def pods_left(self, job: str) -> tuple[int, int]:
        """How many of a job's pods are there, and how many of them have not ended. One without a node runs nothing."""
        pods, _ = await self._api.list(self._pods, pods_of(job))
        live = [pod for pod in pods if pod.get("status", {}).get("phase", "Pending") in LIVE_PHASES]
        running = [pod for pod in live if node_of(pod)]
        return len(pods), len(running)

    # ---- events

    async def tell(self, item: Mapping[str, Any], event: ClusterEvent) -> None:
        """● One that is there already was told by an earlier controller. An event that cannot be written holds up
        nothing: the job's own history has it.
        """
        try:
            await self._api.create(self._events, self._event(item, event))
        except (ClusterRefusal, ClusterSilence) as error:
            if isinstance(error, ClusterRefusal) and error.why == "AlreadyExists":
                return
            if str(error) != self._event_trouble:
                log.warning("an event of a resource was not written", error=str(error))
            self._event_trouble = str(error)

    def _event(self, item: Mapping[str, Any], event: ClusterEvent) -> Json:
        metadata = item["metadata"]
        namespace = self._api.namespace
        regarding = {
            "apiVersion": API_VERSION, "kind": KIND, "name": metadata["name"], "namespace": namespace,
            "uid": uid_of(item),
        }  # fmt: skip
        name = f"{metadata['name']}.{uid_of(item)[-12:]}.{event.reason.lower()}.{event.number}"
        return {
            "apiVersion": "events.k8s.io/v1", "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "eventTime": datetime.fromtimestamp(event.time, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": REPORTER, "reportingInstance": self._instance,
            "action": event.reason, "reason": event.reason, "type": event.severity,
            "note": event.sentence[:LONGEST_NOTE], "regarding": regarding,
        }  # fmt: skip


FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 10.0, 300.0

NORMAL, WARNING = "Normal", "Warning"

KINDS: Mapping[str, tuple[str, str]] = {
    EventKind.RESIZED: ("Resized", NORMAL),
    EventKind.SCALED: ("Scaled", NORMAL),
    EventKind.LOST: ("WorkerLost", WARNING),
    EventKind.DRAINING: ("Draining", NORMAL),
    EventKind.PARTING: ("Draining", NORMAL),
    EventKind.STALLED: ("Stalled", WARNING),
    EventKind.ANEW: ("StartedAnew", WARNING),
    EventKind.CHECKPOINT_SAVED: ("Saved", NORMAL),
    EventKind.CHECKPOINT_FAILED: ("SaveFailed", WARNING),
    EventKind.REFUSED: ("Refused", WARNING),
    EventKind.SUCCEEDED: ("Succeeded", NORMAL),
    EventKind.FAILED: ("Failed", WARNING),
    EventKind.CANCELLED: ("Cancelled", NORMAL),
}
"""Kinds of a job's history that the cluster is told, with Kubernetes' reason and type. The rest is in REST."""


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """One event as the cluster gets it."""

    reason: str
    severity: str
    sentence: str
    number: int
    """Of the job's event that it tells, or ends with: makes its name."""
    time: float


@dataclass(slots=True)
class _Burst:
    until: float
    pause: float
    count: int = 0
    last: ClusterEvent | None = None


class EventBursts:
    """The cluster events of one resource. The time is passed in, and never goes back."""

    def __init__(self) -> None:
        self._bursts: dict[str, _Burst] = {}

    def put(self, event: ClusterEvent, now: float) -> ClusterEvent | None:
        """What goes out at once; None: it waits for others."""
        burst = self._bursts.get(event.reason)
        if burst is None:
            self._bursts[event.reason] = _Burst(now + FIRST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS)
            return event
        burst.count, burst.last = burst.count + 1, event
        return None

    def take_due(self, now: float, *, all_of_them: bool = False) -> list[ClusterEvent]:
        """What has waited long enough."""
        due: list[ClusterEvent] = []
        for reason, burst in list(self._bursts.items()):
            if now < burst.until and not (all_of_them and burst.count):
                continue
            if burst.last is None:
                del self._bursts[reason]
                continue
            due.append(_counted(burst.last, burst.count))
            burst.pause = min(2 * burst.pause, LONGEST_PAUSE_SECONDS)
            burst.until, burst.count, burst.last = now + burst.pause, 0, None
        return due


def _counted(last: ClusterEvent, count: int) -> ClusterEvent:
    if count == 1:
        return last
    sentence = f"{count} times since the last event of this kind; the last: {last.sentence}"
    return ClusterEvent(last.reason, last.severity, sentence, last.number, last.time)
