"""Trackers as callbacks, each with one record of a job through every change of the world.

`CSV` is a file with one line for each step, whichever worker wrote it. A step that is made again (the job went back to
a checkpoint, or rank 0 died in its callbacks) replaces what the file has from it on, so the file reads like that of an
undisturbed job. `MLflow` finds its run again by a tag with the id of the job's run, `WandB` by that id; `TensorBoard`
writes scalars over steps into one folder.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal_protos.errors import UserError

from shoal.callbacks.step_callback import JobOfRow, Row, StepCallback, check_folder, check_installed

FIRST = "step"


class CSV(StepCallback):
    """`engine.on_step(shoal.callbacks.CSV("steps.csv"))`. All workers must be able to write the file."""

    def __init__(self, path: str | Path) -> None:
        """Open the file. Raises `UserError` if it cannot be written, or is not a file of steps."""
        super().__init__()
        self._path = Path(path)
        self._columns: list[str] = []
        self._last, self._at, self._row = -1, 0, dict[str, Any]()
        """The last step in the file, where this worker wrote it: where its line begins, and what stands there."""
        check_folder("CSV", self._path.parent)
        self._check()

    def _check(self) -> None:
        try:
            with self._path.open("a+", newline="") as file:
                file.seek(0)
                first = file.readline()
        except OSError as error:
            raise UserError(
                f"shoal.callbacks.CSV: {self._path} cannot be written ({error.strerror}); name another file."
            ) from None
        if first and next(csv.reader([first]))[:1] != [FIRST]:
            raise UserError(
                f"shoal.callbacks.CSV: {self._path} is not a file of steps (its first line is {first.strip()[:80]!r}); "
                "name another file."
            )

    def write(self, row: Row, job: JobOfRow) -> None:  # noqa: ARG002
        self._put(row, replaces=False)

    def add(self, row: Row, job: JobOfRow) -> None:  # noqa: ARG002
        """To the step's line, which says when the step was made."""
        step = int(row[FIRST])
        line: Mapping[str, Any] = self._row
        if step != self._last:
            line = next((one for one in _rows(self._path) if int(one[FIRST]) == step), row)
        self._put({**line, **{name: value for name, value in row.items() if name != "time"}}, replaces=True)

    def _put(self, row: Mapping[str, Any], replaces: bool) -> None:
        """The line of a step. `replaces`: it has all that this worker's last line has, if that is of the same step."""
        step = int(row[FIRST])
        is_known = self._last >= 0 and row.keys() <= set(self._columns)
        in_place = is_known and replaces and step == self._last
        if not (in_place or (is_known and step > self._last)):
            self._begin_at(step, row)
        with self._path.open("r+" if in_place else "a", newline="") as file:
            self._at = file.seek(self._at) if in_place else file.tell()
            file.write(_lines([[row.get(name, "") for name in self._columns]]))
            file.truncate()
        self._last, self._row = step, dict(row)

    def _begin_at(self, step: int, row: Mapping[str, Any]) -> None:
        """The file ends before that step, and has a column for each number."""
        kept = [one for one in _rows(self._path) if int(one[FIRST]) < step]
        columns = dict.fromkeys([*(name for one in kept[:1] for name in one), *row])
        self._columns = list(columns)
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        text = _lines([self._columns, *([one.get(name, "") for name in self._columns] for one in kept)])
        new.write_text(text, newline="")
        new.replace(self._path)


def _rows(path: Path) -> list[dict[str, str]]:
    """Whole lines only: a worker may have been killed while it wrote its last one."""
    text = path.read_text() if path.exists() else ""
    whole = io.StringIO(text[: text.rfind("\n") + 1], newline="")
    return [row for row in csv.DictReader(whole, restval="") if row[FIRST].isdigit()]


