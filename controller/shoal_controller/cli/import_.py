"""`shoal import`: a model's file as a checkpoint that a job begins with."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal_controller.cli.options import Place


def import_(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Safetensors file or torch state dict to import.", show_default=False)
    ],
    path: Place,
) -> None:
    """Make a checkpoint of step 0 from a model file."""
    from shoal_controller.cli.offline import become

    become("import", file, path)
