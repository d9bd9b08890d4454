"""Workers that do not answer: frozen and thawed, merely slow, sole holders of blocks.

A frozen worker is evicted after its silence; when it thaws its world has gone on, so it changes nothing and comes
back as a joiner with another id.
"""

from __future__ import annotations

from typing import Any

import pytest
from integration.cluster import Cluster, until
from matrices import shortened
from rule import Edit, rule
from tiers import promise

LONG: dict[str, Any] = {"max_steps": 30}
PACE = 0.03


def kinds(cluster: Cluster) -> set[str]:
    return {event["kind"] for event in cluster.events()}


@pytest.mark.parametrize("instant", shortened(["forward", "exchange", "in_vote", "hand_out"], "in_vote"))
@promise("a worker freezes", "in_vote")
def test_a_frozen_worker_that_thaws_changes_nothing(instant: str) -> None:
    with Cluster(workers=3, options=LONG, faults=f"w1@4:{instant}:stop", pace=PACE) as cluster:
        cluster.wait_world(2)
        cluster.wait_step(6)
        cluster.cont("w1")
        cluster.wait_world(3)
        assert cluster.workers()["w1"]["state"] == "left"
        assert {"w0", "w2", "w3"} == {w for w, row in cluster.workers().items() if row["state"] == "active"}
        cluster.wait_undisturbed()
        assert "starting_over" in cluster.log("w1")
        assert cluster.wait_exit("w1") == 0


@rule(
    "A process that was replaced still counts until a step has been committed in a later generation; after that "
    "it changes nothing",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.running",
        "    valid = max(committed_in, turn.durable.first_valid_generation)\n",
        "    valid = world.generation\n",
    ),
)
def test_a_worker_comes_back_from_a_generation_that_is_long_over() -> None:
    with Cluster(workers=3, options={**LONG, "mirrors": 2}, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.stop("w1")
        cluster.wait_world(2)
        cluster.add()
        cluster.wait_world(3)
        cluster.until("its blocks to be filled", lambda _: cluster.workers()["w3"]["blocks"])
        cluster.kill("w0")
        cluster.wait_state("w0", "lost")
        cluster.wait_world(2)
        generation = cluster.job()["generation"]
        cluster.cont("w1")
        cluster.wait_world(3)
        assert cluster.job()["generation"] > generation
        cluster.wait_undisturbed()


def test_a_worker_that_answers_when_it_is_asked_is_not_evicted() -> None:
    with Cluster(workers=3, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.stop("w1")
        until("w1 to be asked", lambda: "suspected" in kinds(cluster))
        cluster.cont("w1")
        report = cluster.wait_undisturbed()
        assert "lost" not in kinds(cluster)
    assert [world["generation"] for world in report["generations"]] == [1]


def test_a_step_may_take_as_long_as_it_likes() -> None:
    with Cluster(workers=2, options={**LONG, "max_steps": 4}, pace=0.3) as cluster:
        cluster.wait_step(1)  # after more than a second, six heartbeats
        report = cluster.wait_undisturbed()
    assert [world["generation"] for world in report["generations"]] == [1]


@rule(
    "An inventory counts only if no step was committed in a later generation than its worker's",
    "A change of the world",
    broken_by=Edit(
        "shoal_controller.core.machine.phases.recovery",
        "    return inventory.generation >= committed_in and (inventory.generation >= floor or "
        "inventory.generation == 0)",
        "    return inventory.generation >= floor or inventory.generation == 0",
    ),
)
def test_a_frozen_sole_holder_saves_the_day_when_it_thaws() -> None:
    with Cluster(workers=3, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.stop("w1")
        cluster.kill("w2")
        cluster.wait_phase("stalled")
        assert "no living copy of" in cluster.job()["reason"]
        cluster.cont("w1")
        cluster.wait_world(2)
        assert cluster.workers()["w1"]["state"] == "active"
        cluster.wait_undisturbed()


def test_all_are_frozen_and_thaw() -> None:
    with Cluster(workers=3, options=LONG, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.stop("w0", "w1", "w2")
        until("all to be silent", lambda: "3 of 3 workers are silent" in cluster.job()["reason"])
        cluster.cont("w0", "w1", "w2")
        cluster.wait_undisturbed()
        assert "lost" not in kinds(cluster)
