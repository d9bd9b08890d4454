"""Writes docs/controller.md from the code: `python docs/generate/controller.py` (`make docs`).

Settings and job specification come from their pydantic models, metrics from what a controller without jobs exposes.
REST has a page of its own (`rest.py`).
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from shoal_controller.api.models import JobBody, WorkersBody
from shoal_controller.launchers.kubernetes.section import KubernetesSection
from shoal_controller.metrics import Metrics, Sources
from shoal_controller.settings import Settings

PAGE = Path(__file__).resolve().parents[1] / "controller.md"

OPENING = """\
# The controller

<!-- Written by `make docs` from the code; do not edit. -->

`shoal controller` serves jobs; `shoal run` and `shoal demo` bring one of their own. Its API: [REST](rest.md).
"""
SETTINGS = """\
## Settings

Environment variables; a flag of the command wins.
"""
DOOR = """\
## Who may do what

[Security](security.md) says it in full. Anyone who may submit a job can run commands as the controller's user, so a
port that other machines can reach requires a token. Give it a certificate too (`SHOAL_HTTP_CERTIFICATE`,
`SHOAL_HTTP_KEY`), because the token is sent with every request. `SHOAL_TOKEN` opens everything, named tokens what their
role allows; `shoal token JOB` prints one that brings workers into this run of the job and opens nothing else, and
launchers give their workers such a token. It does not protect the user from the script: local workers are processes of
the controller's user and can read that user's files. `SHOAL_LAUNCHERS=none` keeps a controller from starting any.

`shoal run` and `shoal demo` create a token if `SHOAL_TOKEN` is unset, in the file `token` of their data folder. The
commands look for it there (in `$SHOAL_DATA`, else in `.shoal` of the current folder), and use it only for a controller
on this machine.

Requests that a browser sends for a page of another site are refused.
"""
JOB = """\
## A job's specification

The body of `POST /v1/jobs`, and what `shoal submit` reads from a YAML or JSON file.
"""
METRICS = """\
## Metrics

At `/metrics`, for Prometheus. What belongs to a job has the label `job_name`.
"""


def page() -> str:
    """The whole page."""
    parts = [OPENING, SETTINGS, *settings(), "", DOOR, JOB, *job(), "", METRICS, *metrics(), ""]
    return "\n".join(parts)


def settings() -> Iterator[str]:
    yield from header("variable", "default", "meaning")
    for name, field in Settings.model_fields.items():
        variable = field.validation_alias if isinstance(field.validation_alias, str) else f"SHOAL_{name.upper()}"
        yield row(f"`{variable}`", default(field), meaning(field))


def job() -> Iterator[str]:
    yield from header("key", "default", "meaning")
    yield from fields(JobBody, "")


def fields(model: type[BaseModel], above: str) -> Iterator[str]:
    """A model's keys, dotted, those of the models within it too."""
    for name, field in model.model_fields.items():
        if field.annotation is WorkersBody:
            yield from fields(WorkersBody, f"{above}{name}.")
        elif field.annotation == KubernetesSection | None:
            yield from fields(KubernetesSection, f"{above}{name}.")
        else:
            yield row(f"`{above}{name}`", default(field), meaning(field))


def metrics() -> Iterator[str]:
    yield from header("metric", "type", "meaning")
    shown = Metrics()
    shown.show(Sources())
    exposed = asyncio.run(shown.scrape()).decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", exposed, flags=re.MULTILINE))
    for name, text in sorted(re.findall(r"^# HELP (\S+) (.*)$", exposed, flags=re.MULTILINE)):
        yield row(f"`{name}`", types[name], text)


def header(*columns: str) -> list[str]:
    return [row(*columns), "|" + "---|" * len(columns)]


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def meaning(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined and field.default_factory is None:
        return "required"
    return f"`{value}`" if isinstance(value, int | float | str) and not isinstance(value, bool) else "–"


def main(arguments: list[str]) -> int:
    if arguments:
        sys.stderr.write("usage: python docs/generate/controller.py\n")
        return 2
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
