"""A job whose workers are pods, of which each is a real process: nodes are tainted, are lost, and the bits stay."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from api_server import NODES, PODS
from cluster_choice import FAKE_NODES
from forked_command import Forked, shoal
from integration.cluster import until
from integration.job_of_pods import JobOfPods, JobOfResource, launched
from tiers import promise


@promise("a pod")
def test_a_tainted_and_a_lost_node_change_no_bit(tmp_path: Path) -> None:
    with launched(3, 3, tmp_path) as (job, pods):
        job.wait_step(3)
        job.wait_world(3)
        tainted = job.node_of("w1")
        pods.node(tainted, "karpenter.sh/disrupted")
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
        steps = steps_to_last_lane(job, report, "w1")
    assert {"start", "drain", "join", "kill"} <= {world["reason"] for world in report["generations"]}
    assert steps <= 2 + 1.0 / report["step_seconds_median"], "2 steps and what fits into a second"


def steps_to_last_lane(job: JobOfPods, report: Mapping[str, Any], worker: str) -> int:
    """From the step at which a worker is told to go to the first one without a lane of its, by the job's own record."""
    events = job.events()
    notice = next(one for one in events if one["kind"] == "draining" and one["worker"] == worker)
    worlds = (one for one in events if one["kind"] == "begun" and one["revision"] > notice["revision"])
    without = next(one for one in worlds if not re.search(rf"\b{worker} [1-9]", one["message"]))
    began = {world["generation"]: world["from_step"] for world in report["generations"]}
    return int(began[without["generation"]]) - int(notice["data"]["step"])


@pytest.mark.skipif(FAKE_NODES, reason="an API server asks a node for logs, and the tests' nodes serve none")
def test_what_pods_print_is_read_through_the_controller_and_follows_rank_0(tmp_path: Path) -> None:
    """No kubectl, and no file of this machine."""
    with launched(2, 2, tmp_path, prints=True) as (job, pods):
        env = {**os.environ, "SHOAL_TOKEN": job.token}
        job.wait_step(3)
        following = Forked(["logs", "-f", "job", "--url", job.url], tmp_path / "o", tmp_path / "e", tmp_path, env)
        first = next(name for name, one in job.workers().items() if one["rank"] == 0)
        until("a line of rank 0", lambda: f"{first} prints" in following.output.read_text())
        pods.node("spare")
        job.drain(first)
        job.wait_state(first, "left")
        second = next(name for name, one in job.workers().items() if one["rank"] == 0)
        until("a line of the next one", lambda: f"{second} prints" in following.output.read_text())
        (tmp_path / "go").touch()
        job.wait_undisturbed()
        assert following.wait() == 0 and following.errors.read_text() == ""
        assert (
            shoal("logs", "job", second, "--url", job.url, env=env).stdout
            == (tmp_path / f"job-{second}.log").read_text()
        )
        pods.do(lambda: pods.cluster.remove(PODS, f"job-{second}"))
        done = shoal("logs", "job", second, "--url", job.url, env=env)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"the pod job-{second} of {second} is gone, and its log with it" in done.stderr


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
    with launched(2, 8, tmp_path, JobOfResource, max_steps=100, pace=0.1) as (job, pods):
        job.wait_world(2)
        job.kubectl_scale(8)
        job.wait_world(8)
        job.kubectl_scale(3)
        job.wait_world(3)
        for replicas in 10 * (8, 3):
            job.kubectl_scale(replicas)
        until("the status to tell", lambda: job.resource()["status"]["workers"]["active"] == 3)
        job.scale(2)
        assert job.resource()["spec"]["workers"]["wanted"] == 2
        job.wait_world(2)
        (tmp_path / "go").touch()
        report = job.wait_undisturbed()
        assert sum(world["lost_steps"] for world in report["generations"]) == 0
        assert len(job.messages("scaled")) <= 4, "an autoscaler that flaps is not followed each time"
        until("the status to be over", lambda: job.condition("Complete") == "True")
        job.delete(pods)


def test_a_resource_that_is_deleted_while_its_job_trains_leaves_a_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    with launched(2, 2, tmp_path, JobOfResource, shoal={"checkpoint": {"path": str(saves)}}) as (job, pods):
        job.wait_step(3)
        job.delete(pods)
    assert list(saves.glob("**/manifest*")), "nothing was saved"
