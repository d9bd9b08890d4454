"""Writes values.schema.json and values.yaml of the chart, and docs/chart.md: `python docs/generate/chart.py`
(`make docs`). All three come from the models of `chart_values.py`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "shoal"
WIDTH = 100

OPENING = """\
# Values of the chart

<!-- Written by `make docs` from docs/generate/chart_values.py; do not edit. -->

Set these values with `--set` or `--values` of `helm install`. [Kubernetes](kubernetes.md) describes the installation.
An unknown value, or one of another type, is refused.

| value | default | meaning |
|---|---|---|
"""
FREE = {"type": "object"}
GLOBAL: dict[str, Any] = {
    "type": "object",
    "description": "Shared by charts of which this one is part.",
    "properties": {
        "imageRegistry": {"type": "string", "description": "Registry of all images, in the place of theirs."},
        "imagePullSecrets": {"type": "array", "description": "Secrets for it, names or `{name: NAME}`."},
    },
}


def values_model() -> type[BaseModel]:
    """`ChartValues` of the module beside this file, which is no package."""
    found = importlib.util.spec_from_file_location("chart_values", Path(__file__).with_name("chart_values.py"))
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    model: type[BaseModel] = module.ChartValues
    return model


def schema() -> dict[str, Any]:
    """values.schema.json: every section in its place, with its default, and nothing beside what is named."""
    model = values_model()
    whole = model.model_json_schema()
    inline = _inline(whole, whole.get("$defs", {}), model().model_dump())
    inline["properties"]["global"] = GLOBAL
    return {"$schema": "http://json-schema.org/draft-07/schema#", **inline}


def _inline(node: Mapping[str, Any], definitions: Mapping[str, Any], default: object) -> dict[str, Any]:
    if "$ref" in node:
        described = {key: value for key, value in node.items() if key == "description"}
        return {**_inline(definitions[node["$ref"].rpartition("/")[2]], definitions, default), **described}
    kept = {key: value for key, value in node.items() if key not in ("title", "$defs", "default", "properties")}
    if "description" in kept:
        kept["description"] = " ".join(kept["description"].split())
    if "items" in kept:
        kept["items"] = _inline(kept["items"], definitions, None) or FREE
    if kept.get("additionalProperties") is True:
        del kept["additionalProperties"]
    if "properties" in node and default is None:  # of an item of a list
        kept["properties"] = node["properties"]
    elif "properties" in node:
        assert isinstance(default, dict)
        kept["properties"] = {
            name: _inline(part, definitions, default[name]) for name, part in node["properties"].items()
        }
        kept.pop("required", None)
    elif default is not None:
        kept["default"] = default
    return kept


def values_yaml() -> str:
    """values.yaml: every value with its meaning above it."""
    opening = "# Written by `make docs` from docs/generate/chart_values.py; do not edit.\n"
    return opening + "\n".join(_sections(schema()["properties"], 0)) + "\n"


def _sections(properties: Mapping[str, Any], depth: int) -> Iterator[str]:
    margin = "  " * depth
    for name, part in properties.items():
        if name == "global":
            continue
        if depth == 0:
            yield ""
        yield from (f"{margin}# {line}" for line in textwrap.wrap(part["description"], WIDTH - len(margin)))
        if "properties" in part:
            yield f"{margin}{name}:"
            yield from _sections(part["properties"], depth + 1)
        else:
            yield f"{margin}{name}: {json.dumps(part['default'])}"


def page() -> str:
    """docs/chart.md."""
    shared = (f"| `global.{name}` | | {part['description']} |" for name, part in GLOBAL["properties"].items())
    return OPENING + "".join(f"{line}\n" for line in chain(_rows(schema()["properties"], ""), shared))


def _rows(properties: Mapping[str, Any], above: str) -> Iterator[str]:
    for name, part in properties.items():
        if name == "global":
            continue
        if "properties" in part:
            yield from _rows(part["properties"], f"{above}{name}.")
        else:
            allowed = f" One of {', '.join(f'`{one}`' for one in part['enum'])}." if "enum" in part else ""
            meaning = f"{part['description']}{allowed}".replace("|", "\\|")
            yield f"| `{above}{name}` | `{json.dumps(part['default'])}` | {meaning} |"


def written() -> dict[Path, str]:
    """All that is made, by its place."""
    values = values_yaml()
    assert yaml.safe_load(values) == values_model()().model_dump()
    return {
        CHART / "values.schema.json": json.dumps(schema(), indent=2, ensure_ascii=False) + "\n",
        CHART / "values.yaml": values,
        ROOT / "docs" / "chart.md": page(),
    }


if __name__ == "__main__":
    for file, text in written().items():
        file.write_text(text)
