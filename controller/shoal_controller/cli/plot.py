"""`shoal plot`: loss, throughput and world over time as a picture, from what a controller here has kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from shoal_protos.errors import NotFound, UserError
from shoal_protos.text import shown_name

from shoal_controller.cli.options import Data
from shoal_controller.cli.output import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

JobOrFile = Annotated[
    str,
    typer.Argument(metavar="JOB", help="Name of the job, or a file of shoal.callbacks.CSV.", show_default=False),
]
Picture = Annotated[
    Path | None,
    typer.Option("--png", metavar="FILE", dir_okay=False, help="PNG to write. Default: JOB.png.", show_default=False),
]

NOT_REPORTED = ("step", "samples", "time", "world_size", "loss", "lr", "loss_scale")
"""Columns that do not come from `engine.report`."""
MOST_REPORTED = 4
"""Most reported numbers that are drawn, each in its own panel."""
SMOOTHED = 5
"""Lines over which throughput is measured."""


def plot(job: JobOrFile, png: Picture = None, data: Data = None) -> None:
    """Draw a job's loss, throughput and world over time."""
    from shoal_controller.observe.curves import read_curve

    path = place_of(job, data)
    try:
        rows = read_curve(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a curve of a job: {error}") from None
    if len(rows) < 2:
        raise UserError(f"{path} has {len(rows)} of the 2 steps that a curve needs; try again later")
    picture = png or Path(f"{path.stem if path == Path(job) else job}.png")
    try:
        draw(rows, picture, job)
    except (OSError, ValueError) as error:
        raise UserError(f"{picture} cannot be written: {error}") from None
    echo(f"{picture}: steps {rows[0]['step']:.0f} to {rows[-1]['step']:.0f} of {job}")


def place_of(job: str, data: Path | None) -> Path:
    """The file that is meant. Raises `NotFound`."""
    from shoal_protos.living_runs import BESIDE

    from shoal_controller.observe.curves import curve_file
    from shoal_controller.settings import data_folder

    if job.endswith(".csv") and Path(job).is_file():
        return Path(job)
    folder = data_folder(data)
    found = curve_file(folder, job) or curve_file(folder / BESIDE / job, job)
    if found is None:
        raise NotFound(
            f"{folder} has no curve of a job {shown_name(job)}; a controller keeps it in its data folder (--data) from "
            "the job's first step on"
        )
    return found


def throughput(rows: Sequence[dict[str, float]]) -> list[float]:
    """Samples per second at each line but the first; nothing was trained where a job went back."""
    found = []
    for at in range(1, len(rows)):
        before = rows[max(0, at - SMOOTHED)]
        seconds = rows[at]["time"] - before["time"]
        found.append(max(0.0, rows[at]["samples"] - before["samples"]) / seconds if seconds > 0 else 0.0)
    return found


def reported(rows: Sequence[dict[str, float]]) -> list[str]:
    """Return the names of the reported numbers."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if name not in NOT_REPORTED and not name.startswith("lr_")]


def draw(rows: Sequence[dict[str, float]], picture: Path, title: str) -> None:
    """Draw loss, reported numbers, throughput and workers over the same minutes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    numbers = ["loss", *reported(rows)[:MOST_REPORTED]]
    figure = Figure(figsize=(9, 3 + 4 * (len(numbers) + 2) / 3), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(len(numbers) + 2, sharex=True)
    *curves, speed, workers = panels
    minutes = [(row["time"] - rows[0]["time"]) / 60 for row in rows]
    for panel, name in zip(curves, numbers, strict=True):
        known = [(at, row[name]) for at, row in zip(minutes, rows, strict=True) if name in row]
        panel.plot(*zip(*known, strict=True))
    speed.plot(minutes[1:], throughput(rows))
    workers.step(minutes, [row["world_size"] for row in rows], where="post")
    for panel, name in zip((*curves, speed, workers), (*numbers, "samples per second", "workers"), strict=True):
        panel.set_ylabel(name, parse_math=False)
        panel.grid(alpha=0.3)
    speed.set_ylim(bottom=0)
    workers.set_ylim(bottom=0)
    workers.set_xlabel("minutes")
    figure.suptitle(title)
    figure.savefig(picture, format="png", dpi=110)
