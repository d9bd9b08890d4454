"""A compiled module through changes of the world, with real processes: it is compiled once in each, and never again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from integration.cluster import Cluster, warmed
from matrices import shortened
from shoal_protos.memory_estimate import BUILT_STAGES

OPTIONS: dict[str, Any] = {"max_steps": 30, "lanes": 4, "compile": "aot_eager"}
PACE = 0.2
"""A joiner compiles before it is one, which takes a while where the machine is full."""


@pytest.fixture(scope="module", autouse=True)
def compiler() -> Iterator[None]:
    """Processes that are to compile are forked from one that has the compiler; all others have none, as users' have."""
    with warmed(["integration.compiler"]):
        yield


@pytest.mark.parametrize("stage", shortened(list(BUILT_STAGES), 3))
def test_a_compiled_module_is_compiled_once_in_each_process_through_a_kill_a_join_and_a_drain(stage: int) -> None:
    """Into one graph; where parameters are sharded into one for each module that is entered."""
    with Cluster(workers=3, options={**OPTIONS, "stage": stage}, pace=PACE) as cluster:
        cluster.wait_step(2)
        cluster.kill("w1")
        cluster.wait_world(2)
        cluster.add()
        cluster.wait_world(3)
        cluster.drain("w0")
        assert cluster.wait_exit("w0") == 0
        report = cluster.wait_undisturbed()
        graphs = {worker: re.findall(r"^graphs (\d+)$", cluster.log(worker), re.MULTILINE) for worker in cluster.pids}
    assert graphs.keys() == {"w0", "w1", "w2", "w3"} and all(len(grown) == 1 for grown in graphs.values()), graphs
    compiled = {number for grown in graphs.values() for number in grown}
    assert len(compiled) == 1 and (stage == 3 or compiled == {"1"}), "after a change nothing was compiled again"
    assert {"start", "kill", "join", "drain"} <= {world["reason"] for world in report["generations"]}
