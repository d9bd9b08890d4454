"""`MLflow`: one run through every change of the world, found again by a tag that has the id of the job's run."""

from __future__ import annotations

from typing import Any

from shoal.callbacks.step_callback import JobOfRow, Row, StepCallback, check_installed

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
