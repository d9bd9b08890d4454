"""The bodies of what the page asks for (`page_routes.py`): public like those of `answers.py`, from which they are made.

Every sentence in them was made by the core; the page and `shoal top` show it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from shoal_protos.acts import Act
from shoal_protos.error_codes import ErrorCode
from shoal_protos.runs import Span as BlockSpan

from shoal_controller.access.callers import Role
from shoal_controller.api.answers import Answer, EventAnswer, JobAnswer, MovedBytes
from shoal_controller.core.machine.figures import Use
from shoal_controller.core.machine.spec import JobView, ResizeView
from shoal_controller.core.overview.amounts import duration
from shoal_controller.core.overview.attention import Attention, Level, seconds_left
from shoal_controller.core.overview.holdings import holdings
from shoal_controller.core.overview.shown_sentences import changes_of, last_telling, resize_sentence
from shoal_controller.observe.job_series import JobSeries, Span


class AboutAnswer(Answer):
    """This controller, and what the token of the request may do."""

    version: str
    """Of Shoal."""
    page: str
    """Digest of the page's files; empty: this controller serves no page."""
    time: float
    """The controller's clock, in seconds since the epoch."""
    token: str
    """Name of the token; empty where none is asked for."""
    role: Role
    token_required: bool
    leads: bool
    """Whether this controller leads; else it shows what it has read from the store."""
    history_since: float | None
    """Since when it records the series of jobs; None: it records none."""
    history: str
    """That as a sentence."""


class AttentionAnswer(Answer):
    """Why a job stands where it does in the overview."""

    level: Level
    sentence: str

    @classmethod
    def of(cls, attention: Attention) -> Self:
        return cls(level=attention.level, sentence=attention.sentence)


class LastResizeAnswer(Answer):
    """The last change of a job's world that somebody made or suffered, and what it cost."""

    generation: int
    time: float
    """When it began, in seconds since the epoch."""
    reason: str
    pause_seconds: float
    bytes: MovedBytes
    lost_steps: int
    sentence: str

    @classmethod
    def of(cls, resize: ResizeView, sentence: str) -> Self:
        return cls(
            generation=resize.generation, time=resize.began_at, reason=resize.reason,
            pause_seconds=resize.pause_seconds, bytes=MovedBytes.of(resize), lost_steps=resize.lost_steps,
            sentence=sentence,
        )  # fmt: skip


class LastCheckpointAnswer(Answer):
    """The newest checkpoint that is known."""

    step: int
    time: float | None
    """When it was saved, in seconds since the epoch; None: not known, as of one that was found in its folder."""
    sentence: str


