"""The alerts: promtool runs each of them on series that make it fire and on series that must not, and each has a page.

The series are in alerts/NAME.yaml, one file for each alert, as promtool reads them.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from charts.metric_names import unknown
from charts.prometheus import MISSING, program
from charts.rendering import ALL_VALUES, CHART, ROOT, Json, of_kind, rendered

FILE = CHART / "alerts.yaml"
ALERTS: dict[str, Json] = {
    rule["alert"]: rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]
}
TESTS = sorted((Path(__file__).parent / "alerts").glob("*.yaml"))
PROMTOOL = program("promtool")
PROMTOOL_SECONDS = 100

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason=MISSING)


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=PROMTOOL_SECONDS)


@needs_promtool
def test_prometheus_reads_the_alerts() -> None:
    done = promtool("check", "rules", FILE)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("series", TESTS, ids=lambda file: file.stem)
def test_it_fires_when_it_should_and_not_otherwise(series: Path) -> None:
    done = promtool("test", "rules", series)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_is_tried_firing_and_not_firing(alert: str) -> None:
    (series,) = (file for file in TESTS if file.stem == alert)
    tried = [one for test in yaml.safe_load(series.read_text())["tests"] for one in test["alert_rule_test"]]
    assert {one["alertname"] for one in tried} == {alert}
    assert {bool(one.get("exp_alerts")) for one in tried} == {True, False}


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_says_what_is_wrong_and_where_to_read_on(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    page, _, heading = rule["annotations"]["runbook"].partition("#")
    assert heading == alert.lower()
    text = (ROOT / page).read_text()
    section = re.search(rf"^## {alert}\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert section and "1. " in section[1]


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_asks_for_what_a_controller_exposes(alert: str) -> None:
    assert unknown(ALERTS[alert]["expr"]) == []


def test_the_chart_installs_the_alerts_as_they_are() -> None:
    (rule,) = of_kind(rendered(ALL_VALUES[1]), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(FILE.read_text())
