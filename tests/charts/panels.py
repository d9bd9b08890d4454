"""The queries of the dashboards, with values for their variables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from charts.rendering import CHART

DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))


def queries_of(file: Path) -> Iterator[tuple[str, str]]:
    """Every query of a dashboard by its panel and legend; annotations' too."""
    board = json.loads(file.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield f"{panel['title']} {panel['gridPos']['y']}, {target['legendFormat']}", target["expr"]
    for annotation in board["annotations"].get("list", []):
        if "expr" in annotation:
            yield annotation["name"], annotation["expr"]


def with_values(query: str, job: str, rate: str = "1m") -> str:
    """As Grafana sends it."""
    return query.replace("$__rate_interval", rate).replace("$namespace", ".*").replace("$job", job)
