"""The configuration of a job's training side: DeepSpeed's file with a section `shoal`, read once by `initialize`."""

from shoal.config.document import Checkpoint, Optimizer, Scheduler
from shoal.config.load import load_config
from shoal.config.training import TrainingConfig, agreement

__all__ = ["Checkpoint", "Optimizer", "Scheduler", "TrainingConfig", "agreement", "load_config"]
