"""Annotations of pods that tell which world a worker is in: its generation, and the worker's rank there.

People and their tools read them; nothing is decided by them, so nothing waits for them either. They are written a
moment after a world has begun, a few pods at a time, at most once per pod and world, and only the newest world's. Who
is in no world yet has none, and who has left one keeps its last. What becomes of pods is `pod_launcher.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import structlog
from shoal_protos.plan import Plan, WorkerId

from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.kubernetes.cluster_api import ClusterApi, ClusterRefusal, ClusterSilence
from shoal_controller.launchers.kubernetes.pod_manifest import pods_path
from shoal_controller.launchers.kubernetes.section import Json
from shoal_controller.launchers.kubernetes.tracked_pod import TrackedPod, TrackedPods

GENERATION, RANK = "shoal.dev/generation", "shoal.dev/rank"

SETTLE_SECONDS = 1.0
"""Before the first pod of a world is written: of worlds that follow each other quickly only the last one is."""
AT_A_TIME = 4
"""Few, so that pods are made and deleted as quickly as ever."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""Before it is tried again where the server did not answer."""

log = structlog.get_logger("shoal.kubernetes")


@dataclass(frozen=True, slots=True)
class _World:
    """The newest world of a job's run: what each member's pod is to say."""

    run: str
    generation: str
    ranks: Mapping[WorkerId, str]


def annotated(pod: Json) -> Mapping[str, str]:
    """What a pod says of its worker's world; empty: nothing."""
    found = pod["metadata"].get("annotations") or {}
    return {name: str(found[name]) for name in (GENERATION, RANK) if name in found}


class WorldAnnotations:
    """Writes them. `run` as a task; `began` and `look` never wait."""

    def __init__(self, api: ClusterApi, tracked: TrackedPods) -> None:
        self._api, self._tracked = api, tracked
        self._worlds: dict[str, _World] = {}
        self._due: dict[str, None] = {}
        """Names of pods that may say something old, in order."""
        self._came = asyncio.Event()
        self._refused: set[tuple[int, str]] = set()
        """Kinds of refusals that are in the log."""

    def began(self, world: Plan, spec: JobSpec) -> None:
        """A world of this job has begun."""
        ranks = {one.worker: str(rank) for rank, one in enumerate(world.members)}
        self._worlds[spec.job] = _World(spec.run, str(world.generation), ranks)
        for tracked in self._tracked.of(spec.job):
            self.look(tracked)

    def look(self, tracked: TrackedPod) -> None:
        """This pod may be one to write to."""
        if self._wanted(tracked) is not None:
            self._due[tracked.name] = None
            self._came.set()

    def forget(self, job: str) -> None:
        self._worlds.pop(job, None)

    def clear(self) -> None:
        """Nothing is known any more; `run` has ended."""
        self._worlds.clear()
        self._due.clear()

    def _wanted(self, tracked: TrackedPod) -> Mapping[str, str] | None:
        """What its pod is to say and does not; None where there is no such thing."""
        world = self._worlds.get(tracked.spec.job)
        if world is None or world.run != tracked.spec.run or not tracked.uid:
            return None
        if tracked.is_killed or tracked.end is not None:
            return None
        ranks = ",".join(world.ranks[worker] for worker in tracked.workers if worker in world.ranks)
        wanted = {GENERATION: world.generation, RANK: ranks}
        return wanted if ranks and wanted != tracked.annotated else None

    # ---- writing

    async def run(self) -> None:
        """Until it is cancelled."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            await self._came.wait()
            await asyncio.sleep(SETTLE_SECONDS)
            self._came.clear()
            due, self._due = self._due, {}
            names = iter(due)
            answered = all(await asyncio.gather(*(self._write_some(names) for _ in range(AT_A_TIME))))
            self._due |= dict.fromkeys(names)
            if answered:
                pause = FIRST_PAUSE_SECONDS
                continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._came.set()

    async def _write_some(self, names: Iterator[str]) -> bool:
        """The next ones, until there are none; returns False where the server does not answer: the rest is due."""
        for name in names:
            tracked = self._tracked.by_name.get(name)
            wanted = self._wanted(tracked) if tracked is not None else None
            if tracked is None or wanted is None:
                continue
            try:
                await self._write(tracked, wanted)
            except ClusterSilence as error:
                log.warning("the world of a worker is not in its pod yet", pod=name, error=str(error))
                self._due[name] = None
                return False
        return True

    async def _write(self, tracked: TrackedPod, wanted: Mapping[str, str]) -> None:
        """● To this very pod: one of its name that somebody else has made is refused by its uid. What is refused is not
        asked for again before the next world, for it may be refused for good; a conflict is none of these refusals
        where the pod is still the one.
        """
        path = f"{pods_path(self._api.namespace)}/{tracked.name}"
        try:
            await self._api.patch(path, {"metadata": {"uid": tracked.uid, "annotations": dict(wanted)}})
        except ClusterRefusal as error:
            if error.code == 409 and (found := await self._read(path, tracked)) is not None:
                tracked.annotated = annotated(found)
                return self.look(tracked)
            if error.code not in (404, 409) and (error.code, error.why) not in self._refused:
                self._refused.add((error.code, error.why))
                log.warning("the worlds of workers cannot be written into pods", pod=tracked.name, error=str(error))
        tracked.annotated = wanted
        return None

    async def _read(self, path: str, tracked: TrackedPod) -> Json | None:
        """The worker's pod as it is now; None: it is gone, or another one has its name."""
        try:
            found = await self._api.get(path)
        except ClusterRefusal:
            return None
        return found if found["metadata"]["uid"] == tracked.uid else None
