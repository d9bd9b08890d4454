"""Two controllers, etcd and workers on hosts of their own: whatever link is cut or loses packets, the job ends with the
undisturbed fingerprint and no step lost.

`make check` runs one of them; `make outages` runs all (the variable SHOAL_OUTAGES).
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from faults.hosts import Hosts
from integration.cluster import until
from integration.controllers import outages
from integration.far_controllers import far_controllers

pytestmark = [
    pytest.mark.skipif(not Hosts.can_be_had(), reason="network namespaces need root, `ip`, `tc` and `nft`"),
    pytest.mark.timeout(300),
]


PACE = 0.06
LONG: dict[str, Any] = {"max_steps": 30}
TWO_MIRRORS: dict[str, Any] = {**LONG, "mirrors": 2}
PATIENT_SECONDS = 8.0
"""Longer than two attempts of a worker to reach a controller."""
CUT_SECONDS = 12.0
"""Longer than workers bear a silent controller, and look for another one."""


def test_a_leader_that_is_cut_off_from_half_of_its_workers_goes_on_with_the_others(tmp_path: Path) -> None:
    with far_controllers(tmp_path, 4, options=TWO_MIRRORS, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.cut(cluster.leader().name, "w2", "w3")
        cluster.wait_world(2)
        cluster.hosts.heal()
        cluster.wait_world(4)
        cluster.wait_undisturbed()


@outages
def test_a_leader_that_is_cut_off_from_all_of_its_workers_counts_nobody_out_and_training_goes_on(
    tmp_path: Path,
) -> None:
    options, spec = {**LONG, "max_steps": 100}, {"reconnect_seconds": PATIENT_SECONDS}
    with far_controllers(tmp_path, 4, options=options, spec=spec, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.cut(cluster.leader().name, "w0", "w1", "w2", "w3")
        until("the silence to be noticed", lambda: cluster.messages("silent"))
        step = cluster.job()["step"]
        threading.Event().wait(CUT_SECONDS)  # for so long it is cut off: there is no event to wait for
        cluster.hosts.heal()
        cluster.wait_step(step + 10)
        report = cluster.wait_undisturbed()
        assert [world["generation"] for world in report["generations"]] == [1]


@outages
def test_two_workers_that_are_cut_off_from_each_other_do_not_stop_the_others(tmp_path: Path) -> None:
    options = {**LONG, "max_steps": 60}  # who is evicted is back after 10 s
    with far_controllers(tmp_path, 3, options=options, spec={"progress_seconds": 2.0}, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.cut("w1", "w2")
        cluster.wait_world(2)
        cluster.kill_leader()
        cluster.wait_leader()
        cluster.hosts.heal()
        cluster.wait_world(3)
        cluster.wait_undisturbed()


@outages
def test_all_goes_well_where_five_of_a_hundred_packets_to_etcd_are_lost(tmp_path: Path) -> None:
    with far_controllers(tmp_path, 3, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.lose_to_etcd(5)
        cluster.kill("w1")
        cluster.wait_world(2)
        cluster.kill_leader()
        cluster.add()
        cluster.wait_world(3)
        cluster.wait_undisturbed()
