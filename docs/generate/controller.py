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
from shoal_controller.api.models import CellBody, JobBody, WorkersBody
from shoal_controller.launchers.kubernetes.section import KubernetesSection
from shoal_controller.observe.metrics import Metrics, Sources
from shoal_controller.settings import Settings
from shoal_protos.validation import keys_of

PAGE = Path(__file__).resolve().parents[1] / "controller.md"

OPENING = """\
# The controller

<!-- Written by `make docs` from the code; do not edit. -->

Configure a controller, write a job's specification, and look up the metrics. `shoal controller` serves jobs;
`shoal run` and `shoal demo` start a controller of their own. Its API is [REST](rest.md).
"""
SETTINGS = """\
## Settings

Set these environment variables, or the command's flags, which take precedence.
"""
WARM = """\
## Warm starts

A worker that starts anew imports torch for two seconds of a core. So when the first world of a local job has begun, the
controller starts a *warm process* for it, in which torch and Shoal are imported and nothing runs, and forks the job's
later workers from it. It takes 0.2 GB of memory, and ends soon after the job's last worker.

- **A fork is as a worker that was started**: a child of the controller that leads a session, with its own exit status,
  log, record, environment, command line, `__main__` and path. Its script is read when it is forked.
- **A worker is started as before** where the command is no Python script (`python SCRIPT.py`, `python -m MODULE`), and
  where the warm process has a second thread or an open file, is killed or is not ready yet. So it is where the script's
  folder has a module by the name of one that is imported by then. The controller's log says why; a warm process that
  was killed is made anew.
- **A script that sets or removes what torch reads when it is imported**, such as `OMP_NUM_THREADS` in `os.environ`,
  begins again at that line, as a process that is started. In the job's `env` it costs nothing.

`SHOAL_WARM_START=false` turns it off.
"""
DOOR = """\
## Access

See [Security](security.md) for the details. Permission to submit a job is permission to run commands as the
controller's user, so a port that other machines can reach requires a token. Give it a certificate too
(`SHOAL_HTTP_CERTIFICATE`, `SHOAL_HTTP_KEY`), because the token is sent with every request.

- `SHOAL_TOKEN` allows everything, a named token the requests of its role.
- `shoal token JOB` prints a token that admits workers to this run of the job and allows nothing else. Launchers give
  their workers such a token.
- A token does not protect the user from the script: local workers are processes of the controller's user and can read
  that user's files. `SHOAL_LAUNCHERS=none` keeps a controller from starting any.

`shoal run` and `shoal demo` create a token if `SHOAL_TOKEN` is unset, in the file `token` of their data folder. The
commands look for it there (in `$SHOAL_DATA`, else in `.shoal` of the current folder), and use it only for a controller
on this machine.

Requests that a browser sends for a page of another site are refused.
"""
JOB = """\
## A job's specification

These are the keys of the body of `POST /v1/jobs`, and of the YAML or JSON file that `shoal submit` reads. An
[ElasticJob](elastic_jobs.md) has them as Kubernetes writes keys: `maxRestarts` for `max_restarts`. The section
`kubernetes` has that spelling everywhere.
"""
METRICS = """\
## Metrics

Prometheus reads them at `/metrics`. Metrics of a job have the label `job_name`.
"""


def page() -> str:
    """The whole page."""
    parts = [OPENING, SETTINGS, *settings(), "", WARM, DOOR, JOB, *job(), "", METRICS, *metrics(), ""]
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
    for name, field in keys_of(model).items():
        if field.annotation is WorkersBody:
            yield from fields(WorkersBody, f"{above}{name}.")
        elif field.annotation == CellBody | None:
            yield row(f"`{above}{name}`", default(field), meaning(field))
            yield from fields(CellBody, f"{above}{name}.")
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
