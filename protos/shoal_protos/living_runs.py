"""The living runs of a folder: `shoal run` leaves a file in its state folder by which its controller is found.

The commands (`shoal_controller.cli.runs`, which writes the file) and `shoal.client` look here. A run is alive while the
lock of its store is held, regardless of its file. Nothing is asked of a controller here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FILE = "run.json"
BESIDE = "beside"
"""Subfolder with the state of further runs, each in a folder named after its job."""
LOCK = "lock"
"""The file in a store's folder that its controller has locked."""


@dataclass(frozen=True, slots=True)
class Run:
    """A living `shoal run`, as its file describes it."""

    folder: Path
    """Folder of its state, with its operators' token."""
    job: str
    url: str
    pid: int
    saves_to: str = ""
    """URL of its checkpoints; empty if not known yet or if it saves none."""

    def __str__(self) -> str:
        return f"job {self.job} (pid {self.pid})"


def living_runs(base: Path) -> list[Run]:
    """Return the living runs with state in this folder or in its subfolders; the folder's own run first."""
    return [run for folder in (base, *_further(base)) if is_held(folder) for run in _read(folder)]


def answering_runs(base: Path, job: str = "") -> list[Run | None]:
    """Return the run that trains the job, or all runs of this folder. None: the controller at the default address. It
    is asked if no run lives here, or if the folder's own controller was not started by `shoal run`.
    """
    runs = living_runs(base)
    if own := [run for run in runs if run.job == job]:
        return [*own]
    is_at_default = not runs or (is_held(base) and runs[0].folder != base)
    return [*([None] if is_at_default else []), *runs]


def is_held(folder: Path) -> bool:
    """Whether a controller of this machine holds the store in this folder."""
    try:
        lock = (folder / LOCK).stat()
        return is_locked(lock.st_dev, lock.st_ino)
    except OSError:
        return False


def is_locked(device: int, inode: int) -> bool:
    """Whether a process of this machine holds a lock of the file. Raises `OSError` where the system does not say."""
    name = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}"
    return any(name in line.split() for line in Path("/proc/locks").read_text().splitlines())


def _further(base: Path) -> list[Path]:
    try:
        return sorted((base / BESIDE).iterdir())
    except OSError:
        return []


def _read(folder: Path) -> Iterator[Run]:
    with suppress(OSError, ValueError, TypeError):
        yield Run(folder=folder, **json.loads((folder / FILE).read_bytes()))
