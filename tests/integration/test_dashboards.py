"""The dashboards on a real Prometheus that scrapes a real run: every panel shows something, and what it shows is what
the run report says.

The run has a save, a loss, a joiner, a drain and a restart of the controller. Prometheus handles labels as by default.
"""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from charts.panels import DASHBOARDS, queries_of, with_values
from charts.prometheus import MISSING, program
from integration.cluster import Cluster, until
from ports import free_port

PROMETHEUS = program("prometheus")
SCRAPE_SECONDS = 0.5
RATE = "15s"
END_SECONDS = 100
MAX_STEPS = 60
ON_GPUS = "integration.scripts:train_on_shown_gpus"
OF_CELLS = ("shoal_job_cells", "shoal_job_coordinate_members", "shoal_worker_cell_wait_seconds_total")
"""What only jobs have whose cells are several processes."""


class Prometheus:
    """A server that scrapes one controller."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"
        self.began = time.time()

    def values(self, query: str) -> list[float]:
        """What a panel would draw of the whole run: no numbers that are none."""
        series = self.series(query, {"start": self.began, "end": time.time(), "step": 1})
        found = [float(value) for one in series for _, value in one["values"]]
        return [value for value in found if not math.isnan(value)]

    def series(self, query: str, span: dict[str, float]) -> list[dict[str, Any]]:
        """Labels and values of each, over a span of time."""
        return list(self._ask("query_range", {"query": query, **span})["result"])

    def now(self, query: str, label: str = "job_name") -> dict[str, float]:
        """The figures of this moment by a label."""
        result = self._ask("query", {"query": query})["result"]
        return {one["metric"].get(label, ""): float(one["value"][1]) for one in result}

    def _ask(self, path: str, given: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.get(f"{self._url}/{path}", params=given, timeout=100, trust_env=False, verify=False).json()
        assert answer["status"] == "success", answer
        return dict(answer["data"])


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[Prometheus]:
    port = free_port()
    place = target.removeprefix("http://")
    scraped = {"job_name": "shoal", "static_configs": [{"targets": [place], "labels": {"namespace": "ml"}}]}
    interval = f"{int(SCRAPE_SECONDS * 1000)}ms"
    config = {"global": {"scrape_interval": interval, "scrape_timeout": interval}, "scrape_configs": [scraped]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    assert PROMETHEUS is not None
    command = [PROMETHEUS, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(command, stderr=log, stdout=log) as server:
        try:
            found = Prometheus(port)
            until("Prometheus to scrape", lambda: _scrapes(found))
            yield found
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(END_SECONDS)


def _scrapes(server: Prometheus) -> bool:
    try:
        return bool(server.now("shoal_leader"))
    except (httpx.TransportError, ValueError):
        return False


def disturbed(cluster: Cluster) -> None:
    """A run with everything that a panel shows."""
    for save, step in enumerate((3, 6)):
        cluster.wait_step(step)
        httpx.post(f"{cluster.url}/v1/jobs/job/checkpoints", timeout=100, trust_env=False, verify=False)
        until("a checkpoint", lambda save=save: len(cluster.messages("checkpoint_saved")) > save)
    cluster.kill("w1")
    cluster.wait_world(2)
    (joiner,) = cluster.add()
    cluster.wait_state(joiner, "active")
    cluster.wait_world(3)
    cluster.drain("w0")
    cluster.wait_state("w0", "left")
    step = cluster.job()["step"]
    cluster.kill_controller()
    cluster.start_controller()
    cluster.wait_step(step + 3)


@pytest.mark.skipif(PROMETHEUS is None, reason=MISSING)
@pytest.mark.timeout(240)
def test_every_panel_shows_data_of_a_run_and_the_numbers_of_its_report(tmp_path: Path) -> None:
    kept = {"offload": str(tmp_path), "shoal": {"checkpoint": {"path": str(tmp_path / "saves")}}}
    options = {"max_steps": MAX_STEPS, **kept}
    with (
        Cluster(workers=3, options=options, script=ON_GPUS, pace=0.05) as cluster,
        prometheus(cluster.url, tmp_path) as server,
    ):
        disturbed(cluster)
        cluster.wait_done()
        until("the end to be scraped", lambda: server.now('shoal_job_phase{phase="succeeded"} == 1'))
        every_five_seconds = "changes((max(shoal_term > 0))[1h:5s])"  # as a panel looks
        until("a look at every fifth second", lambda: server.values(every_five_seconds))
        empty = [
            f"{file.stem}: {place}: {query}"
            for file in DASHBOARDS
            for place, query in queries_of(file)
            if not server.values(with_values(query, "job", RATE)) and not any(name in query for name in OF_CELLS)
        ]
        assert empty == []
        _is_the_report(server, cluster)


def _is_the_report(server: Prometheus, cluster: Cluster) -> None:
    report = cluster.report()
    worlds = report["generations"]
    assert server.now("max by (job_name) (shoal_job_step)")["job"] == report["steps"] == MAX_STEPS
    assert server.now("max by (job_name) (shoal_job_samples_total)")["job"] == report["samples"] > 0
    done = server.now('max by (reason) (shoal_resizes_total{outcome="done"}) > 0', "reason")
    assert done == Counter(world["reason"] for world in worlds)
    moved = server.now("max by (source) (shoal_repartition_bytes_total)", "source")
    assert moved["peer"] == sum(world["bytes"]["pause"] + world["bytes"]["fill"] for world in worlds) > 0
    assert moved["checkpoint"] == sum(world["bytes"]["checkpoint"] for world in worlds)
    lost = server.now("max by (job_name) (shoal_job_lost_steps_total)")["job"]
    assert lost == sum(world["lost_steps"] for world in worlds)
    promoted = server.now("max by (job_name) (shoal_blocks_promoted_total)")["job"]
    assert promoted == sum(world["promoted_blocks"] for world in worlds)
    goodput = server.now("max by (job_name) (shoal_job_goodput_ratio)")["job"]
    assert 0 < goodput == report["goodput_ratio"] < 1
