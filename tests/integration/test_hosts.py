"""Real hosts with a cable each, as network namespaces: what loopback cannot show. `make faults` has more of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from faults.hosts import Hosts
from integration.cluster import Cluster
from integration.job_of_pods import fork_on


class FarWorkers(Cluster):
    """The controller is on host 0, w0 on host 1, and so on."""

    def __init__(self, hosts: Hosts, **given: Any) -> None:
        self.hosts, self.host = hosts, hosts.address(0)
        super().__init__(**given)

    def fork(self, who: str, call: str, arguments: Mapping[str, Any], env: Mapping[str, str], log: Path) -> int:
        host = 1 + int(who.removeprefix("w")) if who.startswith("w") else 0
        here = {"SHOAL_FAILURE_DOMAIN": f"host{host}"} if host else {"SHOAL_OPEN": "true"}
        return fork_on(self.hosts, host, call, arguments, {**env, **here}, log)


@pytest.mark.skipif(not Hosts.can_be_had(), reason="network namespaces need root, `ip`, `tc` and `nft`")
def test_a_cable_cut_between_two_hosts_is_named_and_the_others_train_on_to_the_same_bits() -> None:
    with (
        Hosts(3) as hosts,
        FarWorkers(hosts, workers=3, options={"max_steps": 30}, spec={"progress_seconds": 2.0}, pace=0.06) as cluster,
    ):
        cluster.wait_world(3)
        cluster.wait_step(3)
        hosts.cut(1, 2)
        hosts.cut(2, 1)
        step = cluster.job()["step"]
        cluster.wait_world(2)
        cluster.wait_step(step + 3)
        [why] = [message for message in cluster.messages("prepare") if "cannot reach each other" in message]
        assert "has waited for" in why
        [lost] = cluster.messages("lost")
        assert "it cannot reach w" in lost
        hosts.heal()
        cluster.wait_undisturbed()
