"""Optimizer state in files under real processes: one is killed while it writes, another joins and is filled."""

from __future__ import annotations

import signal
from pathlib import Path

from integration.cluster import Cluster, undisturbed
from tiers import promise

OPTIONS = {"max_steps": 10, "stage": 2}


@promise("state on the host or in files")
def test_a_worker_killed_in_the_middle_of_a_write_costs_no_step_and_leaves_no_file(tmp_path: Path) -> None:
    script = "integration.scripts:train_and_die_writing"
    with Cluster(workers=3, options={**OPTIONS, "offload": str(tmp_path)}, script=script, pace=0.01) as cluster:
        cluster.wait_world(2)
        cluster.add()
        cluster.wait_world(3)
        cluster.release()
        report = cluster.wait_undisturbed()
        assert cluster.exit_code("w1") == -signal.SIGKILL
        assert "state_files" in cluster.log("w0")
        assert list(tmp_path.iterdir()) == []
    assert [one["reason"] for one in report["generations"]][:2] == ["start", "kill"]
    assert report["fingerprint"] == undisturbed(OPTIONS)


def test_a_script_that_ends_with_its_loop_gives_its_digest_and_serves_a_loss_after_it(tmp_path: Path) -> None:
    """Both take threads, which Python starts no more once it calls what `atexit` has."""
    options = {**OPTIONS, "offload": str(tmp_path), "bare": True}
    with Cluster(workers=3, options=options, faults="w1@10:after_last:kill") as cluster:
        cluster.wait_done()
        report = cluster.report()
        assert (cluster.wait_exit("w1"), cluster.wait_exit("w0")) == (-signal.SIGKILL, 0)
    assert [one["reason"] for one in report["generations"]] == ["start", "kill"]
    assert report["fingerprint"] == undisturbed(OPTIONS)
