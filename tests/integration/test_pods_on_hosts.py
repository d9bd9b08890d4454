"""Nodes as hosts of their own: one whose cable is out takes its pods along, and nobody can say that they are dead."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.hosts import Hosts
from integration.cluster import until
from integration.job_of_pods import host_of, launched

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


@pytest.mark.skipif(not Hosts.can_be_had(), reason="network namespaces need root, `ip`, `tc` and `nft`")
@pytest.mark.timeout(180)
def test_a_job_goes_on_without_an_unreachable_node_and_gets_its_room_back_when_the_pod_is_gone(tmp_path: Path) -> None:
    with Hosts(3) as hosts, launched(3, 3, tmp_path, hosts=hosts, max_steps=300) as (job, pods):
        job.wait_world(3)
        lost = job.node_of("w1")
        pods.silence(lost)
        pods.node(lost, ready="Unknown")
        job.wait_step(job.job()["step"] + 5)
        assert job.reasons() == ["start"], "a node that is not ready proves nothing: its pod trains on"
        pods.node(lost)

        hosts.unplug(host_of(lost))
        job.wait_world(2)
        job.until("its pod to be told to end", lambda _: "deletionTimestamp" in pods.pod("w1")["metadata"])
        job.until("another to wait for room", lambda seen: "Insufficient pods" in seen["reason"])
        pods.node(lost, ready="Unknown")
        job.wait_step(job.job()["step"] + 3)
        assert pods.pod("w1"), "its process may live"

        pods.node(lost, OUT_OF_SERVICE, ready="Unknown")
        until("its pod to be gone", lambda: not pods.pod("w1"))
        assert not pods.pod("w3")["spec"].get("nodeName")

        hosts.plug(host_of(lost))
        pods.silence(lost, ends=True)
        pods.node(lost)
        job.wait_world(3)
        assert job.node_of("w3") == lost
        (tmp_path / "go").touch()
        report = job.wait_undisturbed()
    assert [world["reason"] for world in report["generations"]][:2] == ["start", "kill"]
