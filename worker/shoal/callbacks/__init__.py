"""Callbacks for `engine.on_step`: trackers that keep one run through every change of the world, a progress line, what
follows from the best number.

    engine.on_step(shoal.callbacks.CSV("steps.csv"))

What the configuration asks for (`csv_monitor`, `tensorboard`, `wandb`, `steps_per_print`) is in monitoring.py. A
tracker's package is imported when the first step is written.
"""

from __future__ import annotations

from shoal.callbacks.best_number import EarlyStopping, SaveBest
from shoal.callbacks.step_callback import Progress
from shoal.callbacks.trackers import CSV, MLflow, TensorBoard, WandB

__all__ = ["CSV", "EarlyStopping", "MLflow", "Progress", "SaveBest", "TensorBoard", "WandB"]
