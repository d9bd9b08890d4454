"""Real hosts with a cable each, as network namespaces: what loopback cannot show."""

from __future__ import annotations

import pytest
from faults.hosts import Hosts
from faults.job import Job, wait
from faults.run import undisturbed

STEPS, PACE = 40, 0.1


def is_in_a_world(job: Job, workers: int, step: int) -> bool:
    seen = job.look()
    return bool(seen) and seen["workers"]["active"] == workers and seen["step"] >= step


@pytest.mark.skipif(not Hosts.can_be_had(), reason="network namespaces need root, `ip`, `tc` and `nft`")
@pytest.mark.timeout(300)  # five processes import torch, four of them at once
def test_a_cable_cut_between_two_hosts_is_named_and_the_others_train_on_to_the_same_bits() -> None:
    with Hosts(3) as hosts, Job(hosts, 3, STEPS, PACE, progress_seconds=2.0) as job:
        wait("three workers to train", lambda: is_in_a_world(job, 3, 3), 120)
        hosts.cut(1, 2)
        hosts.cut(2, 1)
        step = job.look()["step"]
        wait("two of them to train on", lambda: is_in_a_world(job, 2, step + 3))
        [why] = [message for message in job.messages("prepare") if "cannot reach each other" in message]
        assert "has waited for" in why
        [lost] = job.messages("lost")
        assert "it cannot reach w" in lost
        hosts.heal()
        wait("the end", lambda: job.look().get("phase") == "succeeded")
        assert job.report()["fingerprint"] == undisturbed(STEPS)
