"""A copy of a cluster's objects: what is older never replaces what is known, and what is gone stays gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from asynchronous import asynchronous
from rule import Edit, holds, rule
from shoal_controller.launchers.kubernetes import cluster_api
from shoal_controller.launchers.kubernetes.cluster_api import ClusterRefusal, ObjectWatch, WatchNews
from tiers import check

pytestmark = check("serves the API of a cluster")


def item(version: int, uid: str = "u", name: str = "a", **fields: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": uid, "resourceVersion": str(version)}, **fields}


class Listed:
    """An API server that gives one list."""

    def __init__(self, version: int, *items: dict[str, Any]) -> None:
        self.answer = list(items), str(version)

    async def list(self, path: str, selector: str) -> tuple[list[dict[str, Any]], str]:
        return self.answer


class Hasty(Listed):
    """One that ends each watch at once, or says that its version is too old."""

    def __init__(self, refuses: bool) -> None:
        super().__init__(1)
        self.refuses, self.watches = refuses, 0

    async def watch(self, path: str, version: str, selector: str) -> AsyncGenerator[WatchNews]:
        self.watches += 1
        await asyncio.sleep(0)  # as a real one lets the loop turn: a watch without end must not outlive its time
        if self.refuses:
            raise ClusterRefusal(410, "Expired", "too old resource version")
        if self.watches < 0:
            yield WatchNews("BOOKMARK", {})


def copy(api: Any = None) -> tuple[ObjectWatch, list[tuple[str, str]]]:
    seen: list[tuple[str, str]] = []
    watch = ObjectWatch(
        api, "/pods", "", lambda name, one: seen.append((name, one["metadata"]["resourceVersion"] if one else "gone"))
    )
    return watch, seen


@rule(
    "Of a cluster's objects an older sight never replaces a newer one, nor what this process has written or seen "
    "deleted since",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.launchers.kubernetes.cluster_api",
            "        if known is not None and not _is_newer(item, known):\n            return\n",
            "",
        ),
        Edit(
            "shoal_controller.launchers.kubernetes.cluster_api",
            '        if metadata["uid"] in self._gone:\n            return\n',
            "",
        ),
        Edit(
            "shoal_controller.launchers.kubernetes.cluster_api",
            " not in there and not _is_younger(known, version):",
            " not in there:",
        ),
    ],
)
def test_an_older_or_equal_sight_of_an_object_changes_nothing() -> None:
    watch, seen = copy()
    watch.learn(item(5))
    watch.learn(item(4))
    watch.learn(item(5))
    watch.learn(item(4, uid="before"))
    assert seen == [("a", "5")]
    watch.learn(item(6))
    watch.learn(item(7, uid="v"))
    assert seen == [("a", "5"), ("a", "6"), ("a", "7")]


@holds("Of a cluster's objects an")
def test_what_is_gone_does_not_come_back_in_news_that_are_late() -> None:
    watch, seen = copy()
    watch.learn(item(5))
    watch.forget("a", item(6))
    watch.learn(item(5))
    assert watch.items == {} and seen == [("a", "5"), ("a", "gone")]
    watch.learn(item(7, uid="v"))
    watch.forget("a", item(6))
    assert watch.items["a"]["metadata"]["uid"] == "v", "another one has the name by now"


@holds("Of a cluster's objects an")
def test_a_list_that_is_older_than_what_was_written_takes_nothing_away() -> None:
    watch, seen = copy(Listed(6, item(3, uid="w", name="b")))
    watch.learn(item(5, name="old", uid="o"))
    watch.learn(item(7))
    asyncio.run(watch._list())
    assert sorted(watch.items) == ["a", "b"] and ("old", "gone") in seen and ("a", "gone") not in seen


@rule(
    "A server that ends each watch as soon as it has begun is not asked without end, and a node that nobody "
    "could be asked for is asked for again",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.launchers.kubernetes.cluster_api",
            "time() - began < AGAIN_SECONDS:",
            "time() - began < 0:",
        ),
        Edit(
            "shoal_controller.launchers.kubernetes.pod_launcher",
            '            tracked.looked_for = ""  # it is',
            "            tracked.looked_for = name  # it is",
        ),
    ],
)
@pytest.mark.parametrize("refuses", [False, True])
@asynchronous
async def test_a_server_that_ends_each_watch_at_once_is_not_asked_without_end(
    monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    monkeypatch.setattr(cluster_api, "AGAIN_SECONDS", 0.05)
    api = Hasty(refuses)
    watch, _ = copy(api)
    loop = asyncio.get_running_loop()
    began, running = loop.time(), asyncio.create_task(watch.run())
    while api.watches < 4:  # noqa: ASYNC110 (it has no event for it)
        await asyncio.sleep(0)
    assert loop.time() - began >= 3 * 0.05
    running.cancel()
    await asyncio.wait([running])
