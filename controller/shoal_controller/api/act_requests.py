"""What an operator would ask for, as the query of a preview has it: the requests of the routes that carry them out.

The bodies of those routes say what is valid; so do the limits here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from fastapi import Depends, Query
from shoal_protos.errors import UserError

from shoal_controller.api.models import MOST_WORKERS, DrainBody
from shoal_controller.core.machine.events import (
    Cancel,
    ConfirmLost,
    DrainWorker,
    OperatorRequest,
    Pause,
    Resume,
    Save,
    Scale,
)

MOST_NAME = 300


class Act(StrEnum):
    """What an operator may ask of a job."""

    SCALE = "scale"
    DRAIN = "drain"
    LOST = "lost"
    CHECKPOINT = "checkpoint"
    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"


OF_THE_JOB: dict[Act, OperatorRequest] = {
    Act.CHECKPOINT: Save(), Act.PAUSE: Pause(), Act.RESUME: Resume(), Act.CANCEL: Cancel(),
}  # fmt: skip
"""Acts that need nothing more."""


@dataclass(frozen=True, slots=True)
class AskedAct:
    """The query of a preview."""

    act: Act
    workers: int | None
    worker: str | None

    def request(self) -> OperatorRequest:
        """Raises `UserError` where something is missing."""
        if self.act in OF_THE_JOB:
            return OF_THE_JOB[self.act]
        if self.act is Act.SCALE:
            if self.workers is None:
                raise UserError(f"`workers` is missing; expected a whole number from 1 to {MOST_WORKERS} to scale to")
            return Scale(self.workers)
        if not self.worker:
            raise UserError(f"`worker` is missing; expected the id of the worker that {self.act} concerns, such as w3")
        return ConfirmLost(self.worker) if self.act is Act.LOST else DrainWorker(self.worker, DrainBody().grace_seconds)


def asked_act(
    act: Annotated[Act, Query(description="What would be asked for.")],
    workers: Annotated[int | None, Query(ge=1, le=MOST_WORKERS, description="Of `scale`: how many workers.")] = None,
    worker: Annotated[
        str | None, Query(max_length=MOST_NAME, description="Of `drain` and `lost`: id of the worker.")
    ] = None,
) -> AskedAct:
    """Of a request."""
    return AskedAct(act, workers, worker)


AnAct = Annotated[AskedAct, Depends(asked_act)]
