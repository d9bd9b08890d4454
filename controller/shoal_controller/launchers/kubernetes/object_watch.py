"""A copy of some objects of the cluster: a list, and a watch from there on; listed again where the watch has a gap.

● What this process has written itself is in the copy at once (`learn`, `forget`), and an older sight of it does not
come back: nothing is decided on a list that is older than what was written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import structlog

from shoal_controller.launchers.kubernetes.cluster_api import ClusterApi, ClusterRefusal, ClusterSilence
from shoal_controller.launchers.kubernetes.section import Json

AGAIN_SECONDS = 1.0
"""After a failure, before it is listed or watched again."""
FORBIDDEN_SECONDS = 60.0
"""How often it is tried whether what is not allowed, or not there, is so now."""
FORGOTTEN = 10_000
"""How many uids of deleted objects are remembered."""

log = structlog.get_logger("shoal.kubernetes")

Changed = Callable[[str, Json | None], None]
"""Called with an object's name and what it is now; None: it is gone."""


class ObjectWatch:
    """Objects of one kind, by name. `run` as a task; `items` are right once `synced` is set."""

    def __init__(self, api: ClusterApi, path: str, selector: str, changed: Changed) -> None:
        self._api, self._path, self._selector, self._changed = api, path, selector, changed
        self.listed: Callable[[], None] = lambda: None
        """Called whenever all of them were listed."""
        self.explain: Callable[[Exception], str] = str
        """What to do about a failure, as a sentence."""
        self.items: dict[str, Json] = {}
        self.synced = asyncio.Event()
        self.trouble = ""
        """Why the copy may be old; empty while it is not."""
        self._gone: dict[str, None] = {}
        """Uids that are there no more."""

    async def run(self) -> None:
        """Until it is cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                version = await self._list()
                self.trouble = ""
                while True:
                    began = clock()
                    version = await self._follow(version)
                    await self._not_too_soon(began)
            except ClusterRefusal as error:
                if error.code == 410:
                    await self._not_too_soon(began)
                    continue
                await self._pause(error, FORBIDDEN_SECONDS if error.code in (401, 403, 404) else AGAIN_SECONDS)
            except ClusterSilence as error:
                await self._pause(error, AGAIN_SECONDS)

    async def _not_too_soon(self, began: float) -> None:
        """● Whoever ends each watch as soon as it has begun is not asked without end."""
        if asyncio.get_running_loop().time() - began < AGAIN_SECONDS:
            await asyncio.sleep(AGAIN_SECONDS)

    async def _pause(self, error: Exception, seconds: float) -> None:
        if (sentence := self.explain(error)) != self.trouble:
            log.warning("what the cluster has cannot be seen", path=self._path, error=sentence)
        self.trouble = sentence
        await asyncio.sleep(seconds)

    async def _list(self) -> str:
        items, version = await self._api.list(self._path, self._selector)
        there = {str(item["metadata"]["uid"]) for item in items}
        for name, known in list(self.items.items()):
            if known["metadata"]["uid"] not in there and not _is_younger(known, version):
                self.forget(name, known)
        for item in items:
            self.learn(item)
        self.synced.set()
        self.listed()
        return version

    async def _follow(self, version: str) -> str:
        """One watch; returns the version from which the next one goes on."""
        async with aclosing(self._api.watch(self._path, version, self._selector)) as news:
            async for one in news:
                version = str(one.item["metadata"].get("resourceVersion") or version)
                if one.kind == "DELETED":
                    self.forget(one.item["metadata"]["name"], one.item)
                elif one.kind in ("ADDED", "MODIFIED"):
                    self.learn(one.item)
        return version

    # ---- what is known

    def learn(self, item: Json) -> None:
        """This is how an object is, unless something newer of it is known."""
        metadata = item["metadata"]
        name, known = metadata["name"], self.items.get(metadata["name"])
        if metadata["uid"] in self._gone:
            return
        if known is not None and not _is_newer(item, known):
            return
        self.items[name] = item
        self._changed(name, item)

    def forget(self, name: str, item: Json) -> None:
        """This very object is gone."""
        uid = item["metadata"]["uid"]
        self._gone[uid] = None
        while len(self._gone) > FORGOTTEN:
            del self._gone[next(iter(self._gone))]
        known = self.items.get(name)
        if known is not None and known["metadata"]["uid"] == uid:
            del self.items[name]
            self._changed(name, None)


def _version(item: Json) -> int:
    """Versions are numbers of one series, which Kubernetes promises since 1.35; before, etcd's revisions are."""
    text = str(item["metadata"].get("resourceVersion") or "")
    return int(text) if text.isdecimal() else 0


def _is_newer(item: Json, known: Json) -> bool:
    return _version(item) > _version(known) or not _version(item)


def _is_younger(item: Json, version: str) -> bool:
    """Whether it was written after a list was made."""
    return version.isdecimal() and _version(item) > int(version)
