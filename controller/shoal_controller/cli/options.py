"""The flags that several commands share, declared once. Only typer is imported here: `shoal --help` must be quick."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:7070"

Url = Annotated[str, typer.Option("--url", envvar="SHOAL_URL", metavar="URL", help="The controller's REST address.")]

Job = Annotated[str, typer.Argument(metavar="JOB", help="The job's name.", show_default=False)]


class Form(StrEnum):
    """How a list is written."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[Form, typer.Option("--output", "-o", help="Form of the list.")]

Place = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="A folder or URL of checkpoints, or one checkpoint's own folder.", show_default=False
    ),
]

Http = Annotated[
    str | None,
    typer.Option(
        "--http",
        envvar="SHOAL_HTTP",
        metavar="HOST:PORT",
        help="Where to serve REST (127.0.0.1:7070; port 0: a free one).",
    ),
]
Grpc = Annotated[
    str | None,
    typer.Option(
        "--grpc",
        envvar="SHOAL_GRPC",
        metavar="HOST:PORT",
        help="Where workers connect to (127.0.0.1:7071; port 0: a free one).",
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        "--store", envvar="SHOAL_STORE", metavar="STORE", help="Where state is kept: embedded:DIR (embedded:.shoal)."
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        envvar="SHOAL_DATA",
        metavar="DIR",
        file_okay=False,
        help="Where logs, process records and the token are kept (the embedded store's folder).",
        show_default=False,
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", dir_okay=False, help="Write the run report to this file.", show_default=False
    ),
]