class HourAnswer(Answer):
    """A job's last hour, minute by minute, the oldest first; null where nothing was recorded."""

    every_seconds: float
    begin: float
    """When the first minute began, in seconds since the epoch."""
    active: list[int | None]
    """Fewest workers."""
    wanted: list[int | None]
    loss: list[float | None]

    @classmethod
    def of(cls, series: JobSeries, now: float) -> Self:
        minutes = series.minutes(now)
        return cls(
            every_seconds=60.0, begin=60.0 * (now // 60 - len(minutes) + 1),
            active=[one.active if one is not None else None for one in minutes],
            wanted=[one.wanted if one is not None else None for one in minutes],
            loss=[one.loss if one is not None else None for one in minutes],
        )  # fmt: skip


class JobRow(Answer):
    """A job in the overview."""

    job: JobAnswer
    attention: AttentionAnswer
    seconds_left: float | None
    """Until the last step, at the present pace; None: not known, or no steps run."""
    samples_per_second: float | None
    """Over the last seconds; None: not known."""
    step_seconds: float | None
    """Median wall time of a step."""
    goodput_ratio: float
    """Part of the seconds of wanted workers that trained."""
    worker_seconds: dict[Use, float]
    """Seconds of workers by their use."""
    unmirrored_blocks: int
    """Blocks with fewer copies than wanted."""
    last_resize: LastResizeAnswer | None
    last_checkpoint: LastCheckpointAnswer | None
    hour: HourAnswer | None
    """None: not asked for."""

    @classmethod
    def of(cls, view: JobView, attention: Attention, series: JobSeries, now: float) -> Self:
        """Without its last hour."""
        return cls(
            job=JobAnswer.of(view), attention=AttentionAnswer.of(attention), seconds_left=seconds_left(view),
            samples_per_second=series.samples_per_second, step_seconds=view.step_seconds_median,
            goodput_ratio=view.goodput_ratio, worker_seconds=dict(view.worker_seconds),
            unmirrored_blocks=view.unmirrored_blocks,
            last_resize=_last_resize(view, series), last_checkpoint=_last_checkpoint(view, now),
            hour=None,
        )  # fmt: skip

    def with_hour(self, series: JobSeries, now: float) -> Self:
        """The same, with its last hour."""
        return self.model_copy(update={"hour": HourAnswer.of(series, now)})


class OverviewAnswer(Answer):
    """All jobs, by who needs attention."""

    time: float
    """The controller's clock, in seconds since the epoch."""
    history_since: float | None
    """Since when this controller records the series of jobs; None: it records none."""
    jobs: list[JobRow]
    more: int
    """Jobs that `limit` has left out."""


class SeriesAnswer(Answer):
    """What a controller remembers of a job's course: columns of equal length, the oldest first."""

    job: str
    time: float
    """The controller's clock, in seconds since the epoch. A reader's later points are from before it was set back."""
    run: str
    """Which run of the job: a new one begins anew."""
    span: Span
    every_seconds: int
    since: float | None
    """Since when this controller records it; None: it does not lead, and records nothing."""
    sentence: str
    """What is to be known of that."""
    times: list[float]
    """Seconds since the epoch. Where nobody recorded there is no point."""
    step: list[int]
    loss: list[float | None]
    step_seconds: list[float | None]
    samples_per_second: list[float | None]
    goodput_ratio: list[float | None]
    active: list[int]
    """Workers in the world; in the series of a day the fewest since the point before."""
    wanted: list[int]
    unmirrored_blocks: list[int]
    """Blocks with fewer copies than wanted."""


def _last_resize(view: JobView, series: JobSeries) -> LastResizeAnswer | None:
    if (at := last_telling(view.resizes)) is None:
        return None
    resize = view.resizes[at]
    before = view.resizes[at - 1].generation if at else 0
    changes = changes_of(series.lanes_of(before), series.lanes_of(resize.generation))
    return LastResizeAnswer.of(resize, resize_sentence(resize, *changes))


class WorldAnswer(Answer):
    """One world of a job: why it began, what it cost, who was in it."""

    generation: int
    began: float
    """Seconds since the epoch."""
    ended: float | None
    """None: it trains, or the job is in a change that has not begun another one."""
    reason: str
    workers: int
    from_step: int
    pause_seconds: float
    phases: Mapping[str, float]
    """Seconds by phase of the change; empty until all members have reported theirs."""
    promoted_blocks: int
    bytes: MovedBytes
    lost_steps: int
    sentence: str
    lanes: Mapping[str, list[int]] | None
    """Of every member; None: it began before this controller led, or too long ago."""


class WorldsAnswer(Answer):
    """The worlds of a job, oldest first, as many as are remembered."""

    job: str
    time: float
    """The controller's clock, in seconds since the epoch."""
    worlds: list[WorldAnswer]


class TimelineAnswer(WorldAnswer):
    """One change of the world in full."""

    noticed_by: str
    """Who noticed its cause; empty: no event says so (any more)."""
    waited_for: list[str]
    """Workers for which others waited."""
    slowest: str
    """The worker whose pause was the longest; empty: not known."""
    timeline: list[EventAnswer]
    """What led to it, and what it went through, oldest first."""


class MemberAnswer(Answer):
    """What one member of the world has."""

    worker: str
    rank: int
    host: str
    domain: str
    lanes: list[int]
    owned: list[BlockSpan]
    """Blocks as half-open intervals."""
    mirrored: list[BlockSpan]


class FillAnswer(Answer):
    """Blocks on their way from one member to another."""

    source: str
    target: str
    blocks: int
    filled: int


class DomainAnswer(Answer):
    """The members in one failure domain."""

    domain: str
    workers: list[str]


class HoldingsAnswer(Answer):
    """Who holds what in the world that may train."""

    job: str
    generation: int
    """0: there is none."""
    lanes: int | None
    blocks: int
    copies_wanted: int | None
    """Of every block in this world, the owner's among them: never more than it has members; None: there is none."""
    block_bytes: int | None
    """Bytes of one block's state; None: not known."""
    sentence: str
    missing: list[BlockSpan]
    """Blocks with fewer copies than wanted, as half-open intervals."""
    members: list[MemberAnswer]
    domains: list[DomainAnswer]
    fills: list[FillAnswer]

    @classmethod
    def of(cls, view: JobView) -> Self:
        found, world = holdings(view), view.world
        members = [
            MemberAnswer(
                worker=one.worker, rank=one.rank, host=one.host, domain=one.domain, lanes=list(one.lanes),
                owned=list(one.owned.spans), mirrored=list(one.mirrored.spans),
            )
            for one in found.members
        ]  # fmt: skip
        return cls(
            job=view.job, generation=view.generation, lanes=view.lanes, blocks=world.blocks if world else 0,
            copies_wanted=view.copies_wanted, block_bytes=view.block_bytes, sentence=found.sentence,
            missing=list(found.missing.spans), members=members,
            domains=[DomainAnswer(domain=name, workers=list(inside)) for name, inside in found.domains.items()],
            fills=[
                FillAnswer(source=one.source, target=one.target, blocks=one.blocks, filled=one.filled)
                for one in found.fills
            ],
        )  # fmt: skip


class LogAnswer(Answer):
    """The end of what a worker has printed."""

    worker: str
    path: str
    """Of the file, or `pod NAME`."""
    bytes: int | None
    """Of all of it; None: not known, as of a pod that has printed much."""
    begin: int | None
    """Where in it the text begins; None: not known, but not at its beginning."""
    text: str
    """Bytes that are no UTF-8 are shown as U+FFFD."""


class PreviewAnswer(Answer):
    """What a request would do."""

    act: Act
    possible: bool
    code: ErrorCode | None
    """Of the problem that would refuse it; None: it is possible."""
    sentence: str
    """What it would do, or why it cannot be done."""
    version: str
    """The job's: to be sent as `If-Match` with the request."""


def worlds_of(view: JobView, series: JobSeries) -> list[WorldAnswer]:
    """Oldest first."""
    ends = [*(one.began_at for one in view.resizes[1:]), view.ended_at]
    before = [None, *(series.lanes_of(one.generation) for one in view.resizes[:-1])]
    return [
        _world(resize, ended, series, lanes_before)
        for resize, ended, lanes_before in zip(view.resizes, ends, before, strict=False)
    ]


def _world(
    resize: ResizeView, ended: float | None, series: JobSeries, before: Mapping[str, tuple[int, ...]] | None
) -> WorldAnswer:
    lanes = series.lanes_of(resize.generation)
    return WorldAnswer(
        generation=resize.generation, began=resize.began_at, ended=ended, reason=resize.reason,
        workers=resize.workers, from_step=resize.from_step, pause_seconds=resize.pause_seconds,
        phases=dict(resize.phases), promoted_blocks=resize.promoted_blocks, bytes=MovedBytes.of(resize),
        lost_steps=resize.lost_steps, sentence=resize_sentence(resize, *changes_of(before, lanes)),
        lanes=None if lanes is None else {worker: list(held) for worker, held in lanes.items()},
    )  # fmt: skip


def _last_checkpoint(view: JobView, now: float) -> LastCheckpointAnswer | None:
    if view.last_checkpoint_step is None:
        return None
    time = view.checkpoints[0].saved_at if view.checkpoints else None
    ago = f", {duration(max(0.0, now - time))} ago" if time is not None else ""
    return LastCheckpointAnswer(
        step=view.last_checkpoint_step, time=time, sentence=f"step {view.last_checkpoint_step}{ago}"
    )
