"""Logs of workers in pods, asked of the cluster's API server, which asks the node's kubelet (right `pods/log`).

Nothing is kept here: a pod that is gone has taken its log along. Several workers of one pod have one log.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from shoal_protos.errors import NotFound, PeerError, ShoalError

from shoal_controller.core.machine.spec import WorkerView
from shoal_controller.launchers.kubernetes.cluster_api import FOLLOW, ClusterApi, ClusterRefusal, ClusterSilence
from shoal_controller.launchers.kubernetes.pod_manifest import CONTAINER
from shoal_controller.launchers.worker_logs import IsOver, LogTail

MOST_BYTES = 1 << 20
"""Most bytes that are asked for to show the end of a log."""
LINES = (1000, 60)
"""Lines from which the end is taken. A kubelet counts from their beginning: where they are more than `MOST_BYTES`, the
fewer are asked for, of which each has at most 16 KiB.
"""
WHOLE_BYTES = 64 << 20
"""Most bytes of a log that is not followed; a kubelet keeps 10 MiB by default."""
ANSWER_SECONDS = 10.0
"""How long the end of a log may take."""


class PodLogs:
    """A `WorkerLogs`."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api

    async def read(self, _: str, worker: WorkerView, count: int) -> LogTail:
        data = b""
        for lines in LINES:
            data = await self._lines(worker, lines, MOST_BYTES)
            if len(data) < MOST_BYTES:
                break
        is_whole = len(data) <= count and data.count(b"\n") < LINES[-1]
        return LogTail.cut(f"pod {worker.pod}", data[-count:], 0, is_known=is_whole)

    async def stream(self, _: str, worker: WorkerView, is_over: IsOver | None) -> AsyncGenerator[bytes]:
        await self._lines(worker, 1, 1)  # a follower of a pod that says nothing hears nothing, no refusal either
        return self._parts(worker, {FOLLOW: "true"} if is_over is not None else {"limitBytes": f"{WHOLE_BYTES}"})

    async def _lines(self, worker: WorkerView, lines: int, most: int) -> bytes:
        """Of the last `lines` lines the first `most` bytes."""
        found = []
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                async for part in self._parts(worker, {"tailLines": f"{lines}", "limitBytes": f"{most}"}):
                    found.append(part)
        except TimeoutError as error:
            raise PeerError(
                f"the log of {worker.worker} has not come from its pod {worker.pod} within {ANSWER_SECONDS:g} s: its "
                "node may be cut off; try again"
            ) from error
        return b"".join(found)[:most]

    async def _parts(self, worker: WorkerView, query: Mapping[str, str]) -> AsyncGenerator[bytes]:
        path = f"/api/v1/namespaces/{self._api.namespace}/pods/{worker.pod}/log"
        async with aclosing(self._api.text(path, {"container": CONTAINER, **query})) as parts:
            try:
                async for part in parts:
                    yield part
            except (ClusterRefusal, ClusterSilence) as error:
                raise _explained(worker, error) from error


def _explained(worker: WorkerView, error: ClusterRefusal | ClusterSilence) -> ShoalError:
    name, pod = worker.worker, worker.pod
    status = error.code if isinstance(error, ClusterRefusal) else 0
    if status == 404:
        return NotFound(
            f"the pod {pod} of {name} is gone, and its log with it; keep what pods print by a collector of logs"
        )
    if status == 403:
        return PeerError(
            f"this controller may not read the log of {name} in the pod {pod} ({error}); give its role the verb get of "
            "pods/log, as the chart's has it"
        )
    if status == 400:
        return NotFound(f"{name} has no log yet: {error}")
    return PeerError(f"the log of {name} cannot be read from its pod {pod}: {error}")
