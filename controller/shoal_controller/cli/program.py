"""The program that `shoal run` starts in every worker: a Python script, a module, or any other program.

Called by run.py. Nothing heavy may be imported here.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

MODULE = "module"
"""Parameter of the flag `-m`."""


def checked(context: typer.Context, program: Path) -> Path:
    """Return the program unchanged. Raises `typer.BadParameter` if no worker can run it."""
    if context.params.get(MODULE):
        return program
    if program.suffix == ".ipynb":
        raise typer.BadParameter(
            f"{program} is a notebook, and workers run scripts; make one of it with `jupyter nbconvert --to script "
            f"{program}`, and run that"
        )
    if program.is_dir():
        raise typer.BadParameter(f"{program} is a folder; expected a script, or a module by -m")
    if not program.exists() and shutil.which(program) is None:
        raise typer.BadParameter(
            f"{program} is neither a file nor a program on the PATH; expected a Python script, a module by -m, or a "
            "command"
        )
    return program


def command_of(program: Path, is_module: bool, arguments: Sequence[str]) -> list[str]:
    """Return the whole command of a worker."""
    if is_module:
        return [sys.executable, "-m", str(program), *arguments]
    if not program.exists():
        return [shutil.which(program) or str(program), *arguments]
    path = str(program.resolve())
    is_python = program.suffix == ".py" or not os.access(program, os.X_OK)
    return [sys.executable, path, *arguments] if is_python else [path, *arguments]


def job_of(program: Path, is_module: bool, arguments: Sequence[str]) -> str:
    """Return the job's name: the module, or the stem of the command's first file, with allowed characters only."""
    files = (one for one in (program, *map(Path, arguments)) if one.is_file())
    name = str(program) if is_module else next(files, program).stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-")[:63] or "job"
