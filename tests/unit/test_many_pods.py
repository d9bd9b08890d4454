"""A thousand pods: made, adopted by another controller, and deleted; it prints how long that takes."""

from __future__ import annotations

import time
from pathlib import Path

from asynchronous import asynchronous
from pod_team import SPEC, team
from shoal_controller.core.machine.events import Exited

PODS = 1000


@asynchronous
async def test_a_thousand_pods_are_made_adopted_and_deleted(tmp_path: Path) -> None:
    async with team(tmp_path) as one:
        one.cluster.node("large")
        one.kubelets.per_node = PODS
        began = time.perf_counter()
        for number in range(PODS):
            await one.launcher.spawn(f"w{number}", SPEC)
        await one.until(lambda: one.started() == PODS, "all run", 60)
        made = time.perf_counter() - began
        await one.launcher.release()
        began = time.perf_counter()
        places = await one.launcher.adopt([], SPEC)
        adopted = time.perf_counter() - began
        assert len(places) == PODS and all(place is not None and place.node for place in places.values())
        began = time.perf_counter()
        for number in range(PODS):
            await one.launcher.kill(f"w{number}", SPEC)
        await one.until(lambda: one.count(Exited) == PODS, "all have ended", 60)
        deleted = time.perf_counter() - began
        assert one.cluster.pods() == {}
        print(f"{PODS} pods: made {made:.1f} s, adopted {adopted:.1f} s, deleted {deleted:.1f} s")
