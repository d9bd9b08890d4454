"""The one way from a command to a terminal, a file or a pipe: what came from elsewhere is shown as text.

Every command prints by `echo`, or by the `TextConsole` of tables.py, which calls the same function;
`tests/unit/test_output.py` holds that no other way is used. Nothing heavy may be imported here.
"""

from __future__ import annotations

import typer
from shoal_protos.text import printable


def echo(text: str, err: bool = False) -> None:
    """Print a text and a line feed."""
    typer.echo(printable(text), err=err)
