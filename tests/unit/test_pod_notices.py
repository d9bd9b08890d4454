"""What a cluster announces of its pods: nodes that are to go, deletions; and what is seen without the nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_server import NODES, PODS
from asynchronous import asynchronous
from pod_team import SPEC, hurry, team
from rule import Edit, rule
from shoal_controller.core.machine.events import Endangered, Exited, Preempted, Spared, Spawned
from shoal_controller.core.machine.pending import Notice


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@asynchronous
async def test_a_taint_announces_a_drain_and_its_end_takes_it_back(tmp_path: Path) -> None:
    async with team(tmp_path, "a", taints=("team/leaving",)) as one:
        await one.launcher.spawn("w0", SPEC)
        await one.hears(Spawned)
        one.cluster.node("a", "aws-node-termination-handler/rebalance-recommendation")
        await one.settle()
        assert not [news for news in one.reports if isinstance(news, Preempted)], "that is a hint"
        why = "its node a has the taint aws-node-termination-handler/rebalance-recommendation"
        assert await one.hears(Endangered) == [Endangered("w0", why)]
        one.cluster.node("a", "karpenter.sh/disrupted")
        (preempted,) = await one.hears(Preempted)
        assert preempted == Preempted("w0", Notice.TAINTED, "its node a has the taint karpenter.sh/disrupted", 55.0)
        one.cluster.node("a")
        await one.hears(Spared)
        one.cluster.node("a", "team/leaving")
        await one.until(lambda: one.count(Preempted) == 2, "a taint of the settings")
        one.cluster.node("a", "team/leaving", unschedulable=True)
        await one.settle()
        assert one.count(Preempted) == 2


@rule(
    "… and a drain whose notice is taken back is cancelled only while every world that may train has the worker; "
    "a node that is not known has taken nothing back",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.core.machine.phases.scaling",
            "bool(worlds) and all(is_member(",
            "bool(worlds) and any(is_member(",
        ),
        Edit(
            "shoal_controller.launchers.kubernetes.tracked_pod",
            " and before is not None and self.sees_node:",
            " and before is not None:",
        ),
        Edit(
            "shoal_controller.core.machine.phases.scaling",
            " and record.leaving is Leaving.PREEMPTION:",
            " and record.leaving:",
        ),
    ],
    after="Several notices that a worker",
)
@asynchronous
async def test_a_node_that_goes_with_its_taint_has_taken_nothing_back(tmp_path: Path) -> None:
    async with team(tmp_path, "a") as one:
        await one.launcher.spawn("w0", SPEC)
        await one.hears(Spawned)
        one.kubelets.silent.add("a")
        one.cluster.node("a", "karpenter.sh/disrupted")
        await one.hears(Preempted)
        one.cluster.remove(NODES, "a")
        await one.hears(Exited)
        assert one.count(Spared) == 0


@asynchronous
async def test_cordon_condition_and_deletion_announce_a_drain_each_within_the_grace(tmp_path: Path) -> None:
    async with team(tmp_path, "a", "b", "c") as one:
        for worker in ("w0", "w1", "w2"):
            await one.launcher.spawn(worker, SPEC)
        await one.until(lambda: one.count(Spawned) == 3, "all run")
        one.kubelets.silent |= {"a", "b", "c"}
        node = {news.worker: news.place.node for news in one.reports if isinstance(news, Spawned)}
        one.cluster.node(node["w0"], unschedulable=True)
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
        one.cluster.update(PODS, "demo-w1", lambda pod: pod["status"].update(conditions=[condition]))
        one.cluster._delete(PODS, one.cluster.pods()["demo-w2"], {})
        await one.until(lambda: one.count(Preempted) == 3, "three notices")
        notices = {news.worker: news for news in one.reports if isinstance(news, Preempted)}
        assert {worker: news.notice for worker, news in notices.items()} == {
            "w0": Notice.CORDONED, "w1": Notice.DISRUPTED, "w2": Notice.DELETED,
        }  # fmt: skip
        assert "PreemptionByScheduler" in notices["w1"].why and 50 < notices["w2"].grace_seconds <= 55


@asynchronous
async def test_a_second_deletion_that_leaves_a_pod_less_time_is_told(tmp_path: Path) -> None:
    async with team(tmp_path, "a") as one:
        await one.launcher.spawn("w0", SPEC)
        await one.hears(Spawned)
        one.kubelets.silent.add("a")
        for number, when in enumerate(("2100-01-01T00:01:00Z", "2000-01-01T00:00:12Z"), 1):
            one.cluster.update(PODS, "demo-w0", lambda pod, when=when: pod["metadata"].update(deletionTimestamp=when))
            await one.until(lambda number=number: one.count(Preempted) == number, "the notice")
        assert [notice.grace_seconds for notice in await one.hears(Preempted)] == [55.0, 0.0]


@asynchronous
async def test_without_the_right_to_read_nodes_pods_are_still_watched(tmp_path: Path) -> None:
    async with team(tmp_path, "a", nodes=False) as one:
        one.cluster.forbidden.add(NODES)
        await one.launcher.spawn("w0", SPEC)
        await one.hears(Spawned)
        await one.launcher.kill("w0", SPEC)
        await one.hears(Exited)
