"""Nobody is dead, all are heard, and nothing moves: real processes, a link that carries nothing, code that hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.cluster import Cluster
from matrices import shortened
from rule import holds

PACE = 0.03


@holds("When no vote passes although")
@pytest.mark.parametrize("one_way", shortened([False, True], True), ids=["both ways", "one way"])
def test_two_workers_that_cannot_reach_each_other_are_parted_and_the_job_ends_with_the_same_bits(
    one_way: bool, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    options = {"max_steps": 30, "broken": str(broken), "one_way": one_way}
    script = "integration.hindered:beside_a_broken_link"
    with Cluster(workers=3, options=options, script=script, spec={"progress_seconds": 2}, pace=PACE) as cluster:
        cluster.wait_step(3)
        broken.touch()
        cluster.wait_world(2)
        step = cluster.job()["step"]
        [lost] = cluster.messages("lost")
        assert lost == "worker w2 is evicted for 10 s: it cannot reach w1"
        [why] = [message for message in cluster.messages("prepare") if "cannot reach each other" in message]
        assert "has waited for" in why and "w1" in why and "w2" in why
        cluster.wait_step(step + 3)
        cluster.wait_undisturbed()


@holds("… and a chain that ends in user")
def test_a_script_that_hangs_is_named_and_ends_after_stall_seconds_and_the_others_go_on(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    options = {"max_steps": 30, "broken": str(broken), "hangs": "w1"}
    script = "integration.hindered:with_code_that_hangs"
    spec = {"progress_seconds": 1, "stall_seconds": 10}
    with Cluster(workers=3, options=options, script=script, spec=spec, pace=PACE) as cluster:
        cluster.wait_step(3)
        broken.touch()
        cluster.until("w1 to be named", lambda job: "waiting for worker w1 (in user code" in job["reason"])
        waited = [line for line in cluster.metrics().splitlines() if line.startswith("shoal_worker_waits_for_seconds")]
        assert [line for line in waited if 'worker="w1"' in line and not line.endswith(" 0.0")], waited
        cluster.wait_world(2)
        assert "its script has made no progress for" in cluster.messages("dismissed")[0]
        cluster.wait_undisturbed()
