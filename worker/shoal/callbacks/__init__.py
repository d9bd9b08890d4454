"""Callbacks for `engine.on_step`: trackers that keep one run through every change of the world, a progress line, what
follows from the best number.

    engine.on_step(shoal.callbacks.CSV("steps.csv"))

What the configuration asks for (`csv_monitor`, `tensorboard`, `wandb`, `steps_per_print`) is in configured.py. A
tracker's package is imported when the first step is written.
"""

from __future__ import annotations

from shoal.callbacks.best_number import EarlyStopping, SaveBest
from shoal.callbacks.csv_file import CSV
from shoal.callbacks.mlflow_run import MLflow
from shoal.callbacks.progress_line import Progress
from shoal.callbacks.tensorboard_folder import TensorBoard
from shoal.callbacks.wandb_run import WandB

__all__ = ["CSV", "EarlyStopping", "MLflow", "Progress", "SaveBest", "TensorBoard", "WandB"]
