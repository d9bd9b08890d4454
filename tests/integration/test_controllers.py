"""Several controllers share an etcd: one leads, any answers, and when it dies, freezes or ends another one leads."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from etcd_cluster import Cluster as Etcd
from etcd_cluster import etcd_cluster
from integration.cluster import ended, send_signal, until
from integration.controllers import Controllers
from rule import holds
from tiers import promise

LONG: dict[str, Any] = {"max_steps": 30}
PACE = 0.03
PATIENT: dict[str, Any] = {"reconnect_seconds": 5.0}
"""For workers that find the next leader late, because the machine has other work too."""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


def test_any_controller_answers_and_changes_a_job_as_the_one_that_leads(etcd: Etcd) -> None:
    with Controllers(etcd, workers=2, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        leader, follower = cluster.leader(), cluster.others()[0]
        shown = follower.ask("/v1/jobs/job")
        assert shown.json()["phase"] == "running" and "age" not in shown.headers
        assert follower.ask("/v1/jobs/other").status_code == 404
        refused = follower.ask("/v1/jobs/job/scale", method="POST", json={"workers": 0})
        assert refused.status_code == 400 and refused.headers["content-type"] == "application/problem+json"
        assert follower.ask("/v1/jobs/job/scale", method="POST", json={"workers": 1}).status_code == 202
        assert leader.ask("/v1/jobs/job").json()["workers"]["wanted"] == 1
        again = follower.ask("/v1/jobs/job/pause", method="POST", headers={"shoal-forwarded": "1"})
        assert again.status_code == 503 and "this controller does not lead" in again.json()["detail"]
        with httpx.stream(
            "GET",
            f"{follower.url}/v1/jobs/job/events",
            headers={"accept": "text/event-stream"},
            trust_env=False,
            verify=False,
            timeout=100,
        ) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert next(line for line in stream.iter_lines() if line.startswith("data:"))
        assert "shoal_job_step{" in leader.ask("/metrics").text
        assert "shoal_job_step{" not in follower.ask("/metrics").text, "nothing is counted twice"
        cluster.wait_undisturbed()


@promise("several controllers")
def test_the_leader_is_killed_and_another_one_goes_on_with_the_job(etcd: Etcd) -> None:
    with Controllers(etcd, workers=3, options=LONG, spec=PATIENT, pace=PACE) as cluster:
        cluster.wait_step(2)
        generation = cluster.job()["generation"]
        before = cluster.kill_leader()
        cluster.wait_leader(but=before)
        cluster.wait_step(cluster.job()["step"] + 2)
        assert cluster.job()["generation"] == generation, "a change of the leader changes no world"
        cluster.kill("w1")
        cluster.wait_world(2)
        cluster.start_controller()
        cluster.wait_undisturbed()


def test_a_leader_that_is_told_to_end_hands_over_at_once(etcd: Etcd) -> None:
    with Controllers(etcd, workers=2, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        leader = cluster.leader()
        send_signal(leader.pid, signal.SIGTERM)
        cluster.wait_leader(but=leader)
        until("the leader to end", lambda: leader.pid in ended())
        cluster.wait_step(cluster.job()["step"] + 2)
        cluster.wait_undisturbed()


@holds("A controller says on every stream")
def test_a_leader_that_was_frozen_follows_the_next_one_and_writes_nothing(etcd: Etcd) -> None:
    with Controllers(etcd, workers=3, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        frozen = cluster.leader()
        send_signal(frozen.pid, signal.SIGSTOP)
        leader = cluster.wait_leader(but=frozen)
        cluster.kill("w1")
        until("the world without w1", lambda: leader.ask("/v1/jobs/job").json()["workers"]["active"] == 2)
        events = len(leader.ask("/v1/jobs/job/events").json()["events"])
        send_signal(frozen.pid, signal.SIGCONT)
        until("it to follow", lambda: frozen.ask("/healthz").json()["trouble"] == "" and not frozen.leads())
        assert frozen.ask("/v1/jobs/job").json()["workers"]["active"] == 2
        assert leader.leads() and len(leader.ask("/v1/jobs/job/events").json()["events"]) >= events
        cluster.wait_undisturbed()


def test_while_nobody_leads_reads_are_answered_with_their_age_and_writes_are_refused(etcd: Etcd) -> None:
    with Controllers(etcd, workers=2, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        follower = cluster.others()[0]
        send_signal(follower.pid, signal.SIGSTOP)  # or it would be elected
        leader = cluster.kill_leader()
        etcd.nodes[0].freeze()
        send_signal(follower.pid, signal.SIGCONT)
        try:
            refused = until("a refusal", lambda: write(follower))
            assert refused.status_code == 503 and "retry-after" in refused.headers
        finally:
            etcd.nodes[0].thaw()
        cluster.wait_leader(but=leader)
        cluster.wait_undisturbed()


def write(controller: Any) -> httpx.Response | None:
    try:
        return controller.ask("/v1/jobs/job/scale", method="POST", json={"workers": 2}, timeout=100)
    except httpx.TransportError:
        return None
