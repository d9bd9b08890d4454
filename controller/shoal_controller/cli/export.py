"""`shoal export`: a checkpoint's model for others."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal_controller.cli.options import Place


def export(
    path: Place,
    file: Annotated[str, typer.Argument(metavar="FILE", help="File to write.", show_default=False)],
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="Convert floating-point tensors to float32, bfloat16, …")
    ] = "",
    form: Annotated[
        str,
        typer.Option("--format", metavar="FORMAT", help="safetensors, or dcp for torch.distributed.checkpoint."),
    ] = "safetensors",
) -> None:
    """Export the model of a checkpoint."""
    from shoal_controller.cli.offline import become

    become("export", path, file, "--format", form, *(["--dtype", dtype] if dtype else []))
