"""`WandB`: one run of Weights & Biases through every change of the world, by the id of the job's run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal_protos.errors import UserError

from shoal.callbacks.step_callback import JobOfRow, Row, StepCallback, check_folder, check_installed

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
