"""A cluster whose pods are real processes, in a thread of its own, for tests that do not await. The API server is the
one in this process, or by `make cluster NODES=fake` that of a cluster.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from api_faults import ApiFaults, served
from api_server import FakeCluster, kubeconfig
from cluster_choice import FAKE_NODES
from cluster_proxy import before_the_cluster
from far_cluster import far_cluster
from kubelet import Kubelets, Start
from ports import free_port

Answer = TypeVar("Answer")
START_SECONDS = 100.0


class PodCluster:
    """What a test does to it is done in its own thread, by `do`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, cluster: FakeCluster, kubelets: Kubelets, url: str, file: Path
    ) -> None:
        self._loop, self.cluster, self.kubelets = loop, cluster, kubelets
        self.url, self.kubeconfig = url, file

    def do(self, act: Callable[[], Answer]) -> Answer:
        """Carry it out there; returns what it returns."""

        async def run() -> Answer:
            return act()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(START_SECONDS)

    def node(self, name: str, *taints: str, **spec: Any) -> None:
        self.do(lambda: self.cluster.node(name, *taints, **spec))

    def pod(self, worker: str) -> dict[str, Any]:
        """Of the test's only job; empty where there is none."""
        return dict(self.cluster.pods().get(f"job-{worker}", {}))

    def silence(self, node: str, *, ends: bool = False) -> None:
        """A node's kubelet says and does nothing any more; `ends`: it is back."""
        silent = self.kubelets.silent
        self.do(lambda: silent.discard(node) if ends else silent.add(node))

    def lose_node(self, name: str, path: str) -> None:
        """A node is gone, with all that ran on it."""

        def lose() -> None:
            self.kubelets.silent.add(name)
            for pod in self.cluster.pods().values():
                process = self.kubelets.processes.get(pod["metadata"]["uid"])
                if pod["spec"].get("nodeName") == name and process is not None:
                    os.killpg(process.pid, signal.SIGKILL)
            self.cluster.remove(path, name)

        self.do(lose)


@contextmanager
def pod_cluster(folder: Path, start: Start, *nodes: str, kind: type[FakeCluster] = FakeCluster) -> Iterator[PodCluster]:
    """With these nodes, one pod each, and a kubeconfig in the folder."""
    made: list[PodCluster] = []
    ready, end = threading.Event(), asyncio.Event()

    async def live() -> None:
        async with AsyncExitStack() as ends:
            if FAKE_NODES:
                front: ApiFaults = await ends.enter_async_context(before_the_cluster())
                cluster: Any = await ends.enter_async_context(far_cluster(front.objects))  # type: ignore[attr-defined]
            else:
                front = cluster = kind()
                cluster.logs = folder
            kubelets = Kubelets(cluster, start=start)
            for node in nodes:
                cluster.node(node)
            url = await ends.enter_async_context(served(front, free_port()))
            (folder / "kubeconfig").write_text(kubeconfig(url))
            made.append(PodCluster(asyncio.get_running_loop(), cluster, kubelets, url, folder / "kubeconfig"))
            running = asyncio.create_task(kubelets.run())
            ready.set()
            await end.wait()
            running.cancel()
            await asyncio.wait([running])
            kubelets.stop()

    thread = threading.Thread(target=lambda: asyncio.run(live()), name="cluster")
    thread.start()
    try:
        assert ready.wait(START_SECONDS), "the cluster does not start"
        yield made[0]
    finally:
        made[0].do(end.set)
        thread.join(START_SECONDS)
