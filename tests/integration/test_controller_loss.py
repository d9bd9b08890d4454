"""The controller is killed with SIGKILL and started again with the same store: workers go on, and changes end well."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from integration.cluster import Cluster, state_of, until
from matrices import shortened
from rule import holds
from tiers import promise

LONG: dict[str, Any] = {"max_steps": 30}
TWO_MIRRORS: dict[str, Any] = {**LONG, "mirrors": 2}
PACE = 0.03
PATIENT: dict[str, Any] = {"reconnect_seconds": 10.0}
"""For workers that are to find a controller again, and do so late where the machine has other work, too."""


@promise("the controller is lost")
def test_training_goes_on_without_a_controller_and_resizes_after_it_is_back() -> None:
    with Cluster(workers=3, options=LONG, spec=PATIENT, pace=PACE) as cluster:
        cluster.wait_step(2)
        step = cluster.job()["step"]
        cluster.kill_controller()
        cluster.start_controller()
        cluster.wait_step(step + 2)
        assert cluster.job()["generation"] == 1
        cluster.kill("w1")
        cluster.wait_state("w1", "lost")
        cluster.wait_world(2)
        cluster.add()
        cluster.wait_world(3)
        cluster.wait_undisturbed()


@holds("For a worker that is")
def test_a_controller_with_an_empty_store_ends_no_worker_that_trains() -> None:
    with Cluster(workers=2, options=LONG, spec=PATIENT, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.kill_controller()
        cluster.start_controller(store="empty")
        until("both to be refused", lambda: all("there is no job" in cluster.log(worker) for worker in ("w0", "w1")))
        cluster.kill_controller()
        cluster.start_controller()
        cluster.wait_step(cluster.job()["step"] + 2)
        assert cluster.job()["generation"] == 1
        cluster.wait_undisturbed()


def test_a_job_comes_to_its_end_without_a_controller() -> None:
    with Cluster(workers=2, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.kill_controller()
        cluster.release()
        until("the scripts to end", lambda: all(cluster.result_file(worker).exists() for worker in ("w0", "w1")))
        cluster.start_controller()
        cluster.wait_undisturbed()
        assert [cluster.wait_exit(worker) for worker in ("w0", "w1")] == [0, 0]


@pytest.mark.parametrize("instant", shortened(["prepare", "group", "promote"], "group"))
@promise("the controller is lost", "group")
def test_the_controller_is_killed_while_a_loss_is_mended(instant: str) -> None:
    """w2 is frozen in the middle of it, so that it is still under way, and thaws after the restart."""
    faults = f"w1@4:exchange:kill,w2@3:{instant}:stop"
    with Cluster(workers=4, options=TWO_MIRRORS, faults=faults, pace=PACE) as cluster:
        until("w2 to be frozen", lambda: state_of(cluster.pids["w2"]) == "T")
        cluster.kill_controller()
        cluster.start_controller()
        cluster.cont("w2")
        cluster.wait_world(3)
        cluster.wait_undisturbed()


@holds("A change that needs several")
def test_a_controller_that_is_killed_between_the_parts_of_a_change_comes_back() -> None:
    with Cluster(workers=3, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.kill_controller()
        cluster.start_controller(program="integration.short_lived:controller")
        cluster.kill("w1")
        cluster.wait_controller_death()
        cluster.start_controller()
        cluster.wait_world(2)
        cluster.wait_undisturbed()


def test_the_controller_and_a_worker_die_while_a_loss_is_mended() -> None:
    faults = "w1@4:exchange:kill,w2@3:group:stop"
    with Cluster(workers=4, options=TWO_MIRRORS, faults=faults, pace=PACE) as cluster:
        until("w2 to be frozen", lambda: state_of(cluster.pids["w2"]) == "T")
        cluster.kill_controller()
        cluster.kill("w2")
        cluster.start_controller()
        cluster.wait_world(2)
        cluster.wait_undisturbed()


def test_a_planned_change_begins_without_the_controller_that_has_planned_it() -> None:
    with Cluster(workers=2, options=LONG, faults="w2@0:group:stop", pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.add()
        until("w2 to be about to meet the others", lambda: state_of(cluster.pids["w2"]) == "T")
        cluster.kill_controller()
        cluster.cont("w2")
        until("w2 to be in a world", lambda: '"event": "world"' in cluster.log("w2"))
        cluster.start_controller()
        cluster.wait_world(3)
        cluster.wait_undisturbed()


def test_a_planned_change_that_another_controller_has_planned_gets_its_time() -> None:
    with Cluster(workers=2, options=LONG, faults="w2@0:group:stop", pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.add()
        until("w2 to be about to meet the others", lambda: state_of(cluster.pids["w2"]) == "T")
        cluster.kill_controller()
        cluster.start_controller()
        cluster.wait_step(cluster.job()["step"] + 1)
        cluster.cont("w2")
        cluster.wait_state("w2", "active")
        cluster.wait_undisturbed()
        assert cluster.messages("dismissed") == []


def test_a_worker_dies_while_no_controller_is_there() -> None:
    with Cluster(workers=3, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.kill_controller()
        cluster.kill("w1")
        assert cluster.wait_exit("w1") == -signal.SIGKILL
        cluster.start_controller()
        cluster.wait_world(2)
        cluster.wait_undisturbed()


def test_the_controller_is_killed_five_times() -> None:
    with Cluster(workers=3, options=LONG, pace=PACE) as cluster:
        for turn in range(5):
            cluster.wait_step(3 * (turn + 1))
            cluster.kill_controller()
            cluster.start_controller()
        cluster.wait_undisturbed()
