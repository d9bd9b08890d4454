"""More pods than a page of a list has: twenty at a time made and deleted, one request each, and adopted by one list
however many jobs have them. How long a thousand take says `benchmarks/elastic_jobs.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from api_server import PODS
from asynchronous import asynchronous
from pod_team import SPEC, Team, hurry, team
from rule import Edit, holds, rule
from shoal_controller.core.machine.events import Exited
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.kubernetes import pod_writer
from tiers import check

pytestmark = check("serves the API of a cluster")

MANY = 510
JOBS = [replace(SPEC, job=f"job-{number}") for number in range(10)]
WORKERS = [(f"w{number // len(JOBS)}", JOBS[number % len(JOBS)]) for number in range(MANY)]
PAGES = 2

Act = Callable[[str, JobSpec], Awaitable[object]]


async def at_a_time(one: Team, method: str, act: Act) -> None:
    """So many requests lie at the server at once, and no more, while it answers none."""
    gate = one.cluster.hold(method, "/pods")
    acts = [asyncio.ensure_future(act(worker, spec)) for worker, spec in WORKERS[:50]]
    await one.until(lambda: one.cluster.held == pod_writer.AT_A_TIME, "twenty requests at once")
    await one.settle()
    assert one.cluster.held == pod_writer.AT_A_TIME
    one.cluster.faults.clear()
    gate.set()
    await asyncio.gather(*acts)


def running(one: Team) -> int:
    return sum(pod["status"]["phase"] == "Running" for pod in one.cluster.pods().values())


@rule(
    "Pods are adopted by one list of the new term, however many jobs have them; twenty are made and twenty "
    "deleted at a time, with one request each, and an old one is asked to go once",
    "Not marked in the design, but needed as much",
    broken_by=[
        Edit(
            "shoal_controller.launchers.kubernetes.pod_writer",
            "            async with self._makes:",
            "            async with asyncio.Semaphore(1000):",
        ),
        Edit(
            "shoal_controller.launchers.kubernetes.pod_launcher",
            "        if self._leaving.get(name) != uid:",
            "        if uid:",
        ),
    ],
)
@asynchronous
async def test_many_pods_are_made_adopted_by_one_list_and_deleted_with_one_request_each(tmp_path: Path) -> None:
    async with team(tmp_path) as one:
        one.cluster.node("large")
        one.kubelets.per_node = MANY
        for worker, spec in WORKERS:
            await one.launcher.spawn(worker, spec)
        await one.until(lambda: len(one.cluster.pods()) == MANY, "all are made", 60)
        await one.until(lambda: running(one) == MANY, "all run", 60)
        assert one.cluster.asked("POST", PODS) == MANY
        await one.launcher.release()
        one.cluster.requests.clear()
        for spec in JOBS:
            places = await one.launcher.adopt([], spec)
            assert len(places) == MANY // len(JOBS)
            assert all(place is not None and place.node for place in places.values())
        watches = 1
        assert one.cluster.asked("GET", PODS) <= PAGES + watches, "one list for all jobs, none for a pod"
        assert not [path for _, path in one.cluster.requests if path.startswith(f"{PODS}/")]
        await asyncio.gather(*(one.launcher.kill(worker, spec) for worker, spec in WORKERS))
        await one.until(lambda: one.count(Exited) == MANY, "all have ended", 60)
        assert one.cluster.pods() == {}
        assert sum(method == "DELETE" for method, _ in one.cluster.requests) == MANY


@holds("Pods are adopted by one list")
@asynchronous
async def test_twenty_pods_are_made_and_twenty_deleted_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    async with team(tmp_path) as one:
        await at_a_time(one, "POST", lambda worker, spec: one.launcher.spawn(worker, spec))
        await one.until(lambda: len(one.cluster.pods()) == 50, "fifty pods")
        await at_a_time(one, "DELETE", lambda worker, spec: one.launcher.kill(worker, spec))
        await one.until(lambda: not one.cluster.pods(), "none")
