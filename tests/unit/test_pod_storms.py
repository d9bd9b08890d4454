"""A launcher of pods in a storm: whatever a cluster does while workers come and go, in whatever order, with controllers
that change, nobody is told of a death while its process may live, and in the end everything is as it was asked for.
"""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest
from api_server import NODES, PODS
from asynchronous import asynchronous
from pod_team import SPEC, Team, hurry, team
from shoal_controller.core.machine.events import Exited, Spawned
from shoal_protos.errors import PeerError
from tiers import check

pytestmark = check("serves the API of a cluster")

BLOWS = 40
FAULTS = {"GET": (500,), "POST": (0, 429, 500, 503), "DELETE": (0, 409, 409, 500), "PATCH": (0, 409)}
"""By method: statuses; 0: the answer is cut off."""
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


class Storm:
    """One seed's. `asked`: workers that are wanted; `killed`: that were told to end."""

    def __init__(self, one: Team, chance: random.Random) -> None:
        self.one, self.chance = one, chance
        self.asked: list[str] = []
        self.killed: set[str] = set()
        self.wrong: list[str] = []
        self.number = self.nodes = 0
        one.on_report = self._judge

    def _judge(self, news: object) -> None:
        if isinstance(news, Exited) and self._may_live(news.worker):
            self.wrong.append(f"{news}, while its pod is {self.one.cluster.pods()[f'demo-{news.worker}']}")

    def _may_live(self, worker: str) -> bool:
        pod = self.one.cluster.pods().get(f"demo-{worker}", {})
        node = self.one.cluster.objects[NODES].get(pod.get("spec", {}).get("nodeName", ""))
        serves = node is not None and OUT_OF_SERVICE not in str(node["spec"]["taints"])
        return bool(pod) and pod["status"]["phase"] == "Running" and serves

    async def spawn(self) -> None:
        self.asked.append(f"w{self.number}")
        self.number += 1
        await self.one.launcher.spawn(self.asked[-1], SPEC)

    async def kill(self) -> None:
        if left := [worker for worker in self.asked if worker not in self.killed]:
            worker = self.chance.choice(left)
            await self.end_worker(worker)

    async def end_worker(self, worker: str) -> None:
        """What the cluster does not answer the job asks for again."""
        self.killed.add(worker)
        with suppress(PeerError):
            await self.one.launcher.kill(worker, SPEC)

    async def end(self) -> None:
        running = [name for name, pod in self.one.cluster.pods().items() if pod["status"]["phase"] == "Running"]
        if running:
            self.one.kubelets.end(self.chance.choice(running), self.chance.choice([0, 1, -9]))

    async def delete(self) -> None:
        if names := list(self.one.cluster.pods()):
            self.one.cluster.remove(PODS, self.chance.choice(names))

    async def taint(self) -> None:
        name = self.chance.choice(list(self.one.cluster.objects[NODES]))
        self.one.cluster.node(name, *self.chance.choice([(), ("karpenter.sh/disrupted",), (OUT_OF_SERVICE,)]))

    async def lose_node(self) -> None:
        name = self.chance.choice(list(self.one.cluster.objects[NODES]))
        self.one.cluster.remove(NODES, name)
        await self.add_node()

    async def add_node(self) -> None:
        self.one.cluster.node(f"n{self.nodes}")
        self.nodes += 1

    async def fault(self) -> None:
        method, statuses = self.chance.choice(sorted(FAULTS.items()))
        self.one.cluster.fail(method, "/pods", self.chance.choice(statuses), times=self.chance.randint(1, 3))

    async def break_watches(self) -> None:
        if self.chance.random() < 0.5:
            self.one.cluster.compact()
        self.one.cluster.break_watches()

    async def change_controller(self) -> None:
        await self.one.launcher.release()
        self.one.cluster.faults.clear()
        found = await self.one.launcher.adopt(self.left(), SPEC)
        for worker, place in found.items():
            if place is None:  # it was never made: the job asks again
                await self.one.launcher.spawn(worker, SPEC)

    def left(self) -> list[str]:
        """Who is wanted, and of whom nobody has said that it has ended."""
        ended = {news.worker for news in self.one.reports if isinstance(news, Exited)}
        return [worker for worker in self.asked if worker not in ended]

    async def blow(self) -> None:
        kinds = [self.spawn, self.spawn, self.spawn, self.kill, self.end, self.delete, self.taint, self.lose_node]
        kinds += [self.kill, self.kill]
        kinds += [self.add_node, self.fault, self.fault, self.break_watches, self.change_controller]
        await self.chance.choice(kinds)()

    async def calm(self) -> None:
        self.one.cluster.faults.clear()
        for name in list(self.one.cluster.objects[NODES]):
            self.one.cluster.node(name)
        for worker in self.left():
            if worker in self.killed:
                await self.end_worker(worker)


@pytest.mark.parametrize("seed", range(3))
@asynchronous
async def test_in_a_storm_nobody_is_dead_who_may_live_and_afterwards_all_is_as_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    hurry(monkeypatch)
    async with team(tmp_path, "a", "b") as one:
        one.kubelets.per_node = 20
        storm = Storm(one, random.Random(seed))
        one.cluster.doubles = bool(seed % 2)
        for _ in range(BLOWS):
            await storm.blow()
            await one.breathe(storm.chance.random() * 0.05)
        await storm.calm()

        def settled() -> bool:
            lives = {worker for worker in storm.left() if worker not in storm.killed}
            known = {news.worker for news in one.reports if isinstance(news, Spawned) and news.place.node}
            return set(storm.left()) == lives and lives <= known

        await one.until(settled, f"everybody runs or has ended: {storm.left()} {storm.killed}")
        for worker in storm.left():
            await storm.end_worker(worker)
        await one.until(lambda: not storm.left(), "all have ended")
        assert storm.wrong == []
        assert not [pod for pod in one.cluster.pods().values() if pod["status"]["phase"] in ("Pending", "Running")]
