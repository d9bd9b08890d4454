"""Workers that die: at each instant of a step, in the middle of a change, several at once, the last, on their way in.

Deaths at an instant are planted (`SHOAL_FAULT`); the others come from outside. Every run ends with the bits of the
undisturbed one.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
from integration.cluster import Cluster

SHORT: dict[str, Any] = {"max_steps": 8}
TWICE: dict[str, Any] = {**SHORT, "mirrors": 2}
LONG: dict[str, Any] = {"max_steps": 100}

INSTANTS = ("forward", "backward", "exchange", "mirror", "vote", "in_vote", "optimizer", "hand_out")
KILLED = -signal.SIGKILL


@pytest.mark.parametrize("instant", INSTANTS)
def test_a_worker_killed_at_any_instant_of_a_step_costs_no_step(instant: str) -> None:
    with Cluster(workers=3, options=SHORT, faults=f"w1@4:{instant}:kill") as cluster:
        report = cluster.wait_undisturbed()
        assert cluster.exit_code("w1") == KILLED
    first, second = report["generations"][:2]
    assert (first["reason"], second["reason"]) == ("start", "kill")
    assert second["workers"] == 2
    assert second["promoted_blocks"] > 0
