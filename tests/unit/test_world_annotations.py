"""Which world a worker is in, as its pod says it: written after each resize, once a pod, and never in its way. What
else is told of a pod of several workers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from api_server import PODS
from asynchronous import asynchronous
from pod_team import SPEC, Team, hurry, team
from rule import Edit, holds, rule
from shoal_controller.core.machine.durable import Place, WorkerRecord
from shoal_controller.core.machine.effects import Effect, Persist
from shoal_controller.core.machine.events import Event, Exited, Spawned
from shoal_controller.core.machine.job import Job
from shoal_controller.launchers.kubernetes import cluster_api, world_annotations
from shoal_protos.acts import Save, Scale
from shoal_protos.plan import Member, Plan, Reason
from small_machine import SPEC as SMALL
from small_machine import SmallMachine, running
from tiers import check
from worlds import recovery

pytestmark = check("serves the API of a cluster")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def world(generation: int, *workers: str) -> Plan:
    members = tuple(Member(worker, f"of {worker}", "10.0.0.1:1") for worker in workers)
    return Plan(generation, 0, Reason.START, 8, 8, members, (), (), 1, 0, True)


def says(one: Team, worker: str) -> Mapping[str, str]:
    return world_annotations.annotated(one.cluster.pods()[f"demo-{worker}"])


def patches(one: Team) -> Counter[str]:
    """Requests to change pods, by worker."""
    return Counter(path.rpartition("-")[2] for method, path in one.cluster.requests if method == "PATCH")


def mark(generation: int, rank: int) -> Mapping[str, str]:
    return {"shoal.dev/generation": str(generation), "shoal.dev/rank": str(rank)}


async def started(one: Team, *workers: str) -> None:
    for worker in workers:
        await one.launcher.spawn(worker, SPEC)
    await one.until(lambda: one.started() == len(workers), "all run")
    one.cluster.requests.clear()


@rule(
    "Annotations of pods hold up nothing: one patch a pod and world, of the newest world, to this very pod and "
    "run, a moment after it has begun",
    "A change of the world",
    broken_by=[
        Edit(
            "shoal_controller.launchers.kubernetes.world_annotations",
            "            await asyncio.sleep(SETTLE_SECONDS)\n            self._came.clear()\n",
            "            self._came.clear()\n",
        ),
        Edit(
            "shoal_controller.launchers.kubernetes.world_annotations",
            '{"uid": tracked.uid, "annotations": dict(wanted)}',
            '{"annotations": dict(wanted)}',
        ),
        Edit(
            "shoal_controller.launchers.kubernetes.world_annotations",
            "world is None or world.run != tracked.spec.run or not tracked.uid",
            "world is None or not tracked.uid",
        ),
        Edit(
            "shoal_controller.jobs.background",
            "world is None or world.generation == self._shown_generation",
            "world is None",
        ),
    ],
)
@asynchronous
async def test_a_pod_tells_generation_and_rank_one_patch_a_resize_and_a_joiner_tells_none(tmp_path: Path) -> None:
    async with team(tmp_path, "a", "b", "c") as one:
        await started(one, "w0", "w1", "w2")
        assert not says(one, "w0")
        one.launcher.world_began(world(1, "w0", "w1"), SPEC)
        await one.until(lambda: (says(one, "w0"), says(one, "w1")) == (mark(1, 0), mark(1, 1)), "both are in world 1")
        assert not says(one, "w2")
        one.launcher.world_began(world(2, "w2", "w1"), SPEC)
        await one.until(lambda: (says(one, "w2"), says(one, "w1")) == (mark(2, 0), mark(2, 1)), "both are in world 2")
        await one.settle()
        assert says(one, "w0") == mark(1, 0), "who has left keeps its last"
        assert patches(one) == {"w0": 1, "w1": 2, "w2": 1}


@holds("Annotations of pods hold up")
@asynchronous
async def test_of_worlds_that_follow_each_other_quickly_only_the_last_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world_annotations, "SETTLE_SECONDS", 0.5)
    async with team(tmp_path, "a", "b") as one:
        await started(one, "w0", "w1")
        for generation in range(1, 20):
            one.launcher.world_began(world(generation, "w0", "w1"), SPEC)
            await asyncio.sleep(0)
        await one.until(lambda: (says(one, "w0"), says(one, "w1")) == (mark(19, 0), mark(19, 1)), "the last one")
        await one.settle()
        assert patches(one) == {"w0": 1, "w1": 1}


@holds("Annotations of pods hold up")
@asynchronous
async def test_whoever_changes_the_annotations_is_left_alone_until_the_next_world(tmp_path: Path) -> None:
    async with team(tmp_path, "a") as one:
        await started(one, "w0")
        one.launcher.world_began(world(1, "w0"), SPEC)
        await one.until(lambda: says(one, "w0") == mark(1, 0), "world 1")
        one.cluster.update(PODS, "demo-w0", lambda pod: pod["metadata"].pop("annotations"))
        await one.settle()
        assert not says(one, "w0")
        one.launcher.world_began(world(2, "w0"), SPEC)
        await one.until(lambda: says(one, "w0") == mark(2, 0), "world 2")


@holds("Annotations of pods hold up")
@asynchronous
async def test_a_pod_that_is_gone_or_anothers_is_left_alone(tmp_path: Path) -> None:
    async with team(tmp_path, "a", "b", "c") as one:
        await started(one, "w0", "w1", "w2")
        one.kubelets.end("demo-w0", 0)
        await one.hears(Exited)
        one.kubelets.silent |= {"a", "b", "c"}
        pod = one.cluster.pods()["demo-w1"]
        one.cluster.fail("GET", "/pods?", 500, times=1000)
        one.cluster.break_watches()
        one.cluster.remove(PODS, "demo-w1")
        one.cluster.put(PODS, {**pod, "metadata": {**pod["metadata"], "uid": "another"}})
        one.launcher.world_began(world(1, "w0", "w1", "w2"), SPEC)
        await one.until(lambda: says(one, "w2") == mark(1, 2), "the one that lives")
        await one.settle()
        assert not says(one, "w1") and "w0" not in patches(one) and patches(one)["w1"] == 1


@holds("A conflict (409) is read")
@asynchronous
async def test_a_conflict_is_read_and_tried_again_unless_the_pod_is_another(tmp_path: Path) -> None:
    async with team(tmp_path, "a") as one:
        await started(one, "w0")
        one.cluster.fail("PATCH", "/pods", 409, times=2)
        one.launcher.world_began(world(1, "w0"), SPEC)
        await one.until(lambda: says(one, "w0") == mark(1, 0), "world 1")
        assert patches(one) == {"w0": 3}


@asynchronous
async def test_a_server_that_takes_none_is_asked_again_holds_up_no_start_or_end_and_hears_of_the_newest_world_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_api, "PATIENCE_SECONDS", 0.15)
    async with team(tmp_path, "a", "b", "c") as one:
        await started(one, "w0", "w1")
        one.cluster.fail("PATCH", "/pods", 503, times=10**6)
        one.launcher.world_began(world(1, "w0", "w1"), SPEC)
        await one.until(lambda: patches(one).total() > 5, "it was tried, given up and tried again")
        await one.launcher.spawn("w2", SPEC)
        await one.hears(Spawned, of="w2")
        await one.launcher.kill("w1", SPEC)
        await one.hears(Exited, of="w1")
        one.launcher.world_began(world(2, "w2", "w0"), SPEC)
        one.cluster.faults.clear()
        await one.until(lambda: (says(one, "w2"), says(one, "w0")) == (mark(2, 0), mark(2, 1)), "the newest")


@asynchronous
async def test_a_right_that_is_missing_is_named_and_not_asked_for_again_before_the_next_world(tmp_path: Path) -> None:
    async with team(tmp_path, "a", "b") as one:
        await started(one, "w0", "w1")
        one.cluster.fail("PATCH", "/pods", 403, times=4)
        one.launcher.world_began(world(1, "w0", "w1"), SPEC)
        await one.until(lambda: patches(one).total() == 2, "both are refused")
        await one.settle()
        assert patches(one).total() == 2
        one.launcher.world_began(world(2, "w0", "w1"), SPEC)
        await one.until(lambda: patches(one).total() == 4, "the next world is tried")


@asynchronous
async def test_another_controller_writes_what_is_missing_and_nothing_else(tmp_path: Path) -> None:
    async with team(tmp_path, "a", "b") as one:
        await started(one, "w0", "w1")
        one.launcher.world_began(world(3, "w0"), SPEC)
        await one.until(lambda: says(one, "w0") == mark(3, 0), "world 3")
        await one.launcher.release()
        one.cluster.requests.clear()
        one.launcher.world_began(world(3, "w0", "w1"), SPEC)  # as it lies in the store, before pods are found
        await one.launcher.adopt([], SPEC)
        await one.until(lambda: says(one, "w1") == mark(3, 1), "the one that was missing")
        await one.settle()
        assert patches(one) == {"w1": 1}


@holds("Annotations of pods hold up")
@asynchronous
async def test_the_pods_of_a_new_run_tell_nothing_of_the_old_runs_worlds(tmp_path: Path) -> None:
    async with team(tmp_path, "a", "b") as one:
        one.launcher.world_began(world(5, "w0"), replace(SPEC, run="an old one"))
        await started(one, "w0")
        await one.settle()
        assert not says(one, "w0") and not patches(one)


class Opening(SmallMachine):
    """Opens the next world whenever a checkpoint is asked for."""

    def _one(self, job: Job, event: Event) -> tuple[Job, Sequence[Effect]]:
        if not isinstance(event, Save):
            return super()._one(job, event)
        before = job.durable.current
        after = recovery(1 if before is None else before.generation + 1, "ab")
        roster = {name: WorkerRecord(name, order) for order, name in enumerate("ab")}
        return replace(job, durable=replace(job.durable, current=after, roster=roster)), [Persist()]


@holds("Annotations of pods hold up")
@asynchronous
async def test_a_launcher_is_told_each_world_once_and_the_present_one_by_the_next_controller(tmp_path: Path) -> None:
    async with running(tmp_path, Opening()) as one:
        await one.shell.create(SMALL)
        for event in (Save(), Scale(5), Save(), Scale(6)):
            await one.shell.submit("train", event)
        assert one.written.log == [("world", 1, "train"), ("world", 2, "train")]
    async with running(tmp_path, Opening()) as one:
        await one.written.until("world", 2, "train")
        assert one.written.log == [("world", 2, "train")]


# ---- pods of several workers


@asynchronous
async def test_the_workers_of_a_pod_of_several_are_told_of_it_each_and_go_with_it(tmp_path: Path) -> None:
    pairs = replace(SPEC, started_together=2)
    async with team(tmp_path, "a", "b") as one:
        for worker in ("w0", "w1", "w2", "w3"):
            assert await one.launcher.spawn(worker, pairs) == Place.of_pod(f"demo-{'w0' if worker < 'w2' else 'w2'}")
        await one.until(lambda: one.started() == 4, "all run")
        assert set(one.cluster.pods()) == {"demo-w0", "demo-w2"}
        one.launcher.world_began(world(1, "w3", "w0", "w1"), pairs)
        await one.until(lambda: says(one, "w0").get("shoal.dev/rank") == "1,2", "the ranks of both")
        node = one.cluster.pods()["demo-w0"]["spec"]["nodeName"]
        await one.launcher.release()
        place = await one.launcher.adopt(["w0", "w1", "w4", "w5"], pairs)
        assert place["w1"] == place["w0"] == Place.of_pod("demo-w0", one.pod_uid("demo-w0"), node)
        assert place["w4"] is place["w5"] is None and place["w3"] is not None
        one.reports.clear()
        await one.launcher.kill("w1", pairs)
        await one.until(lambda: one.count(Exited) == 2, "both ends")
        assert {news.worker for news in one.reports if isinstance(news, Exited)} == {"w0", "w1"}
        assert set(one.cluster.pods()) == {"demo-w2"}
