"""Trackers: whoever keeps the numbers of steps. CSV files, TensorBoard, Weights & Biases.

A tracker opens when it gets its first numbers, which is on rank 0, and goes on with what an earlier rank 0 has begun:
one run through every change of the world. A job that goes back to a checkpoint writes the steps since then once more.
The two packages are optional: `missing_packages` says by name which cannot be used.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from shoal.callbacks.packages import why_unusable
from shoal.config.document import CsvMonitor, TensorBoard, Wandb
from shoal.config.monitoring import Monitoring

FLUSH_SECONDS = 10
"""A worker may be killed at any time; TensorBoard's own two minutes would be lost with it."""


class Tracker(Protocol):
    """Keeps numbers by name."""

    def write(self, named: dict[str, float], samples: int) -> None:
        """Write the numbers of one step. May raise any error of its package."""


class CsvFiles:
    """One file for each name, with DeepSpeed's file names and first lines."""

    def __init__(self, section: CsvMonitor) -> None:
        self._folder = folder_of(section)

    def write(self, named: dict[str, float], samples: int) -> None:
        for name, value in named.items():
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="") as file:
                writer = csv.writer(file)
                if file.tell() == 0:
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([samples, value])


class TensorBoardFiles:
    """A file of events for each worker that was rank 0, in one folder, which TensorBoard shows as one run."""

    def __init__(self, section: TensorBoard) -> None:
        self._folder = folder_of(section)
        self._writer: Any = None

    def write(self, named: dict[str, float], samples: int) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), flush_secs=FLUSH_SECONDS)
        for name, value in named.items():
            self._writer.add_scalar(name, value, samples)


class WandbRun:
    """One run of Weights & Biases, which whoever becomes rank 0 goes on with."""

    def __init__(self, section: Wandb, job: str, run: str) -> None:
        self._section, self._job, self._id = section, job, run
        self._run: Any = None

    def write(self, named: dict[str, float], samples: int) -> None:
        if self._run is None:
            import wandb

            section = self._section
            self._run = wandb.init(
                project=section.project, entity=section.team, group=section.group, name=self._job or None,
                id=self._id or None, resume="allow",
            )  # fmt: skip
        self._run.log(named | {"Train/Samples": samples})


def folder_of(section: CsvMonitor | TensorBoard) -> Path:
    """Where it writes."""
    return Path(section.output_path or ".") / section.job_name


def trackers(monitoring: Monitoring, job: str, run: str) -> list[Tracker]:
    """Those that the config asks for. `run`: what tells this run of the job from others."""
    found: list[Tracker] = []
    if monitoring.csv is not None:
        found.append(CsvFiles(monitoring.csv))
    if monitoring.tensorboard is not None:
        found.append(TensorBoardFiles(monitoring.tensorboard))
    if monitoring.wandb is not None:
        found.append(WandbRun(monitoring.wandb, job, run))
    return found


def missing_packages(monitoring: Monitoring) -> Iterator[str]:
    """Return a sentence for each configured tracker whose package cannot be used."""
    for package in ("tensorboard", "wandb"):
        if getattr(monitoring, package) is not None and (why := why_unusable(package)):
            yield f"`{package}.enabled` is true, and the package {package} {why}, or set it to false."


def places_that_cannot_be_written(monitoring: Monitoring) -> Iterator[str]:
    """A sentence for each folder that cannot be made."""
    for key in ("csv", "tensorboard"):
        section: CsvMonitor | TensorBoard | None = getattr(monitoring, key)
        if section is None:
            continue
        name = "csv_monitor" if key == "csv" else key
        try:
            folder_of(section).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            yield (
                f"`{name}.output_path`: {folder_of(section)} cannot be made ({error.strerror}); name a folder that all "
                "workers can write."
            )
