"""Another controller and the pods of the last one: adopted, told of, deleted, killed; late if the cluster was away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from api_server import NODES, PODS, SECRETS
from asynchronous import asynchronous
from pod_team import SPEC, TOKENS, hurry, team
from rule import holds
from shoal_controller.core.machine.durable import Place
from shoal_controller.core.machine.effects import Adopt, Spawn
from shoal_controller.core.machine.events import Exited, Preempted, Spawned, Waiting
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.jobs import background
from shoal_controller.jobs.background import BackgroundWork
from shoal_controller.process.tasks import only_logged
from shoal_protos.errors import PeerError
from small_machine import Written
from tiers import check

pytestmark = check("serves the API of a cluster")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@asynchronous
async def test_a_controller_that_missed_the_loss_of_a_node_finds_out(tmp_path: Path) -> None:
    async with team(tmp_path, "a") as one:
        await one.launcher.spawn("w0", SPEC)
        await one.hears(Spawned)
        await one.launcher.release()
        one.kubelets.silent.add("a")
        one.cluster.remove(NODES, "a")
        await one.launcher.adopt([], SPEC)
        assert (await one.hears(Exited))[0].why == "its node a is not there any more"


@asynchronous
async def test_a_kill_finds_a_pod_that_was_not_adopted_and_says_where_there_is_none(tmp_path: Path) -> None:
    async with team(tmp_path, "a") as one:
        await one.launcher.spawn("w0", SPEC)
        await one.hears(Spawned)
        await one.launcher.release()
        for worker in ("w0", "w1"):
            await one.launcher.kill(worker, SPEC)
        await one.until(lambda: one.count(Exited) == 2, "both ends")
        assert one.cluster.pods() == {}
        assert (await one.hears(Exited, of="w1"))[0].why == "there is no pod demo-w1"


@asynchronous
async def test_a_kill_whose_pod_could_not_be_looked_for_is_done_when_it_is_asked_for_again(tmp_path: Path) -> None:
    async with team(tmp_path, "a") as one:
        await one.launcher.spawn("w0", SPEC)
        await one.hears(Spawned)
        await one.launcher.release()
        one.cluster.fail("GET", "/pods/demo-w0", 500, times=50)
        with pytest.raises(PeerError):
            await one.launcher.kill("w0", SPEC)
        one.cluster.faults.clear()
        await one.launcher.kill("w0", SPEC)
        await one.hears(Exited)
        assert one.cluster.pods() == {}


@asynchronous
async def test_somebodys_copy_of_a_workers_pod_is_not_adopted_in_its_place(tmp_path: Path) -> None:
    async with team(tmp_path, "a") as one:
        await one.launcher.spawn("w0", SPEC)
        await one.hears(Spawned)
        await one.launcher.release()
        pod = one.cluster.pods()["demo-w0"]
        labels = dict(pod["metadata"]["labels"])
        one.cluster.put(
            PODS, {"metadata": {"name": "demo-w0-copy", "labels": labels}, "spec": {**pod["spec"], "nodeName": ""}}
        )
        places = await one.launcher.adopt(["w0"], SPEC)
        assert places == {"w0": Place.of_pod("demo-w0", one.pod_uid("demo-w0"), "a")}
        one.cluster.remove(PODS, "demo-w0-copy")
        await one.settle()
        assert one.count(Exited) == 0


@asynchronous
async def test_another_controller_adopts_what_lives_and_hears_of_what_ended(tmp_path: Path) -> None:
    async with team(tmp_path, "a", "b", "c") as one:
        for worker in ("w0", "w1", "w2", "w3"):
            await one.launcher.spawn(worker, SPEC)
        await one.until(lambda: one.count(Spawned) == 3, "three run")
        waits = next(f"w{n}" for n in range(4) if one.cluster.pods()[f"demo-w{n}"]["status"]["phase"] == "Pending")
        await one.launcher.release()
        one.reports.clear()
        for node in ("a", "b", "c"):
            one.cluster.node(node, "team/full")
        ended, lives, *_ = [f"w{n}" for n in range(4) if f"w{n}" != waits]
        one.kubelets.end(f"demo-{ended}", 1)
        places = await one.launcher.adopt([waits, "w9"], SPEC)
        assert places["w9"] is None and ended not in places
        assert places[lives] is not None and places[lives].node and not places[waits].node  # type: ignore[union-attr]
        assert (await one.hears(Exited))[0].worker == ended
        assert (await one.hears(Waiting))[0].worker == waits
        assert one.runs == {SPEC.run}, "a later run of the job hears nothing of it"


@holds("A pod that exists already")
@asynchronous
async def test_the_pods_of_an_earlier_run_are_deleted_and_not_adopted(tmp_path: Path) -> None:
    async with team(tmp_path, "a", "b") as one:
        await one.launcher.spawn("w0", SPEC)
        await one.hears(Spawned)
        await one.launcher.release()
        again = JobSpec("demo", 1, launcher="kubernetes", run="e5f6", kubernetes=SPEC.kubernetes)
        assert await one.launcher.adopt([], again) == {}
        await one.launcher.spawn("w0", again)
        await one.until(lambda: one.run_of("demo-w0") == "e5f6", "a pod of the new run")
        token = one.cluster.objects[SECRETS]["demo-shoal-token"]["stringData"]["token"]
        assert token == TOKENS.join("demo", "e5f6")


@holds("A pod that exists already")
@asynchronous
async def test_a_pod_of_an_earlier_run_that_has_the_name_makes_way(tmp_path: Path) -> None:
    async with team(tmp_path, "a", "b") as one:
        await one.launcher.spawn("w0", SPEC)
        await one.hears(Spawned)
        await one.launcher.release()
        await one.launcher.spawn(
            "w0", JobSpec("demo", 1, launcher="kubernetes", run="e5f6", kubernetes=SPEC.kubernetes)
        )
        await one.until(lambda: one.run_of("demo-w0") == "e5f6", "a pod of the new run")


@holds("A launcher that does not answer at take-over")
@asynchronous
async def test_pods_are_adopted_late_where_the_cluster_was_away_when_a_controller_took_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "ADOPT_TIMES", 2)
    monkeypatch.setattr(background, "ADOPT_PAUSE_SECONDS", 0.02)
    async with team(tmp_path, "a") as one:
        await one.launcher.spawn("w0", SPEC)
        await one.hears(Spawned)
        await one.launcher.release()
        one.reports.clear()
        one.cluster.fail("GET", "/pods", 503, times=10**6)
        outside = replace(Written().outside(), launchers={"kubernetes": one.launcher})
        work = BackgroundWork(SPEC, outside, lambda event: one.submit(SPEC.job, event), print)
        work.start(only_logged)
        work.run(Adopt(()))
        work.run(Spawn("w1"))
        await one.until(lambda: "demo-w1" in one.cluster.pods(), "a start that waits for the adoption no longer")
        assert not any(isinstance(news, Spawned) and news.worker == "w0" for news in one.reports)
        one.cluster.faults.clear()
        await one.hears(Spawned, of="w0")
        one.cluster.node("a", "karpenter.sh/disrupted")
        assert (await one.hears(Preempted, of="w0"))[0].notice
        await work.stop()


@asynchronous
async def test_a_secret_that_goes_while_it_is_taken_over_or_between_two_terms_is_made_anew(tmp_path: Path) -> None:
    async with team(tmp_path, "a", "b") as one:
        one.cluster.put(SECRETS, {"metadata": {"name": "demo-shoal-token"}, "stringData": {"token": "of another run"}})
        gate = one.cluster.hold("PATCH", "/secrets")
        await one.launcher.spawn("w0", SPEC)
        await one.until(lambda: one.cluster.held, "the change")
        one.cluster.remove(SECRETS, "demo-shoal-token")
        gate.set()
        await one.hears(Spawned, of="w0")
        assert not [news for news in one.reports if isinstance(news, Waiting) and news.hopeless]
        await one.launcher.release()
        one.cluster.remove(SECRETS, "demo-shoal-token")
        await one.launcher.adopt([], SPEC)
        await one.launcher.spawn("w1", SPEC)
        await one.hears(Spawned, of="w1")
        assert "demo-shoal-token" in one.cluster.objects[SECRETS]
