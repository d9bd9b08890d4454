"""What the client answers: REST's bodies as objects. Keys that a newer controller adds are left out.

The names are REST's own (docs/rest.md); times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from shoal_protos.rest import OVER, AnswerObject
from shoal_protos.validation import every_sentence


class RestAnswer(BaseModel):
    """What all answers have in common."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    @classmethod
    def read(cls, content: AnswerObject) -> Self:
        """The object of an answer's content. Raises `NoController` for one that this release cannot read."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise content.unread(every_sentence(error.errors()[:1], "it")) from None


class WorkerNumbers(RestAnswer):
    """How many workers a job wants, has, and may have."""

    wanted: int
    active: int
    min: int
    max: int | None
    """None until the job's lanes are known."""


class JobInfo(RestAnswer):
    """A job, as it was when the controller answered."""

    job: str
    phase: str
    generation: int
    workers: WorkerNumbers
    lanes: int | None
    step: int
    max_steps: int | None
    loss: float | None
    samples: int | None
    last_checkpoint_step: int | None
    reason: str
    """Why it is in this phase, in one sentence."""
    created: float
    started: float | None
    ended: float | None
    version: str
    """Changes with whatever is asked of the job: pass it as `if_version` to a change that depends on it."""
    reports: Mapping[str, float | None] = Field(default_factory=dict)
    """The last number that the script has reported under each name, evaluations included."""

    @property
    def is_over(self) -> bool:
        """Whether it has succeeded, failed or was cancelled."""
        return self.phase in OVER


class WorkerInfo(RestAnswer):
    """A worker of a job, also one that is gone."""

    worker: str
    host: str
    pid: int | None
    state: str
    rank: int | None
    lanes: list[int]
    blocks: int
    mirrored_blocks: int
    step: int
    step_seconds: float
    memory_bytes: int
    log: str
    pod: str
    node: str
    why: str
    """Why it has not started, leaves or is gone; empty while it is as it should be."""


class EventInfo(RestAnswer):
    """One entry of a job's history."""

    revision: int
    """Its number in the job, from 1 on."""
    time: float
    kind: str
    """docs/events.md lists all kinds."""
    generation: int
    worker: str
    """Empty where it concerns no single worker."""
    message: str
    data: Mapping[str, Any]


class EventOfJobInfo(EventInfo):
    """One entry of the history of some job."""

    job: str


class CheckpointInfo(RestAnswer):
    """A complete checkpoint."""

    step: int
    generation: int
    path: str
    bytes: int


class GenerationInfo(RestAnswer):
    """One world of a job: why it began, what it cost."""

    generation: int
    workers: int
    reason: str
    from_step: int
    pause_seconds: float
    phases: Mapping[str, float]
    promoted_blocks: int
    bytes: Mapping[str, int]
    """Bytes of state that were moved: `pause`, `fill`, `checkpoint`."""
    lost_steps: int


class ReportInfo(RestAnswer):
    """The report of a run, as `shoal run --json` writes it."""

    job: str
    steps: int
    fingerprint: str
    """Empty until the job has succeeded."""
    final_loss: float | None
    generations: list[GenerationInfo]
    step_seconds_median: float | None
    samples: int | None
    goodput_ratio: float
    stepping_ratio: float
    wanted_seconds: float
    worker_seconds: Mapping[str, float]


class TokenInfo(RestAnswer):
    """A named token, without its secret unless it was made just now."""

    name: str
    role: str
    created: float
    created_by: str
    expires: float | None
    token: str = ""
    """The secret, in the answer that has made it; else empty."""