def _lines(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


TAG = "shoal.run"


class MLflow(StepCallback):
    """`engine.on_step(shoal.callbacks.MLflow("my experiment", tracking_uri="http://mlflow:5000"))`."""

    def __init__(self, experiment: str = "shoal", tracking_uri: str | None = None, name: str | None = None) -> None:
        """`tracking_uri`: by default that of MLFLOW_TRACKING_URI. Raises `UserError` if the package is missing."""
        super().__init__()
        check_installed("MLflow", "mlflow")
        self._experiment, self._uri, self._name = experiment, tracking_uri, name
        self._client: Any = None
        self._run = ""

    def write(self, row: Row, job: JobOfRow) -> None:
        if self._client is None:
            self._open(job)
        from mlflow.entities import Metric

        when, step = int(1000 * row["time"]), int(row["step"])
        named = {name: value for name, value in row.items() if name not in ("step", "time")}
        self._client.log_batch(self._run, [Metric(name, float(value), when, step) for name, value in named.items()])

    def _open(self, job: JobOfRow) -> None:
        """The job's run, or a new one."""
        from mlflow import MlflowClient

        client = MlflowClient(self._uri)
        known = client.get_experiment_by_name(self._experiment)
        place = known.experiment_id if known is not None else client.create_experiment(self._experiment)
        found = client.search_runs([place], f"tags.`{TAG}` = '{job.run}'")
        if found:
            self._run = found[0].info.run_id
        else:
            name = self._name or job.name or None
            self._run = client.create_run(place, tags={TAG: job.run}, run_name=name).info.run_id
        self._client = client

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run)
            self._client = None


MODES = ("online", "offline", "disabled")


class WandB(StepCallback):
    """`engine.on_step(shoal.callbacks.WandB(project="mine", mode="offline"))`.

    Offline each worker that is rank 0 writes a folder of its own with the same run id, which `wandb sync` joins.
    """

    def __init__(
        self, project: str | None = None, entity: str | None = None, name: str | None = None,
        folder: str | Path = ".", mode: str | None = None,
    ) -> None:  # fmt: skip
        """`mode`: by default that of WANDB_MODE. Raises `UserError` if the package is missing, the folder cannot be
        created, or the mode is unknown.
        """
        super().__init__()
        check_installed("WandB", "wandb")
        check_folder("WandB", Path(folder))
        if mode is not None and mode not in MODES:
            raise UserError(f"shoal.callbacks.WandB: mode is {mode!r}; allowed are {', '.join(MODES)}.")
        self._where = {"project": project, "entity": entity, "dir": str(folder), "mode": mode}
        self._name = name
        self._run: Any = None

    def write(self, row: Row, job: JobOfRow) -> None:
        if self._run is None:
            import wandb

            self._run = wandb.init(**self._where, name=self._name or job.name or None, id=job.run, resume="allow")
            self._run.define_metric("*", step_metric="step")  # steps may be made again: its own only grow
        self._run.log(row)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


class TensorBoard(StepCallback):
    """`engine.on_step(shoal.callbacks.TensorBoard("runs/first"))`. All workers must be able to write the folder.

    Each worker that is rank 0 adds a file to it. TensorBoard purges the values of steps that run again.
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises `UserError` if the package is missing or the folder cannot be created."""
        super().__init__()
        check_installed("TensorBoard", "tensorboard")
        check_folder("TensorBoard", Path(folder))
        self._folder, self._last = str(folder), -1
        self._writer: Any = None

    def write(self, row: Row, job: JobOfRow) -> None:
        step = int(row["step"])
        if self._writer is None or step <= self._last:
            self._open(purge_step=step)
        self.add(row, job)
        self._last = step

    def _open(self, purge_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(self._folder, purge_step=purge_step)

    def add(self, row: Row, job: JobOfRow) -> None:  # noqa: ARG002
        step = int(row["step"])
        if self._writer is None:
            self._open(purge_step=step + 1)
        for name, value in row.items():
            if name not in ("step", "time"):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a worker may be killed at any time

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
