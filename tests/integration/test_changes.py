"""Planned changes with real processes: drain, scale, pause, and a run that changes its world ten times.

No step is lost, nobody waits for the controller, and the bits are those of the undisturbed run. Workers are ranked in
the order of their ids.
"""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest
from integration.cluster import Cluster, until
from matrices import further, shortened
from tiers import promise

LONG: dict[str, Any] = {"max_steps": 30}
PACE = 0.03


# ---- drain


@pytest.mark.parametrize("victim", shortened(["w0", "w2"], "w0"))
@promise("a worker is drained", "w0")
def test_a_worker_is_drained_by_rest(victim: str) -> None:
    with Cluster(workers=3, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.drain(victim)
        assert cluster.wait_exit(victim) == 0
        assert cluster.workers()[victim]["state"] == "left"
        report = cluster.wait_undisturbed()
        assert not cluster.result_file(victim).exists(), "a drained worker does not get behind its loop"
    drained = [world for world in report["generations"] if world["reason"] == "drain"]
    assert drained[-1]["workers"] == 2
    assert [world["bytes"]["pause"] for world in drained] == [0] * len(drained)


@promise("a worker is drained")
def test_sigterm_is_a_wish_to_be_drained() -> None:
    with Cluster(workers=3, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.terminate("w1")
        assert cluster.wait_exit("w1") == 0
        cluster.wait_undisturbed()
        assert "drain" in cluster.reasons()


def test_all_but_one_are_told_to_go_at_once_and_the_last_is_kept() -> None:
    with Cluster(workers=4, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        for worker in ("w3", "w0", "w2"):
            cluster.drain(worker)
        with pytest.raises(AssertionError, match=r"409 .*worker w1 is the last one of job job"):
            cluster.drain("w1")
        assert [cluster.wait_exit(worker) for worker in ("w3", "w0", "w2")] == [0, 0, 0]
        cluster.wait_undisturbed()


def test_the_last_worker_stays_until_a_joiner_has_taken_over() -> None:
    with Cluster(workers=1, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.terminate("w0")
        cluster.wait_state("w0", "draining")
        cluster.add()
        assert cluster.wait_exit("w0") == 0
        cluster.wait_undisturbed()
        assert cluster.wait_exit("w1") == 0


def test_a_drained_worker_is_killed_before_it_has_handed_over() -> None:
    options = {**LONG, "shoal": {"fill_bytes_per_step": 40_000}}  # a block a step
    with Cluster(workers=3, options=options, pace=PACE, faults="w1@0:fill:kill") as cluster:
        cluster.wait_step(2)
        cluster.drain("w1")
        assert cluster.wait_exit("w1") == -signal.SIGKILL
        cluster.wait_world(2)
        cluster.wait_undisturbed()


# ---- scale


@promise("a worker joins")
def test_the_job_is_scaled_up_and_down_by_rest() -> None:
    with Cluster(workers=2, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.scale(3)
        cluster.add()
        cluster.wait_world(3)
        cluster.scale(1)
        assert [cluster.wait_exit(worker) for worker in ("w1", "w2")] == [0, 0]
        cluster.wait_world(1)
        with pytest.raises(AssertionError, match="cannot be scaled to 9 workers; expected from 1 to 8"):
            cluster.scale(9)
        cluster.wait_undisturbed()
        assert {"scale_up", "scale_down"} <= set(cluster.reasons())


@promise("a worker joins")
@pytest.mark.parametrize("stage", shortened([0, 1, 2, 3], 1))
def test_a_joiner_has_lanes_in_its_first_world(stage: int) -> None:
    with Cluster(workers=2, options={**LONG, "stage": stage}, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.add()
        cluster.wait_world(3)
        assert lanes_at_first(cluster, "w2"), "it is no standby before"
        cluster.wait_undisturbed()


def lanes_at_first(cluster: Cluster, worker: str) -> str:
    """The lanes of a worker in its first world, as it tells them."""
    found = until(
        f"{worker} to be in a world",
        lambda: re.search(r'"lanes": \[([^]]*)\], .*"event": "world"', cluster.log(worker)),
    )
    return found[1]


# ---- pause


@promise("the job is paused")
def test_a_paused_job_commits_nothing_and_its_world_can_change() -> None:
    with Cluster(workers=3, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.pause()
        cluster.wait_phase("paused")
        step = began_at(cluster, "w1", 2)
        cluster.kill("w0")
        cluster.wait_state("w0", "lost")
        cluster.until("two to go on", lambda job: job["phase"] == "paused" and job["workers"]["active"] == 2)
        cluster.add()
        cluster.until("a joiner", lambda job: job["phase"] == "paused" and job["workers"]["active"] == 3)
        assert began_at(cluster, "w3", cluster.job()["generation"]) == step
        cluster.resume()
        cluster.wait_world(3)
        cluster.wait_undisturbed()


def began_at(cluster: Cluster, worker: str, generation: int) -> int:
    """The step at which a generation began, as a member tells it."""
    found = until(
        f"{worker} to be in generation {generation}",
        lambda: re.search(rf'"generation": {generation}, .*"step": (\d+), .*"event": "world"', cluster.log(worker)),
    )
    return int(found[1])


def test_the_last_worker_of_a_paused_job_hands_over_to_a_joiner() -> None:
    with Cluster(workers=1, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.pause()
        cluster.wait_phase("paused")
        cluster.terminate("w0")
        cluster.wait_state("w0", "draining")
        cluster.add()
        assert cluster.wait_exit("w0") == 0
        assert cluster.job()["phase"] == "paused"
        cluster.resume()
        cluster.wait_undisturbed()


def test_below_its_least_number_of_workers_a_job_waits() -> None:
    with Cluster(workers=2, options=LONG, pace=PACE, spec={"workers": {"wanted": 2, "min": 2}}) as cluster:
        cluster.wait_step(2)
        cluster.kill("w1")
        cluster.wait_state("w1", "lost")
        cluster.until("a world of one", lambda job: job["workers"]["active"] == 1 and job["phase"] != "resizing")
        generation = cluster.job()["generation"]
        cluster.add()
        cluster.wait_world(2)
        assert cluster.job()["generation"] > generation
        cluster.wait_undisturbed()


# ---- who comes


def test_other_initial_weights_are_replaced_by_the_jobs() -> None:
    with Cluster(workers=1, options=LONG, pace=PACE, spec={"workers": {"wanted": 2}}) as cluster:
        cluster.add(weights_seed=5)
        cluster.wait_step(2)
        cluster.add(weights_seed=6)
        cluster.wait_world(3)
        cluster.kill("w0")
        cluster.wait_state("w0", "lost")
        cluster.wait_undisturbed()
        assert "initial_state_replaced" in cluster.log("w1")


# ---- many


@further
def test_a_run_changes_its_world_ten_times() -> None:
    with Cluster(workers=3, options={"max_steps": 75}, pace=PACE) as cluster:
        cluster.wait_step(2)
        for youngest in ("w3", "w4", "w5"):
            cluster.add()
            cluster.wait_world(4)
            cluster.until("its blocks to be filled", lambda _, w=youngest: cluster.workers()[w]["blocks"])
            oldest = f"w{int(youngest[1:]) - 3}"
            cluster.kill(oldest)
            cluster.wait_state(oldest, "lost")
            cluster.wait_world(3)
            cluster.until("a copy of each block", lambda _: unmirrored(cluster) == 0)
        cluster.drain("w4")
        assert cluster.wait_exit("w4") == 0
        cluster.terminate("w3")
        assert cluster.wait_exit("w3") == 0
        cluster.add(2)
        cluster.wait_world(3)
        cluster.pause()
        cluster.wait_phase("paused")
        cluster.resume()
        cluster.wait_phase("running")
        report = cluster.wait_undisturbed()
    assert len(report["generations"]) >= 11
    assert {"kill", "join", "drain", "balance"} <= {world["reason"] for world in report["generations"]}


def unmirrored(cluster: Cluster) -> int:
    """Blocks that only one worker holds, as REST counts them."""
    workers = [worker for worker in cluster.workers().values() if worker["state"] == "active"]
    return sum(worker["blocks"] for worker in workers) - sum(worker["mirrored_blocks"] for worker in workers)
