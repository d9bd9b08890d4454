"""Stands between a test's controller and a real cluster, and fails where the test says so: the tests that are written
for the API server in this process (`api_server.py`) run unchanged against the cluster that `make cluster` names.

The cluster's objects are shown as that server shows them, by watches of their own that no fault meets.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

import aiohttp
from aiohttp import web
from api_faults import ApiFaults, Json, status_of
from api_server import EVENTS, PODS, RESOURCES
from cluster_choice import NAMESPACE, REAL
from shoal_controller.launchers.kubernetes.cluster_api import ClusterApi, ClusterRefusal, ObjectWatch
from shoal_controller.launchers.kubernetes.pod_launcher import connected
from shoal_controller.launchers.kubernetes.section import ClusterOptions

SHOWN = (RESOURCES, EVENTS, PODS)
EMPTY_SECONDS = 100


class ClusterProxy(ApiFaults):
    """See the module's text."""

    def __init__(self, api: ClusterApi, objects: Mapping[str, dict[str, Json]]) -> None:
        super().__init__()
        self._api, self.objects = api, objects
        self._is_compacted = False
        self._sources: set[aiohttp.ClientResponse] = set()
        """What the cluster tells the watches."""

    def compact(self) -> None:
        """The next watch cannot go on from where it was."""
        self._is_compacted = True

    def break_watches(self) -> None:
        super().break_watches()
        for source in self._sources:
            source.close()

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        given = await request.read()
        body = self.thinned(request.path, json.loads(given)) if given else None
        kind = request.content_type if given else "application/json"
        if request.query.get("watch") and self._is_compacted:
            self._is_compacted = False
            return await self._too_old(request)
        answer = await self._api._send(request.method, request.path, body, dict(request.query), kind)
        async with answer:
            if request.query.get("watch") and answer.status == 200:
                return await self._watched(request, answer)
            return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")

    async def _too_old(self, request: web.Request) -> web.StreamResponse:
        line = {"type": "ERROR", "object": status_of(410, "Expired", "too old resource version")}
        return web.Response(text=json.dumps(line) + "\n", content_type="application/json")

    async def _watched(self, request: web.Request, source: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self._watches.add(response)
        self._sources.add(source)
        rest = b""
        try:
            with suppress(ConnectionError, aiohttp.ClientError):
                async for part in source.content.iter_any():
                    *lines, rest = (rest + part).split(b"\n")
                    for line in reversed(lines) if self.reverses else lines:
                        await response.write((line + b"\n") * (1 + self.doubles))
        finally:
            self._watches.discard(response)
            self._sources.discard(source)
        return response


@asynccontextmanager
async def before_the_cluster() -> AsyncIterator[ClusterProxy]:
    """Before the one that is named, in its namespace, which is empty then."""
    async with connected(ClusterOptions(REAL, NAMESPACE)) as api:
        await _empty(api)
        copies = {path: ObjectWatch(api, path, "", lambda name, item: None) for path in SHOWN}
        tasks = [asyncio.create_task(copy.run()) for copy in copies.values()]
        try:
            async with asyncio.timeout(EMPTY_SECONDS):
                await asyncio.gather(*(copy.synced.wait() for copy in copies.values()))
            yield ClusterProxy(api, {path: copy.items for path, copy in copies.items()})
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await _empty(api)


async def _empty(api: ClusterApi) -> None:
    for path in SHOWN:
        for item in (await api.list(path))[0]:
            place = f"{path}/{item['metadata']['name']}"
            with suppress(ClusterRefusal):  # gone meanwhile
                if item["metadata"].get("finalizers"):
                    await api.patch(place, {"metadata": {"finalizers": None}})
                await api.delete(place, {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0})
    for _ in range(10 * EMPTY_SECONDS):
        if not (await api.list(RESOURCES))[0]:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"resources of an earlier test are left in the namespace {NAMESPACE}")
