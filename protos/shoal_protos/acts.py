"""The verbs of an operator, each once: REST, its clients and the history of a job are derived from here.

A verb is a subclass of `OperatorRequest`, which is the event that the job machine hears, a line of `Act`, and a call of
`ActCalls`, which both clients have. The machine carries it out in `phases/operator_requests.py`, and
`core/overview/previews.py` says beforehand what that does; a command in `cli/jobs.py` and the page's `acts.js` and
`job_view.js` ask for it. The routes (`api/routes.py`) and the entries of `jobs/audit.py` follow from here. A verb with
a body also has a model and a line of `WITH_BODIES` in `api/models.py`, and its fields in a preview's query
(`api/act_requests.py`). Pure: nothing is sent here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

from shoal_protos.path_part import path_part
from shoal_protos.text import plural

GRACE_SECONDS = 30.0
"""In which a drained worker's blocks may be copied elsewhere, where nothing else is said."""

# ---- the requests. Their docstrings are REST's descriptions.


@dataclass(frozen=True, slots=True)
class OperatorRequest:
    """Request of an operator. One that is impossible is refused with a `UserError`, and nothing has changed."""

    words: ClassVar[str] = ""
    """Its sentence, where that is always the same."""

    def sentence(self) -> str:
        """Return how the job's history puts it."""
        return self.words


@dataclass(frozen=True, slots=True)
class Scale(OperatorRequest):
    """Set the number of workers, or its bounds, in the job's resource where it was made from one."""

    workers: int | None = None
    least: int | None = None
    most: int | None = None
    """0: no bound but the lanes. None, as of the others: as it is."""
    spares: int | None = None

    def sentence(self) -> str:
        size = f"to {plural(self.workers, 'worker')}" if self.workers is not None else ""
        least = f"with at least {self.least}" if self.least is not None else ""
        most = f"with at most {self.most or 'its lanes'}" if self.most is not None else ""
        spares = f"with {plural(self.spares, 'spare')}" if self.spares is not None else ""
        return " ".join(filter(None, ("scale", size, " and ".join(filter(None, (least, most, spares))))))


@dataclass(frozen=True, slots=True)
class DrainWorker(OperatorRequest):
    """Drain a worker: copy its blocks elsewhere, then let it go."""

    worker: str
    grace_seconds: float = GRACE_SECONDS
    why: str = ""
    """As the operator puts it, for the history."""

    def sentence(self) -> str:
        return f"drain {self.worker} within {self.grace_seconds:g} s{f': {self.why}' if self.why else ''}"


@dataclass(frozen=True, slots=True)
class ConfirmLost(OperatorRequest):
    """Confirm that a silent worker is dead, so that nobody waits for it."""

    worker: str

    def sentence(self) -> str:
        return f"{self.worker} is dead"


class Save(OperatorRequest):
    """Save a checkpoint after the next step; it is listed once it is complete."""

    words = "save a checkpoint"


class Pause(OperatorRequest):
    """Pause training; workers stay connected."""

    words = "pause the job"


class Resume(OperatorRequest):
    """Resume a paused job."""

    words = "resume the job"


class Cancel(OperatorRequest):
    """Stop a job; its events stay. Forget a finished job, with its events and logs; its checkpoints stay."""

    words = "stop the job"


class Act(StrEnum):
    """What an operator may ask of a job."""

    def __new__(
        cls, name: str, asks: type[OperatorRequest], operation: str, below: str, tag: str = "jobs", method: str = "POST"
    ) -> Act:
        act = str.__new__(cls, name)
        act._value_ = name
        act.asks, act.operation, act.below, act.tag, act.method = asks, operation, below, tag, method
        return act

    asks: type[OperatorRequest]
    operation: str
    """Its name in REST, and the call of a client."""
    below: str
    """Its path below the job's."""
    tag: str
    method: str

    SCALE = "scale", Scale, "scale_job", "/scale"
    DRAIN = "drain", DrainWorker, "drain_worker", "/workers/{worker}/drain", "workers"
    LOST = "lost", ConfirmLost, "confirm_worker_lost", "/workers/{worker}/lost", "workers"
    CHECKPOINT = "checkpoint", Save, "save_checkpoint", "/checkpoints", "checkpoints"
    PAUSE = "pause", Pause, "pause_job", "/pause"
    RESUME = "resume", Resume, "resume_job", "/resume"
    CANCEL = "cancel", Cancel, "delete_job", "", "jobs", "DELETE"

    @classmethod
    def of(cls, request: OperatorRequest) -> Act:
        """Return the act that asks for it."""
        return next(act for act in cls if act.asks is type(request))

    def path_of(self, job: str, worker: str) -> str:
        """Return its path below `/v1`. Raises `UserError` for a wrong name."""
        path = f"/jobs/{path_part(job)}{self.below}"
        return path.format(worker=path_part(worker)) if "{worker}" in path else path


Answer = TypeVar("Answer", covariant=True)


class ActCalls(ABC, Generic[Answer]):
    """Part of a client of REST: a call for each act. `Answer`: the client's form of the job that is answered.

    `if_version`: the version that the job must still have (its `version`); None: any.
    """

    def _act(
        self, act: Act, job: str, worker: str = "", if_version: str | None = None, body: dict[str, Any] | None = None
    ) -> Answer:
        given = None if body is None else {key: value for key, value in body.items() if value is not None}
        headers = {} if if_version is None else {"If-Match": f'"{if_version}"'}
        return self._changed(job, act.method, act.path_of(job, worker), given, headers)

    @abstractmethod
    def _changed(
        self, job: str, method: str, path: str, body: dict[str, Any] | None, headers: Mapping[str, str]
    ) -> Answer:
        """Send a request that changes the job."""

    def scale_job(
        self, job: str, workers: int | None = None, *, min: int | None = None, max: int | None = None,
        spares: int | None = None, if_version: str | None = None,
    ) -> Answer:  # fmt: skip
        """Set how many workers and spares are wanted, or between which numbers the workers may be."""
        body = {"workers": workers, "min": min, "max": max, "spares": spares}
        return self._act(Act.SCALE, job, if_version=if_version, body=body)

    def drain_worker(
        self, job: str, worker: str, *, grace_seconds: float | None = None, why: str = "", if_version: str | None = None
    ) -> Answer:
        """Have a worker's blocks copied elsewhere, then let it go."""
        return self._act(Act.DRAIN, job, worker, if_version, {"grace_seconds": grace_seconds, "why": why or None})

    def confirm_worker_lost(self, job: str, worker: str, *, if_version: str | None = None) -> Answer:
        """Confirm that a silent worker is dead, so that nobody waits for it."""
        return self._act(Act.LOST, job, worker, if_version)

    def save_checkpoint(self, job: str, *, if_version: str | None = None) -> Answer:
        """Save a checkpoint after the next step; it is listed once it is complete."""
        return self._act(Act.CHECKPOINT, job, if_version=if_version)

    def pause_job(self, job: str, *, if_version: str | None = None) -> Answer:
        """Pause training; workers stay connected."""
        return self._act(Act.PAUSE, job, if_version=if_version)

    def resume_job(self, job: str, *, if_version: str | None = None) -> Answer:
        """Resume a paused job."""
        return self._act(Act.RESUME, job, if_version=if_version)

    def delete_job(self, job: str, *, if_version: str | None = None) -> Answer:
        """Stop a job; its events stay. Forget a job that is over."""
        return self._act(Act.CANCEL, job, if_version=if_version)
