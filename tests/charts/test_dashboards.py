"""The dashboards: made from their text, every query is one that Prometheus reads and asks for what controllers expose.

That the queries return data of a real run is tried in tests/integration/test_dashboards.py.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from charts.metric_names import exposed, series_of, unknown
from charts.panels import DASHBOARDS, queries_of, with_values
from charts.prometheus import MISSING, program
from charts.rendering import ALL_VALUES, CHART, of_kind, rendered
from charts.tools import generator

QUERIES = [(file.stem, place, query) for file in DASHBOARDS for place, query in queries_of(file)]
PROMTOOL = program("promtool")

NOT_SHOWN = {
    "shoal_job_generation", "shoal_job_lanes", "shoal_job_last_step_timestamp_seconds", "shoal_job_start_seconds",
    "shoal_job_report", "shoal_job_rebalances_total",
    "shoal_job_workers_max", "shoal_checkpoint_last_step", "shoal_step_seconds_bucket", "shoal_step_seconds_sum",
    "shoal_step_seconds_count", "shoal_resize_seconds_bucket", "shoal_checkpoint_seconds_bucket",
    "shoal_resize_pause_seconds_bucket", "shoal_resize_pause_seconds_count",
    "shoal_rest_request_duration_seconds_sum", "shoal_rest_request_duration_seconds_count",
}  # fmt: skip
"""What the two dashboards leave out; a new metric is to be shown or named here."""


def test_there_are_two_dashboards() -> None:
    assert [file.stem for file in DASHBOARDS] == ["controller", "training-health"]


def test_the_files_are_current() -> None:
    written = generator("dashboards").written()
    assert sorted(written) == DASHBOARDS
    for file, text in written.items():
        assert file.read_text() == text, f"{file.name} is not current; run `make docs`"


@pytest.mark.parametrize(("board", "place", "query"), QUERIES, ids=[f"{board}, {place}" for board, place, _ in QUERIES])
def test_a_panel_asks_for_what_a_controller_exposes(board: str, place: str, query: str) -> None:
    assert series_of(query)
    assert unknown(query) == []


def test_every_metric_is_shown_or_left_out_by_name() -> None:
    shown = {name for _, _, query in QUERIES for name, _ in series_of(query)}
    assert set(exposed()) - shown - NOT_SHOWN == set()
    assert shown & NOT_SHOWN == set()


def test_every_panel_says_what_it_shows() -> None:
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            if panel["type"] != "row":
                assert panel["title"] and panel["description"].endswith("."), panel["title"]
                assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
                assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_a_dashboard_has_its_variables(file: Path) -> None:
    names = [variable["name"] for variable in json.loads(file.read_text())["templating"]["list"]]
    assert names == ["datasource", "namespace", "job"][: 3 if file.stem == "training-health" else 2]


@pytest.mark.skipif(PROMTOOL is None, reason=MISSING)
def test_prometheus_can_read_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": with_values(query, "gpt")} for number, (_, _, query) in enumerate(QUERIES)
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "rules", file], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_chart_gives_them_to_grafana_as_they_are() -> None:
    maps = [one for one in of_kind(rendered(ALL_VALUES[1]), "ConfigMap") if "-dashboard-" in one["metadata"]["name"]]
    data = {name: text for one in maps for name, text in one["data"].items()}
    assert data == {file.name: file.read_text() for file in DASHBOARDS}
    assert {one["metadata"]["labels"]["grafana_dashboard"] for one in maps} == {"1"}
    assert {file.parent for file in DASHBOARDS} == {CHART / "dashboards"}
