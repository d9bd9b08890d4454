"""The commands' side of living runs: where each keeps its state, where it listens, which job it trains.

`shoal run` chooses its state folder and ports here and writes a file there; the other commands find the controller of a
job by these files (`shoal_protos.living_runs`).
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from shoal_protos.addresses import join_address, split_address
from shoal_protos.bearer import shown_token
from shoal_protos.errors import UserError
from shoal_protos.living_runs import BESIDE, FILE, Run, answering_runs, is_held, living_runs
from shoal_protos.log_stream import LogStream

from shoal_controller.cli.client import Client, local_folder
from shoal_controller.cli.options import DEFAULT_URL

if TYPE_CHECKING:
    from shoal_controller.cli.serve import Here, Places

LOOK_SECONDS = 0.05
"""Interval at which a new job is polled for its checkpoint path."""


def beside(places: Places, job: str, is_named: bool) -> tuple[Places, str]:
    """Return flags with state folder and addresses filled in, and the job's name. The state goes beside that of a
    living run of this folder, or to where an earlier run of the job has left its own. Raises `UserError` if the user
    has named the job and a living run trains a job of that name.
    """
    places = replace(places, http=places.http or _open_address("http"), grpc=places.grpc or _open_address("grpc"))
    if places.store is not None or places.data is not None:
        return places, job
    from shoal_controller.settings import data_folder

    base = data_folder(None)
    named, living = job, {run.job: run for run in living_runs(base)}
    if job in living and is_named:
        raise UserError(f"{living[job]} is trained by another shoal run of this folder; give another name by --job")
    if job in living:
        job = next(name for number in count(2) if (name := f"{job}-{number}") not in living)
    folder = base / BESIDE / job
    if not (is_held(base) or folder.exists()):
        return places, job
    if job != named or is_held(base):
        LogStream().write(f"another run lives in {base}: this one is job {job}, with its state in {folder}\n")
    return replace(places, data=folder, store=f"embedded:{folder}"), job


@contextmanager
def announced(folder: Path, job: str, url: str) -> Iterator[Run]:
    """Let other commands of this folder find the run while the context lasts."""
    run = Run(folder, job, url, os.getpid())
    _write(run)
    try:
        yield run
    finally:
        with suppress(OSError):
            (folder / FILE).unlink()


async def end_where_another_saves(here: Here, run: Run) -> str:
    """Wait until the job's checkpoint path is known. If a living run saves there, end the job; return a sentence."""
    import asyncio

    place = None
    while place is None:
        await asyncio.sleep(LOOK_SECONDS)
        place = here.server.shell.view(run.job).saves_to
    _write(replace(run, saves_to=place))
    base = run.folder.parent.parent if run.folder.parent.name == BESIDE else run.folder
    others = (one for one in living_runs(base) if one.pid != run.pid and one.saves_to)
    other = next((one for one in others if one.saves_to == place), None)
    if other is None:
        return ""
    await here.client.stop(run.job)
    return (
        f"job {run.job} saves its checkpoints to {place}, and so does {other}, which another shoal run trains: give "
        f"one of them another checkpoint.path; to give this script to the controller of {other.job}, use --attach"
    )


def client_of(url: str, job: str = "") -> Client:
    """Return a client of the controller at this address; at the default one, of the run that trains the job."""
    return next(iter(clients_of(url, job)))


def clients_of(url: str, job: str = "") -> list[Client]:
    """Return clients of the run that trains the job, or of all runs of this folder; at another address, of that."""
    runs = answering_runs(local_folder(), job) if url == DEFAULT_URL else [None]
    return [Client(url) if run is None else of_run(run) for run in runs]


def of_run(run: Run) -> Client:
    """Return a client of its controller."""
    return Client(run.url, shown_token(None, run.folder))


def _write(run: Run) -> None:
    from shoal_controller.process.private_files import write_private

    kept = {"job": run.job, "url": run.url, "pid": run.pid, "saves_to": run.saves_to}
    draft = run.folder / f"{FILE}.{run.pid}.new"
    write_private(draft, json.dumps(kept))
    draft.replace(run.folder / FILE)


def _open_address(flag: str) -> str:
    """Return the default address, or port 0 if the default port is taken."""
    from shoal_controller.settings import Settings

    host, port = split_address(Settings.model_fields[flag].default)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            port = 0
    return join_address(host, port)
