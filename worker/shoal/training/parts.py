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
from shoal.training.residency import residency_of
from shoal.training.resize import Resize
from shoal.training.status import StatusReport
from shoal.training.step import Step, Update, Voting


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

        def take_part() -> None:
            resize.take_part(broken=True)

        def on_all_here() -> None:
            boundary.on_all_here()

        corruption = CorruptionWatch(context)
        loading = CheckpointLoading(context)
        residency = residency_of(context.config.stage)
        parameters = residency.parameters(context, take_part, on_all_here)
        saving = CheckpointSaving(context, corruption, loading, parameters)
        evaluation = Evaluation(context)
        evaluation.after_telling = saving.states.retake
        requests = Requests(context, saving, parameters, evaluation)
        status = StatusReport(context, loading, saving, corruption, evaluation)
        boundary = Boundary(context, corruption, saving, evaluation, requests, status)
        boundary.bring_parameters, boundary.commits.all_here = parameters.settle, parameters.all_here
        update = Update(context, evaluation)
        voting = Voting(context, corruption, saving, evaluation, requests)
        step = Step(context, voting, update, boundary, evaluation, parameters)
        step.reducing = residency.reducing(context, step.on_reduced, parameters.on_gradients)
        resize = Resize(context, step, boundary, loading, requests, status)
        return cls(corruption, loading, saving, evaluation, requests, status, boundary, update, step, resize)
