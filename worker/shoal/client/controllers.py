"""The controllers of one client: that at its address, or, where it was given none, those that the commands find here.

Asked anew with every call, because runs begin and end while a program lives. Called by
`rest_client.py`; what is said to a controller is in `sending.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

from shoal_protos.living_runs import Run, answering_runs

from shoal.client.sending import RestSender

DEFAULT_URL = "http://127.0.0.1:7070"


class Controllers:
    """The connections of a client."""

    def __init__(self, url: str | None, token: str | None, retry_seconds: float) -> None:
        """As `Client` has them. Raises `UserError` for what cannot be used."""
        self._token, self._retry_seconds = token, retry_seconds
        self._folder = Path(os.environ.get("SHOAL_DATA") or ".shoal")
        self._given = RestSender(url or os.environ.get("SHOAL_URL") or DEFAULT_URL, token, self._folder, retry_seconds)
        self._of_runs: dict[tuple[str, int], RestSender] = {}

    def close(self) -> None:
        for sender in (self._given, *self._of_runs.values()):
            sender.close()

    def of(self, job: str = "") -> RestSender:
        """The controller of the run that trains the job, or else the first one."""
        return self.all(job)[0]

    def all(self, job: str = "") -> list[RestSender]:
        """The controller of the run that trains the job, or all of them."""
        if self._given.address.url != DEFAULT_URL:
            return [self._given]
        return [self._given if run is None else self._of_run(run) for run in answering_runs(self._folder, job)]

    def _of_run(self, run: Run) -> RestSender:
        process = run.url, run.pid
        if process not in self._of_runs:
            self._of_runs[process] = RestSender(run.url, self._token, run.folder, self._retry_seconds)
        return self._of_runs[process]
