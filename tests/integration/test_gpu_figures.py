"""What workers' GPUs are at, from NVML's edge to REST, the command and the page; no GPU delays a step."""

from __future__ import annotations

import os
from typing import Any

import pytest
from fake_nvml import FIGURES, MIB, NAME, TOTAL_MIB
from forked_command import shoal
from integration.browser import CHROMIUM, browsed
from integration.cluster import Cluster, until
from integration.test_dashboards import ON_GPUS
from playwright.sync_api import expect

OPTIONS = {"max_steps": 40}
LAPTOP = {"viewport": {"width": 1500, "height": 900}}
SILENT = f"GPU 1 ({NAME}) does not tell its temperature (Not Supported)"


def gpus(cluster: Cluster) -> dict[str, Any] | None:
    """By worker, once two of them have told something."""
    found = {name: one["gpu"] for name, one in cluster.workers().items() if "gpu" in one}
    return found if len(found) >= 2 else None


@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium (make packages)")
@pytest.mark.usefixtures("browser")
def test_gpus_are_shown_wherever_a_worker_is_and_a_mute_and_a_hung_one_cost_no_step_and_no_bit() -> None:
    options = {**OPTIONS, "mute": "w1", "hung": "w2"}
    with Cluster(3, options, script=ON_GPUS, pace=0.05) as cluster, browsed(cluster.url, look=LAPTOP) as seen:
        cluster.wait_step(3)
        shown = until("the figures", lambda: gpus(cluster))
        assert sorted(shown) == ["w0", "w1"], "w2's driver has told nothing, and w2 trains"
        for number, worker in enumerate(sorted(shown)):
            gpu = shown[worker]
            assert (gpu["name"], gpu["index"], gpu["memory_total_bytes"]) == (NAME, number, TOTAL_MIB * MIB)
            assert gpu["use_ratio"] in {one["use"] / 100 for one in FIGURES}
        assert (shown["w0"]["why"], shown["w1"]["why"]) == ("", SILENT)
        assert shown["w0"]["celsius"] in {one["celsius"] for one in FIGURES} and shown["w1"]["celsius"] is None
        described = shoal("describe", "job", "--url", cluster.url, env={**os.environ, "COLUMNS": "240"}).stdout
        assert "GB" in described and "1: " in described and "does not tell its temperature" in described
        seen.open_job()
        row = seen.page.locator("tr[data-worker=w0] td.gpu")
        expect(row).to_contain_text(" of 85.5 GB")
        expect(seen.page.locator("tr[data-worker=w1] td.gpu [title]")).to_have_attribute("title", SILENT)
        expect(seen.page.locator("tr[data-worker=w2] td.gpu")).to_have_text("–")
        table = seen.page.get_by_role("region", name="Workers", exact=True).locator(".wide")
        assert table.evaluate("one => one.scrollWidth - one.clientWidth") == 0, "every act is in reach"
        cluster.wait_undisturbed(of=OPTIONS)
