"""A job's specification as the core sees it, and the phases and states that people see. Plain data, checked already.

The core asks a job for a trait of its launcher (`JobSpec.traits`), never for its name. A new launcher is a kind and a
line of `LAUNCHER_TRAITS` here, a line of `launchers/registry.py`, and its module there; if it has settings, they are in
`settings.py` and come by `LauncherMeans`, which `server.py` fills; a section of a job's body is in `api/models.py` and
in `JobSpec`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from shoal_protos.activity import Activity
from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.gpu import Gpu
from shoal_protos.plan import OMITTED, Plan
from shoal_protos.shape import ONE, Shape

from shoal_controller.core.machine.figures import Figures, Use
from shoal_controller.core.machine.pending import PendingReason

LauncherKind = Literal["none", "local", "kubernetes"]
"""Kinds as a job's specification names them: the keys of `LAUNCHER_TRAITS`."""
NO_LAUNCHER: LauncherKind = "none"


@dataclass(frozen=True, slots=True)
class LauncherTraits:
    """A launcher's, as far as decisions depend on them."""

    starts: bool = True
    """It starts workers and sees their ends; without it they come by themselves (`shoal worker`)."""
    readmits: bool = True
    """An evicted worker may thaw and join again; else its process is ended, for it holds what another one needs."""


LAUNCHER_TRAITS: Mapping[str, LauncherTraits] = {
    "none": LauncherTraits(starts=False),
    "local": LauncherTraits(),
    "kubernetes": LauncherTraits(readmits=False),
}


def traits_of(launcher: str) -> LauncherTraits:
    """Return the traits of a kind; the ordinary ones of one that only a newer Shoal knows, which may have stored it."""
    return LAUNCHER_TRAITS.get(launcher, LauncherTraits())


class Phase(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    RESIZING = "resizing"
    PAUSED = "paused"
    STALLED = "stalled"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED)


class State(StrEnum):
    """States of a worker. `ready`: warmed up, not yet a member."""

    STARTING = "starting"
    READY = "ready"
    ACTIVE = "active"
    DRAINING = "draining"
    SUSPECTED = "suspected"
    LOST = "lost"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class WorkerBounds:
    """Between which numbers the wanted number of workers may be."""

    least: int
    """With fewer no step runs."""
    most: int | None
    """None: the job's lanes."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The body of `POST /v1/jobs`, with defaults filled in."""

    job: str
    wanted: int
    wanted_by_default: bool = field(default=False, kw_only=True)
    """Nobody has asked for so many: the first worker's lanes may lower it."""
    min_workers: int | None = None
    """None: what the training config says, else 1."""
    max_workers: int | None = None
    """None: what the training config says, else the job's lanes."""
    launcher: str = NO_LAUNCHER
    """A kind of `LAUNCHER_TRAITS`."""
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    lanes: int | None = None
    """Where given, every worker's config must agree."""
    heartbeat_seconds: float = 1.0
    suspect_after: int = 3
    """Missed heartbeats."""
    reconnect_seconds: float = 10.0
    progress_seconds: float = 10.0
    stall_seconds: float = 1800.0
    max_restarts: int = 3
    resume: str | int | bool | None = None
    kubernetes: str = ""
    """The section `kubernetes`, as JSON: only its launcher reads it. Empty: none."""
    kubernetes_defaults: str = field(default="", kw_only=True, metadata=OMITTED)
    """What an administrator had set where that section says nothing, when the job was made. Empty: nothing."""
    resource: str = ""
    """Uid of the ElasticJob that the job was made from, which has the job's size; empty: it was submitted over REST."""
    run: str = ""
    """Which run of the job this is: random, given by the shell when the job is made, and kept as long as it lives."""
    request_key: str = ""
    """The Idempotency-Key of the request that made it; empty: it had none."""
    request_digest: str = ""
    """SHA-256 of that request: with the same key another one is refused."""
    owner: str = field(default="", kw_only=True, metadata=OMITTED)
    """Name of the token that it was created with; empty: no token was asked for, or a resource has created it."""
    cell: Shape | None = field(default=None, metadata=OMITTED)
    """Where given, the cells of every worker's config must be so; None: the first worker says what they are."""
    spares: int = field(default=0, kw_only=True, metadata=OMITTED)
    """Workers beyond `wanted` that mirror, and train when another one is lost."""
    spares_train: bool | None = field(default=None, kw_only=True, metadata=OMITTED)
    """Whether they train meanwhile; None: where the job has four lanes for each of its workers."""
    started_together: int = field(default=1, metadata=OMITTED)
    """So many processes its launcher starts at a time, in one place which ends when all of them have ended: a pod."""

    @property
    def least_workers(self) -> int:
        """Fewest workers to train with, while the training config is not known."""
        return self.min_workers or math.lcm((self.cell or ONE).processes, self.started_together)

    @property
    def traits(self) -> LauncherTraits:
        """Of its launcher."""
        return traits_of(self.launcher)


