"""`TensorBoard`: scalars over steps, one run of TensorBoard through every change of the world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.callbacks.step_callback import JobOfRow, Row, StepCallback, check_folder, check_installed


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
