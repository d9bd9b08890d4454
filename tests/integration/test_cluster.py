"""The tests' cluster itself, with the plainest story of each kind."""

from __future__ import annotations

from typing import Any

import pytest
from integration.cluster import Cluster, alone, undisturbed

OPTIONS: dict[str, Any] = {"max_steps": 12}
LONGER: dict[str, Any] = {"max_steps": 30, "pace": 0.01}


def test_a_world_of_three_ends_with_the_bits_of_one() -> None:
    with Cluster(workers=3, options=OPTIONS) as cluster:
        cluster.wait_done()
        assert cluster.fingerprint == undisturbed(OPTIONS)
        assert [cluster.wait_exit(worker) for worker in cluster.pids] == [0, 0, 0]
        assert cluster.result("w1")["step"] == 12
        assert cluster.reasons() == ["start"]


def test_a_world_of_one_gives_the_same_bits_twice() -> None:
    assert alone(OPTIONS)["fingerprint"] == undisturbed(OPTIONS)


def test_a_killed_worker_costs_no_step() -> None:
    with Cluster(workers=3, options=LONGER) as cluster:
        cluster.wait_step(5)
        cluster.kill("w1")
        cluster.wait_state("w1", "lost")
        cluster.wait_done()
        assert cluster.exit_code("w1") == -9
        assert cluster.fingerprint == undisturbed(LONGER)
        assert cluster.report()["generations"][1]["reason"] == "kill"
        assert [world["lost_steps"] for world in cluster.report()["generations"]][:2] == [0, 0]


def test_the_controller_can_be_killed_and_started_again() -> None:
    with Cluster(workers=2, options=LONGER) as cluster:
        cluster.wait_step(3)
        cluster.kill_controller()
        cluster.start_controller()
        cluster.wait_done()
        assert cluster.fingerprint == undisturbed(LONGER)


def test_what_is_waited_for_in_vain_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="waited 0 s for step 1000"), Cluster(workers=1, options=LONGER) as cluster:
        cluster.until("step 1000", lambda job: job["step"] >= 1000, patience=0.1)
    assert "---- w0.log" in capsys.readouterr().out
