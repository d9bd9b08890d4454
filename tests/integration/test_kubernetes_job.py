"""A job whose workers are pods, of which each is a real process: nodes are tainted, are lost, and the bits stay."""

from __future__ import annotations

import time
from pathlib import Path

from api_server import NODES
from integration.cluster import until
from integration.job_of_pods import JobOfResource, launched


def test_a_tainted_and_a_lost_node_change_no_bit(tmp_path: Path) -> None:
    with launched(3, 3, tmp_path) as (job, pods):
        job.wait_step(3)
        job.wait_world(3)
        tainted = job.node_of("w1")
        before, began = job.job()["step"], time.monotonic()
        pods.node(tainted, "karpenter.sh/disrupted")
        job.until("w1's last lane", lambda _: job.workers()["w1"]["lanes"] == [])
        steps, seconds = job.job()["step"] - before, time.monotonic() - began
        print(f"taint to last lane: {steps} steps, {seconds:.2f} s")
        job.wait_state("w1", "left")
        assert f"its node {tainted} has the taint karpenter.sh/disrupted" in job.messages("draining")[0]
        job.until("w3 to wait for a node", lambda seen: "Insufficient pods" in seen["reason"])
        assert 'shoal_pods_waiting{job_name="job",reason="unschedulable"} 1.0' in job.metrics()
        pods.node("spare")
        job.wait_state("w3", "active")
        assert job.node_of("w3") == "spare"
        lost = job.node_of("w0")
        pods.lose_node(lost, NODES)
        job.until("w0 to be dead", lambda _: job.workers()["w0"]["state"] == "lost")
        job.wait_world(2)
        (tmp_path / "go").touch()
        report = job.wait_undisturbed()
        until("its pods to end", lambda: pods.pod("w3")["status"]["phase"] == "Succeeded")
    assert {"start", "drain", "join", "kill"} <= {world["reason"] for world in report["generations"]}
    assert steps <= 2 + round(seconds / 0.16), "no step is longer for it"


def test_another_controller_adopts_the_pods_and_the_job_goes_on(tmp_path: Path) -> None:
    with launched(2, 2, tmp_path) as (job, pods):
        job.wait_step(3)
        uids = {worker: pods.pod(worker)["metadata"]["uid"] for worker in ("w0", "w1")}
        job.kill_controller()
        job.start_controller()
        job.wait_world(2)
        job.until("the pods to be adopted", lambda _: all(job.node_of(worker) for worker in uids))
        assert {worker: pods.pod(worker)["metadata"]["uid"] for worker in ("w0", "w1")} == uids
        (tmp_path / "go").touch()
        job.wait_undisturbed()
    assert set(uids) == {"w0", "w1"} == {name.removeprefix("job-") for name in pods.cluster.pods()}


def test_a_resource_has_the_size_of_its_job_and_takes_it_along_when_it_goes(tmp_path: Path) -> None:
    with launched(2, 4, tmp_path, JobOfResource, max_steps=150, pace=0.1) as (job, pods):
        job.wait_world(2)
        job.kubectl("PATCH", "/job/scale", {"spec": {"replicas": 4}})
        job.wait_world(4)
        for replicas in 10 * (2, 4):
            job.kubectl("PATCH", "/job/scale", {"spec": {"replicas": replicas}})
        job.scale(3)
        assert job.resource()["spec"]["workers"]["wanted"] == 3
        job.wait_world(3)
        until("the status to tell", lambda: job.resource()["status"]["workers"]["active"] == 3)
        (tmp_path / "go").touch()
        report = job.wait_undisturbed()
        assert sum(world["lost_steps"] for world in report["generations"]) == 0
        assert len(job.messages("scaled")) <= 6, "an autoscaler that flaps is not followed each time"
        until("the status to be over", lambda: job.condition("Complete") == "True")
        job.delete(pods)


def test_a_resource_that_is_deleted_while_its_job_trains_leaves_a_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    with launched(2, 2, tmp_path, JobOfResource, shoal={"checkpoint": {"path": str(saves)}}) as (job, pods):
        job.wait_step(3)
        job.delete(pods)
    assert list(saves.glob("**/manifest*")), "nothing was saved"
