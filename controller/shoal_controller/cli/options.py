"""The flags that several commands share, declared once. Only typer is imported here: `shoal --help` must be quick."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:7070"

Url = Annotated[str, typer.Option("--url", envvar="SHOAL_URL", metavar="URL", help="REST address of the controller.")]

JOB = typer.Argument(metavar="JOB", help="Name of the job.", show_default=False)
WORKER = typer.Argument(metavar="WORKER", help="Id of the worker (w0, w1, …).", show_default=False)
"""`main` says how they are completed."""

Job = Annotated[str, JOB]
Worker = Annotated[str, WORKER]


class Form(StrEnum):
    """How a list is written."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


Output = Annotated[Form, typer.Option("--output", "-o", help="Output format.")]

Place = Annotated[
    str,
    typer.Argument(metavar="PATH", help="Folder or URL of checkpoints, or of a single checkpoint.", show_default=False),
]

Http = Annotated[
    str | None,
    typer.Option(
        "--http",
        envvar="SHOAL_HTTP",
        metavar="HOST:PORT",
        help="Address of the REST API. Default: 127.0.0.1:7070; port 0 picks a free port.",
    ),
]
Grpc = Annotated[
    str | None,
    typer.Option(
        "--grpc",
        envvar="SHOAL_GRPC",
        metavar="HOST:PORT",
        help="Address that workers connect to. Default: 127.0.0.1:7071; port 0 picks a free port.",
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        "--store", envvar="SHOAL_STORE", metavar="STORE", help="Store of the controller. Default: embedded:.shoal."
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        envvar="SHOAL_DATA",
        metavar="DIR",
        file_okay=False,
        help="Folder for logs, process records and the token. Default: .shoal.",
        show_default=False,
    ),
]
Adopt = Annotated[
    bool,
    typer.Option(
        "--adopt",
        envvar="SHOAL_ADOPT",
        help="Take over the workers that a controller elsewhere has left: for a folder that was moved or restored.",
    ),
]
NoPage = Annotated[bool, typer.Option("--no-page", help="Do not serve the page. Default: it is at `/` (SHOAL_PAGE).")]
OpenPage = Annotated[bool, typer.Option("--open-page", help="Open the page in a browser.")]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", dir_okay=False, help="Write the run report to this file.", show_default=False
    ),
]
