"""`shoal checkpoint`, `checkpoints`, `verify`, `export`, `import`, `reshape`: what is done with checkpoints.

The last four read files and ask no controller: they become `python -m shoal.checkpoint`, which lives with torch. The
controller's side never imports torch; its command only hands over.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Annotated, NoReturn

import typer

from shoal_controller.cli.jobs import change
from shoal_controller.cli.options import DEFAULT_URL, Form, Job, Output, Place, Url


async def checkpoint(job: Job, url: Url = DEFAULT_URL) -> None:
    """Save a checkpoint after the next step."""
    await change(url, job, lambda client: client.save_checkpoint(job))


async def checkpoints(job: Job, url: Url = DEFAULT_URL, output: Output = Form.TABLE) -> None:
    """List a job's checkpoints, newest first."""
    from shoal_controller.cli.runs import client_of
    from shoal_controller.cli.tables import checkpoints_table, listed

    async with client_of(url, job) as client:
        listed("checkpoints", await client.checkpoints(job), checkpoints_table, output)


def verify(path: Place) -> None:
    """Verify every checksum of a checkpoint, or of all checkpoints in a folder."""
    become("verify", path)


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
    averaged: Annotated[
        bool, typer.Option("--averaged", help="Write averages of weights in the place of parameters.")
    ] = False,
) -> None:
    """Export the model of a checkpoint."""
    more = ["--averaged"] if averaged else []
    become("export", path, file, "--format", form, *(["--dtype", dtype] if dtype else []), *more)


def import_(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Safetensors file, torch state dict or torch.distributed.checkpoint folder to import.",
            show_default=False,
        ),
    ],
    path: Place,
    model_only: Annotated[
        bool, typer.Option("--model-only", help="Leave out the optimizer states that such a folder can have.")
    ] = False,
) -> None:
    """Make a checkpoint of step 0 from a model file or a folder of torch.distributed.checkpoint."""
    become("import", file, path, *(["--model-only"] if model_only else []))


Places = Annotated[int, typer.Option(metavar="N", min=1, help="Processes of a cell in this dimension.")]


def reshape(
    old: Annotated[str, typer.Argument(metavar="OLD", help="Checkpoint, or folder of them.", show_default=False)],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Folder to make; nothing is there.", show_default=False)],
    tensor: Places = 1,
    context: Places = 1,
    pipeline: Places = 1,
    expert: Places = 1,
) -> None:
    """Make a checkpoint for cells of another shape from one of a job."""
    sizes = {"--tensor": tensor, "--context": context, "--pipeline": pipeline, "--expert": expert}
    become("reshape", old, new, *(word for name, size in sizes.items() for word in (name, str(size))))


def become(*arguments: str) -> NoReturn:
    """Hand this process over. Raises `ModuleNotFoundError` where the worker's side is not installed."""
    for module in ("torch", "safetensors", "fsspec"):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    os.execv(sys.executable, [sys.executable, "-m", "shoal.checkpoint", *arguments])
