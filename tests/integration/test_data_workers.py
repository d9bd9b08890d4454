"""Data workers under real processes: they live through kills and joins, and go with the worker whose they are."""

from __future__ import annotations

import psutil
from integration.cluster import Cluster, undisturbed

OPTIONS = {"max_steps": 12}


def data_workers(cluster: Cluster, worker: str) -> list[psutil.Process]:
    return psutil.Process(cluster.pids[worker]).children()


def test_data_workers_live_through_a_kill_and_a_join_and_end_with_a_worker_that_is_killed() -> None:
    with Cluster(workers=3, options={**OPTIONS, "data_workers": 2}, pace=0.03) as cluster:
        cluster.wait_step(3)
        killed, kept = data_workers(cluster, "w1"), data_workers(cluster, "w2")
        assert (len(killed), len(kept)) == (2, 2)
        cluster.kill("w1")
        cluster.wait_world(2)
        cluster.add()
        cluster.wait_world(3)
        assert data_workers(cluster, "w2") == kept
        psutil.wait_procs(killed, timeout=100)
        assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in killed)
        cluster.release()
        report = cluster.wait_undisturbed()
    assert report["fingerprint"] == undisturbed(OPTIONS)
