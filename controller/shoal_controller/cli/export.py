"""`shoal export`: a checkpoint's model for others."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal_controller.cli.options import Place


def export(
    path: Place,
    file: Annotated[str, typer.Argument(metavar="FILE", help="What to write.", show_default=False)],
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="Of floating tensors: float32, bfloat16, …")
    ] = "",
    form: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="safetensors, or dcp: a torch.distributed.checkpoint.")
    ] = "safetensors",
) -> None:
    """Write a checkpoint's model as plain safetensors."""
    from shoal_controller.cli.offline import become

    become("export", path, file, "--format", form, *(["--dtype", dtype] if dtype else []))
