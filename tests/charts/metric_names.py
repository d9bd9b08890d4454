"""The metrics that a controller exposes, with their labels, as frozen in tests/unit, and those that a query names."""

from __future__ import annotations

import re
from functools import cache

from charts.rendering import ROOT

FROZEN = ROOT / "tests" / "unit" / "frozen" / "metrics.txt"
PARTS = ("_bucket", "_sum", "_count")
TARGET_LABELS = {"namespace", "job", "pod", "instance", "le"}
"""Labels that Prometheus itself gives a series, and that of a histogram's buckets."""


@cache
def exposed() -> dict[str, set[str]]:
    """Labels by the name of each series."""
    found: dict[str, set[str]] = {}
    for name, kind, labels in re.findall(r"^(\w+) (\w+) \{(.*)\}$", FROZEN.read_text(), flags=re.MULTILINE):
        named = {label for label in labels.split(", ") if label}
        for series in [f"{name}{part}" for part in PARTS] if kind == "histogram" else [name]:
            found[series] = named
    return found


def series_of(query: str) -> list[tuple[str, set[str]]]:
    """The series that a query names, each with the labels by which it selects."""
    found = []
    for name, selectors in re.findall(r"\b(shoal_\w+)(?:\{([^}]*)\})?", query):
        found.append((name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selectors or ""))))
    return found


def grouped_by(query: str) -> set[str]:
    """Labels that a query keeps or compares by."""
    groups = re.findall(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)", query)
    return {label.strip() for group in groups for label in group.split(",") if label.strip()}


def unknown(query: str) -> list[str]:
    """What of a query no controller exposes."""
    wrong, labels = [], set(TARGET_LABELS)
    for name, selected in series_of(query):
        if name not in exposed():
            wrong.append(name)
            continue
        labels |= exposed()[name]
        wrong += [f"{name}{{{label}}}" for label in selected - exposed()[name] - TARGET_LABELS]
    return wrong + sorted(grouped_by(query) - labels)
