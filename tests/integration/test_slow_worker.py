"""A worker at a twelfth of the others' speed, with real processes: it has no lanes and rehearses one now and then, and
gets lanes again once it is well. No bit depends on it.
"""

from __future__ import annotations

import re
from typing import Any

from integration.cluster import Cluster, undisturbed

SLOW = "w1"
OPTIONS: dict[str, Any] = {"lanes": 6, "max_steps": 400, "shoal": {"on_slow": "share"}}
PACE = 0.04
"""Seconds of a lane: far more than what it computes."""
REHEARSED = "a lane is rehearsed"
"""What the slow worker's script prints."""


def test_a_worker_at_a_twelfth_of_the_speed_has_no_lanes_until_it_is_well() -> None:
    cluster = Cluster(workers=3, options=OPTIONS, pace=PACE, script="integration.scripts:train_beside_a_slow_one")
    well = cluster.folder / "well"
    cluster.options |= {"slow": SLOW, "well": str(well)}
    with cluster:
        cluster.until("others to have its lanes", lambda _: shared(cluster) and not cluster.workers()[SLOW]["lanes"])
        now, before = map(float, shared(cluster)[0])
        assert now < before / 2, "a step is as long as the others' lanes"
        rehearsed = cluster.log(SLOW).count(REHEARSED)
        cluster.until("another rehearsal", lambda _: cluster.log(SLOW).count(REHEARSED) > rehearsed)
        assert not cluster.workers()[SLOW]["lanes"], "it is as slow as before"
        well.touch()
        cluster.until("lanes of its own", lambda _: cluster.workers()[SLOW]["lanes"])
        cluster.wait_done()
        report = cluster.report()
    assert report["fingerprint"] == undisturbed(OPTIONS)
    assert [world["lost_steps"] for world in report["generations"]] == [0] * len(report["generations"])


def shared(cluster: Cluster) -> list[tuple[str, str]]:
    """What the lanes of a step take where the slow worker is to have none, and what they took; in seconds."""
    found = (
        re.search(rf"{SLOW} is to train 0 lanes .*take (\S+) s in place of (\S+) s", message)
        for message in cluster.messages("lanes_shared")
    )
    return [(one[1], one[2]) for one in found if one is not None]
