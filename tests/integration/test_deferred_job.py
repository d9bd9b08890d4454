"""A model that is built without memory, most of it frozen, in stage 3 under real processes: one is killed."""

from __future__ import annotations

import signal

from integration.cluster import Cluster, undisturbed

OPTIONS = {"max_steps": 10, "deferred": True}


def test_a_deferred_job_on_a_frozen_base_ends_after_a_kill_as_undisturbed_in_any_stage() -> None:
    options = {**OPTIONS, "stage": 3}
    with Cluster(workers=3, options=options, faults="w1@4:gather:kill", pace=0.5) as cluster:
        cluster.wait_world(2)
        cluster.add()
        cluster.wait_world(3)
        cluster.release()
        report = cluster.wait_undisturbed()
        assert cluster.exit_code("w1") == -signal.SIGKILL
    planned = ("join", "balance")  # what a joiner has been filled with may be promoted before
    assert [one["reason"] for one in report["generations"] if one["reason"] not in planned][:2] == ["start", "kill"]
    assert report["fingerprint"] == undisturbed({**OPTIONS, "stage": 0})
