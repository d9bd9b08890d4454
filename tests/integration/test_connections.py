"""Connections that break or fall silent while nobody is dead: between two workers, and to the controller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from integration.cluster import Cluster, until
from integration.proxy import Proxy
from matrices import shortened
from tiers import promise

SHORT: dict[str, Any] = {"max_steps": 10}
LONG: dict[str, Any] = {"max_steps": 30}
PACE = 0.03
INSTANTS = ("forward", "backward", "exchange", "mirror", "in_vote", "hand_out")


@contextmanager
def behind_a_proxy(*workers: str) -> Iterator[tuple[Cluster, Proxy]]:
    """Three workers, some of which reach the controller through a proxy only."""
    cluster = Cluster(workers=3, options=LONG, pace=PACE)
    proxy = Proxy(cluster.grpc_port)
    with proxy.running():
        cluster.detours = dict.fromkeys(workers, proxy.port)
        with cluster:
            cluster.wait_step(2)
            yield cluster, proxy


# ---- between workers


@pytest.mark.parametrize("instant", shortened(INSTANTS, "exchange"))
@promise("a worker freezes", "exchange")
def test_a_connection_breaks_and_nobody_is_evicted(instant: str) -> None:
    with Cluster(workers=3, options=SHORT, faults=f"w1@4:{instant}:abort") as cluster:
        report = cluster.wait_undisturbed()
        assert [cluster.wait_exit(worker) for worker in cluster.pids] == [0, 0, 0]
        assert cluster.messages("lost") == []
    assert [world["workers"] for world in report["generations"]] == [3, 3]


def test_a_worker_whose_connections_break_again_and_again_is_evicted_for_a_while() -> None:
    """Pairs are counted, and each break may be reported by one of two peers only: two of three are by the same."""
    faults = ",".join(f"w1@{step}:exchange:abort" for step in (4, 6, 8))
    with Cluster(workers=3, options=SHORT, faults=faults) as cluster:
        report = cluster.wait_undisturbed()
        assert "worker w1 is evicted for 10 s" in cluster.messages("lost")[0]
        assert "its connection to another member broke 2 generations" in cluster.messages("lost")[0]
    sizes = [world["workers"] for world in report["generations"]]
    assert sizes[: sizes.index(2)] in ([3, 3], [3, 3, 3])


# ---- to the controller


def last_heard(cluster: Cluster) -> list[float]:
    """Seconds since each worker was last heard of."""
    lines = [line for line in cluster.metrics().splitlines() if line.startswith("shoal_worker_last_heartbeat_seconds{")]
    return [float(line.split()[-1]) for line in lines]


def test_nobody_is_evicted_when_it_is_the_controller_that_is_cut_off() -> None:
    with behind_a_proxy("w0", "w1", "w2") as (cluster, proxy):
        proxy.hold()
        until("two seconds of silence from all", lambda: len(last := last_heard(cluster)) == 3 and min(last) > 2.0)
        proxy.let_go()
        report = cluster.wait_undisturbed()
        assert cluster.messages("lost") == []
    assert [world["generation"] for world in report["generations"]] == [1]


def test_a_frozen_controller_stops_nobody() -> None:
    with Cluster(workers=3, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.stop_controller()
        cluster.release()
        until("all scripts to end", lambda: all(cluster.result_file(worker).exists() for worker in cluster.pids))
        cluster.cont_controller()
        report = cluster.wait_undisturbed()
        assert cluster.messages("lost") == []
    assert [world["generation"] for world in report["generations"]] == [1]


def test_a_worker_that_is_cut_off_from_the_controller_alone_is_evicted_and_comes_back() -> None:
    with behind_a_proxy("w1") as (cluster, proxy):
        proxy.hold()
        cluster.wait_world(2)
        cluster.wait_step(cluster.job()["step"] + 2)
        proxy.let_go()
        cluster.wait_world(3)
        cluster.wait_undisturbed()
        assert "starting_over" in cluster.log("w1")
