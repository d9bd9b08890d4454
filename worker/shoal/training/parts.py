"""The parts of the training side, and who knows whom: each is given only parts that stand above it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.training.boundary import Boundary
from shoal.training.checkpoint_loading import CheckpointLoading
from shoal.training.checkpoint_saving import CheckpointSaving
from shoal.training.context import TrainingContext
from shoal.training.corruption_watch import CorruptionWatch
from shoal.training.evaluation import Evaluation
from shoal.training.requests import Requests
from shoal.training.resize import Resize
from shoal.training.status import StatusReport
from shoal.training.step import Step
from shoal.training.update import Update
from shoal.training.voting import Voting


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one engine."""

    corruption: CorruptionWatch
    loading: CheckpointLoading
    saving: CheckpointSaving
    evaluation: Evaluation
    requests: Requests
    status: StatusReport
    boundary: Boundary
    update: Update
    step: Step
    resize: Resize

    @classmethod
    def of(cls, context: TrainingContext) -> Parts:
        """Puts them together."""
        corruption = CorruptionWatch(context)
        loading = CheckpointLoading(context)
        saving = CheckpointSaving(context, corruption, loading)
        evaluation = Evaluation(context)
        requests = Requests(context, saving)
        status = StatusReport(context, loading, saving, corruption)
        boundary = Boundary(context, corruption, saving, evaluation, requests, status)
        update = Update(context, evaluation)
        voting = Voting(context, corruption, saving, evaluation, requests)
        step = Step(context, voting, update, boundary, evaluation)
        resize = Resize(context, step, boundary, loading, requests, status)
        return cls(corruption, loading, saving, evaluation, requests, status, boundary, update, step, resize)