@dataclass(frozen=True, slots=True)
class JobView:
    """`GET /v1/jobs/{job}` and what the report, the metrics and the live display need besides."""

    job: str
    phase: Phase
    generation: int
    wanted: int
    active: int
    """Members, spares apart."""
    min_workers: int
    max_workers: int | None
    lanes: int | None
    step: int
    max_steps: int | None
    loss: float | None
    last_checkpoint_step: int | None
    reason: str
    run: str = ""
    spares: int = 0
    """Members beyond `wanted` that it is to have."""
    active_spares: int = 0
    trainers: int = 0
    """So many members train at most; the others are spares. 0: all do."""
    owner: str = ""
    """Name of the token that it was created with; empty: none."""
    version: int = 0
    """How often what is asked of it was changed (`machine.py`)."""
    created_at: float = 0.0
    started_at: float | None = None
    """When its first world began; None: none has."""
    ended_at: float | None = None
    """When the job was over; None while it is not."""
    workers: tuple[WorkerView, ...] = ()
    unmirrored_blocks: int = 0
    """Those with fewer copies than wanted (`view.py`)."""
    figures: Figures = field(default_factory=Figures)
    """What is counted, as it is in the store."""
    samples: int | None = None
    """Samples in committed steps; None: not known yet."""
    goodput_ratio: float = 0.0
    """Part of the seconds of wanted workers that trained."""
    stepping_ratio: float = 0.0
    """Part of the wall time since the first step that was spent in committed steps, by however few workers."""
    worker_seconds: Mapping[Use, float] = field(default_factory=dict)
    wanted_seconds: float = 0.0
    last_commit: float | None = None
    reports: Mapping[str, float] = field(default_factory=dict)
    """The last number that the script has reported under each name, evaluations included."""
    fingerprint: str = ""
    step_seconds_median: float | None = None
    resizes: tuple[ResizeView, ...] = ()
    checkpoints: tuple[CheckpointRef, ...] = ()
    """Newest first."""
    can_checkpoint: bool = False
    """Whether its training config names a folder for checkpoints."""
    saves_to: str | None = None
    """URL of its checkpoints; empty where it saves none; None until a worker has described the job."""
    pending: Mapping[PendingReason, int] = field(default_factory=dict)
    """How many workers wait to start, by reason."""
    launcher: str = NO_LAUNCHER
    paused: bool = False
    """An operator, or Shoal itself, has paused it."""
    stopping: bool = False
    """It was cancelled, and its workers end after their step."""
    world: Plan | None = None
    """The world that may train."""
    stage: int | None = None
    """ZeRO's; None: not known."""
    copies_wanted: int | None = None
    """Of every block in this world, the owner's among them; None: there is no world."""
    block_bytes: int | None = None
    """Bytes of one block's state: what a fill sends; None: not known."""
    default_bounds: WorkerBounds = WorkerBounds(1, None)
    """Between which numbers `wanted` may be where nobody says so: what the training config says."""
    cell: Shape = ONE
    """What its cells are: how many processes train a lane together."""
    deepest_inbox: int = 0
    """Most events that stood in line at a time, in the last minute. The shell knows it."""

    @property
    def traits(self) -> LauncherTraits:
        """Of its launcher."""
        return traits_of(self.launcher)

    @property
    def most_members(self) -> int | None:
        """So many workers can train at once; None: its lanes are not known."""
        return self.cell.most_members(self.lanes) if self.lanes is not None else None

    @property
    def full_cells(self) -> int:
        """Cells of the world that have lost no member; where a cell is one process nothing is said of it."""
        left = Counter(worker.cell for worker in self.workers if worker.cell is not None)
        return sum(members == self.cell.processes for members in left.values())

    @property
    def wanted_cells(self) -> int:
        """Whole cells that the wanted workers make."""
        return self.wanted // self.cell.processes


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One row of `GET /v1/jobs/{job}/workers`."""

    worker: str
    host: str
    pid: int | None
    state: State
    rank: int | None
    lanes: tuple[int, ...]
    blocks: int
    mirrored_blocks: int
    step: int
    step_seconds: float
    memory_bytes: Mapping[str, int]
    log: str
    heartbeat_age_seconds: float | None = None
    waited_for_seconds: float = 0.0
    """How long others have waited for it."""
    state_file_bytes_per_second: int = 0
    """Of optimizer state that lies in a file, in its last update; 0: none does."""
    pod: str = ""
    node: str = ""
    why: str = ""
    """Why it has not started, leaves or is gone; empty while it is as it should be."""
    domain: str = ""
    """Its failure domain; empty until it has said hello."""
    activity: Activity | None = None
    """What its training thread does, as it last said; None: nothing is known of it now."""
    activity_age_seconds: float = 0.0
    """How long ago it said so."""
    member_state: str = ""
    """Where it stands in a change of the world, as it says; empty: it has said nothing."""
    boundaries: int = 0
    """Votes passed in the world that may train."""
    makes_steps: bool = True
    """Whether the world that it is in does: False while the job is paused, or waits for more members."""
    coordinate: int | None = None
    """Its place in a cell; None: it has none yet, or a cell is one process."""
    cell: int | None = None
    """Number of the cell that it trains lanes in; None: it is in none, or a cell is one process."""
    lane_seconds: float = 0.0
    """What a lane takes there without waits for others, as it last said; 0: nothing is known of it."""
    cell_wait_seconds: float = 0.0
    """For which its process has waited in collectives of its cells."""
    gpu: Gpu | None = None
    """What it computes on, as it last said; None: no NVIDIA GPU, or nothing is known of it."""


@dataclass(frozen=True, slots=True)
class ResizeView:
    """One generation, as the run report lists it."""

    generation: int
    workers: int
    reason: str
    from_step: int
    pause_seconds: float
    phases: Mapping[str, float]
    promoted_blocks: int
    pause_bytes: int
    fill_bytes: int
    checkpoint_bytes: int
    lost_steps: int
    began_at: float = 0.0
    """Seconds since the epoch."""
    starts_again: bool = False
    """It began as the job's first world did, of a job that had trained before: nobody had its state any more."""
