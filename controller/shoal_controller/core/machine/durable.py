"""The state of a job that must survive its controller: workers, worlds, failures, requests, deadlines.

It holds everything that decides who may train, which numbers were given away, what an operator asked for and which
deadlines run. What workers hold and where they stand is asked anew (`job.py`). It changes with the world; of the steps
only the shown one is kept, which is written with the rest. Times are seconds since the epoch by the controller's clock,
so they mean the same to the next controller. `stored_form.py` says how it is stored. Pure.

`Goal` is what a plan is asked for: equal goals get the same world, but for how far fills have come. `Place`
says for people where a worker runs (process of a host, or pod), as its launcher or its hello reports; nothing is
decided by it, and launchers find their workers again by records of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import NamedTuple

from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.description import Description
from shoal_protos.messages import Ending
from shoal_protos.plan import OMITTED, Plan, Reason, WorkerId
from shoal_protos.runs import NO_BLOCKS, Runs
from shoal_protos.shape import ONE, Shape, absent, full_cells

from shoal_controller.core.machine.figures import Figures
from shoal_controller.core.machine.spec import JobSpec, Phase, WorkerBounds
from shoal_controller.core.planning.lanes import EVENLY, LaneSharing

HISTORY = 200
"""How many resizes are remembered."""

REMEMBERED = 256
"""How many workers that are gone stay in the roster."""


class Standing(StrEnum):
    """What the controller believes of a process."""

    HERE = "here"
    """Alive as far as is known, or about to say hello."""
    LOST = "lost"
    """Evicted; nobody knows whether it is dead. It may come back and then it is HERE again."""
    DEAD = "dead"
    """Its death is confirmed, or it has said itself that it failed."""


class Leaving(StrEnum):
    """Why a worker is on its way out."""

    NO = ""
    DRAIN = "drain"
    SCALE_DOWN = "scale_down"
    PREEMPTION = "preemption"
    """What it runs on is to go."""


LANES_OF_A_SPARE = 4
"""With so many lanes for each worker, spares train by default: then a loss leaves nearly nothing idle."""


@dataclass(frozen=True)  # no slots: `replaced`
class WorkerRecord:
    """One worker of the roster. An id belongs to one process for ever."""

    worker: WorkerId
    join_order: int
    """Age: the lower the older."""
    launched: bool = False
    """Whether the launcher was asked to start it."""
    incarnation: str = ""
    """Empty until its first hello."""
    address: str = ""
    host: str = ""
    domain: str = ""
    release: str = ""
    """The release of Shoal that it runs."""
    place: Place | None = None
    """Where it runs, as its launcher says, else as it says itself; None: it has not been started yet."""
    standing: Standing = Standing.HERE
    leaving: Leaving = Leaving.NO
    grace_seconds: float = 30.0
    leaves_at: float = 0.0
    """When the grace of a leaving worker is over."""
    leaving_because: str = ""
    """Why it leaves, as whoever asked for it puts it."""
    spared: bool = False
    """It leaves for a reason that is gone: it stays, if no world without it is planned."""
    endangered: bool = False
    """What it runs on may be to go: the job has one worker more as long as that is so."""
    ending: Ending | None = None
    """It was told to end in this way: it changes nothing any more."""
    ending_since: float | None = None
    """When a launcher's process was told to end that has not ended yet."""
    quarantined: bool = False
    """Evicted though it lives: its connection to another member keeps breaking."""
    why: str = ""
    """Why it is lost, dead or ending."""
    fault: str = ""
    """What its failure has in common with the same one of others, at the same step."""
    saves_told: int = 0
    """The number of the last save that it has reported: it repeats the last ones in every heartbeat."""
    fill_bytes_counted: int = 0
    """How much of what its process has received by fills is counted: it tells the sum in every heartbeat."""
    void_lanes_counted: int = field(default=0, metadata=OMITTED)
    """Likewise of its lanes in cells that counted no more."""
    coordinate: int = field(default=0, metadata=OMITTED)
    """Its place in a cell, for as long as its process lives."""
    seated: str = field(default="", metadata=OMITTED)
    """Incarnation of the process that has its coordinate; empty: none has asked, or a cell is one process."""
    seated_at: float = field(default=0.0, metadata=OMITTED)
    """When it was given one, before it had said hello."""

    @property
    def serves(self) -> bool:
        """Whether it is alive as far as is known, and wanted."""
        return self.standing is Standing.HERE and self.ending is None

    @property
    def log(self) -> str:
        """Path of its log; empty where none is known."""
        return self.place.log if self.place is not None else ""


@dataclass(frozen=True, slots=True)
class Failures:
    """What has failed since a step above `step` was committed."""

    script: int = 0
    """Generations in which the script failed."""
    deaths: int = 0
    """Generations in which a worker died of something that nobody explains."""
    by_death: bool = False
    """Whether the last one was such a death."""
    step: int = 0
    """The highest step that is known to have been committed when one of them happened."""
    generation: int = 0
    """The last one of them."""
    join_order: int = 0
    """Workers of this age and younger were started after the last one."""
    common_fault: str = ""
    """The fault in which all members of a generation failed, at the same step."""

    @property
    def times(self) -> int:
        return self.script + self.deaths


@dataclass(frozen=True, slots=True)
class LinkFault:
    """Two living workers whose connection broke generations."""

    times: int
    blame_counts: Mapping[WorkerId, int]
    """How often each was named by the other."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A checkpoint that was asked for and is not known to be made."""

    number: int
    step: int
    """The step known when it was asked for: a checkpoint of this step or a later one answers it."""


@dataclass(frozen=True, slots=True)
class Resize:
    """One generation in the job's history; figures come in while it is young."""

    generation: int
    workers: int
    reason: Reason
    from_step: int
    pause_seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    promoted_blocks: int = 0
    pause_bytes: int = 0
    fill_bytes: int = 0
    checkpoint_bytes: int = 0
    lost_steps: int = 0
    began_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Corruption:
    """What is known of copies that differ."""

    blocks: Runs = NO_BLOCKS
    """That were found to differ since all began, or went back to a checkpoint."""
    implicated: Mapping[WorkerId, int] = field(default_factory=dict)
    """Number of differences that each worker was in."""
    restoring: str = ""
    """Why all are to go back to a checkpoint; empty: they are not."""
    returned_at: int = -1
    """The highest step that was shown when all went back for that the last time."""


@dataclass(frozen=True, slots=True)
class Anew:
    """A job that nobody's launcher starts has lost blocks, and waits for workers to begin anew."""

    since: float
    why: str


def bounds_of(spec: JobSpec, description: Description | None, cell: Shape = ONE) -> WorkerBounds:
    """Those that the job was made with; where it says none, those of its training config, as soon as that is known."""
    by_default = default_bounds(description, cell)
    return WorkerBounds(spec.min_workers or by_default.least, spec.max_workers or by_default.most)


def default_bounds(description: Description | None, cell: Shape = ONE) -> WorkerBounds:
    """Those of the training config; where it says none, one cell at least."""
    if description is None:
        return WorkerBounds(cell.processes, None)
    return WorkerBounds(description.min_workers or cell.processes, description.max_workers or None)


@dataclass(frozen=True)  # no slots: `replaced`
class Durable:
    """What a controller must remember of a job. Replaced whole; the shell writes it whenever the machine says
    `Persist`.
    """

    spec: JobSpec
    """What it was made with. Its size may be another one by now: `wanted` and `bounds` are that."""
    wanted: int
    description: Description | None = None
    phase: Phase = Phase.WAITING
    reason: str = ""
    """Why a job is over or stalled, as one sentence."""
    changed_bounds: WorkerBounds | None = None
    """Between which numbers `wanted` may be, where that was changed since the job was made."""
    last_generation: int = 0
    """The highest generation given away."""
    first_valid_generation: int = 0
    """Generations before this one belong to a life that was given up: nothing of them counts."""
    committed_in: int = 0
    """The highest generation in which a step is known to be committed."""
    current: Plan | None = None
    """The world that may train."""
    planned: tuple[Plan, ...] = ()
    """Planned changes of `current` that may begin; oldest first."""
    paused: bool = False
    paused_because: str = ""
    """Empty where an operator has paused it."""
    corruption: Corruption = Corruption()
    restored_from: CheckpointRef | None = None
    """The checkpoint that all have last gone back to."""
    restored_in: int = 0
    """The generation that began there: what was saved after that checkpoint in earlier ones was given up."""
    scaled_up: bool = False
    """An operator asked for more workers, and they have not all come yet."""
    anew: Anew | None = None
    """Until a world opens: why it begins anew, and since when it waits for workers."""
    stopping: bool = False
    """The job was cancelled and its workers were asked to stop."""
    roster: Mapping[WorkerId, WorkerRecord] = field(default_factory=dict)
    next_id: int = 0
    next_join_order: int = 0
    failures: Failures = field(default_factory=Failures)
    unstartable: int = 0
    """How many attempts in a row were workers that the cluster cannot start."""
    unstartable_before: int = 0
    """Workers younger than this one's age were asked for after the last of them."""
    link_faults: Mapping[str, LinkFault] = field(default_factory=dict)
    """Faults by the two workers' ids, `a|b`."""
    backoff_counts: Mapping[str, int] = field(default_factory=dict)
    """How often a worker at an address was evicted for its connection."""
    backoff_until: Mapping[str, float] = field(default_factory=dict)
    """Time until which an address is left out."""
    last_refusal: str = ""
    """Why the last worker that came was turned away, until a world opens."""
    fingerprint: str = ""
    loss: float | None = None
    """Loss of the last step, once the job has ended."""
    reports: Mapping[str, float] = field(default_factory=dict)
    """The last number that the script has reported under each name, once the job has ended."""
    step_seconds_median: float | None = None
    """The run's, once the job has ended."""
    step: int = 0
    """What people are shown: a step that all members were seen to have committed, at most `SHOW_SECONDS` old."""
    history: tuple[Resize, ...] = ()
    returned_steps: int = 0
    """Steps that were given up since the last world: the next one has them in its history."""
    figures: Figures = field(default_factory=Figures)
    skipped_micro_batches: int = 0
    """Micro-batches that the script gave up, as far as members have reported."""
    not_finite_steps: int = 0
    """Steps whose loss or gradient was not finite, as far as members have reported."""
    opened_generations: Runs = NO_BLOCKS
    """The generations that have begun: `latest` takes checkpoints of these."""
    checkpoints: tuple[CheckpointRef, ...] = ()
    """The catalogue, newest first."""
    unreadable_checkpoints: tuple[str, ...] = ()
    """Paths of checkpoints that a worker could not read."""
    failed_save: str = ""
    """What became of the last save, where it failed."""
    saves_requested: int = 0
    """How many checkpoints were asked for: the number of the last request."""
    save: SaveRequest | None = None
    """The last request, until it is answered."""
    final_drain: bool = False
    """Only leaving members are left, and nobody has come: no steps run any more, and their state is to be saved."""
    spawn_after: float = 0.0
    """No process is started before this time: the back-off after failures."""
    started_at: float | None = None
    """When the first world of this run began."""
    ended_at: float | None = None
    """When the job was over, or its workers were asked to stop."""
    ends_at: int = 0
    """The step at which all scripts have ended, where nothing else says which one is the last; 0: it is not known."""
    version: int = 0
    """How often what is asked of the job was changed: `machine.py` says what counts."""
    cell: Shape = ONE
    """What its cells are: as the first worker said that asked for its seat or said hello."""
    sharing: LaneSharing = EVENLY
    spares: int = field(default=0, metadata=OMITTED)
    """Workers beyond `wanted` that it is to have: they mirror, and train when another one is lost."""

    def lane_seconds(self, worker: WorkerId) -> float:
        """Return what a lane takes on a worker where lanes are shared by speed; 0: they are shared evenly."""
        return self.sharing.seconds.get(worker, self.sharing.usual) if self.sharing.seconds else 0.0

    @property
    def bounds(self) -> WorkerBounds:
        """Between which numbers `wanted` may be."""
        return self.changed_bounds or bounds_of(self.spec, self.description, self.cell)

    @property
    def trainers(self) -> int:
        """So many members train at most; the others are spares. 0: all do."""
        if not self.spares or self.description is None:
            return 0
        train = self.spec.spares_train
        if train is None:
            train = self.description.lanes >= LANES_OF_A_SPARE * (self.wanted + self.spares)
        return 0 if train else self.wanted

    @property
    def most_members(self) -> int | None:
        """So many workers can train at once. None: its lanes are not known yet."""
        lanes = self.description.lanes if self.description is not None else self.spec.lanes
        return self.cell.most_members(lanes) if lanes is not None else None

    def full_cells(self, workers: Iterable[WorkerId]) -> int:
        """How many cells these make."""
        return full_cells((self.roster[worker].coordinate for worker in workers), self.cell.processes)

    def absent(self, workers: Iterable[WorkerId]) -> str:
        """The first coordinate that none of these has, as people read it; empty where each has a member."""
        missing = absent((self.roster[worker].coordinate for worker in workers), self.cell.processes)
        return next((self.cell.named(coordinate) for coordinate in missing), "")

    def are_enough(self, workers: Sequence[WorkerId]) -> bool:
        """Whether these make as many full cells as the job has to have."""
        return self.full_cells(workers) * self.cell.processes >= self.bounds.least

    @property
    def last_step(self) -> int | None:
        """The job's last step; None: it ends where its scripts do, or it is not known yet."""
        given = self.description.max_steps if self.description is not None else 0
        return given or self.ends_at or None

    @property
    def unused_number(self) -> int:
        """The number of an id that no process of this job has ever had."""
        return next(number for number in count(self.next_id) if f"w{number}" not in self.roster)

    @property
    def ending_since(self) -> dict[WorkerId, float]:
        """When processes of the launcher's were told to end that have not ended yet."""
        roster = self.roster.values()
        return {record.worker: record.ending_since for record in roster if record.ending_since is not None}

    @property
    def surplus(self) -> list[WorkerId]:
        """Whom the roster need not remember: of those that are gone for good, and in no world, the oldest."""
        worlds = [plan for plan in (self.current, *self.planned) if plan is not None]
        members = frozenset[WorkerId]().union(*(plan.workers for plan in worlds))
        gone = [
            record.worker
            for record in self.roster.values()
            if (record.ending is not None or record.standing is Standing.DEAD) and record.worker not in members
        ]
        return gone[:-REMEMBERED]


class Traits(NamedTuple):
    """What a plan depends on in one worker, but for the blocks that it holds."""

    worker: WorkerId
    leaving: bool
    lane_seconds: float = 0.0
    """By which lanes are shared; 0: they are shared evenly."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a plan is asked for. How far fills have come is not in it: they come to an end by themselves."""

    pool: tuple[Traits, ...]
    """Members, then joiners."""
    steps: bool
    promote: bool
    """Fills are done, so that their targets can be promoted."""
    trainers: int = 0
    """So many members train at most; 0: all do."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a worker runs in."""

    name: str
    """What an operator calls it: `process 4711`, `pod demo-w3`."""
    pid: int | None = None
    """Of a process: its number on its host."""
    log: str = ""
    """Path of its log on the controller's host; empty where there is none."""
    pod: str = ""
    """Of a pod: its name. The next one of that name is another pod."""
    uid: str = ""
    """Of a pod that the cluster has made: what tells it from every other."""
    node: str = ""
    """Of a pod whose containers run: the machine that they run on."""

    @property
    def has_started(self) -> bool:
        """Whether anything runs there: a pod may wait for a machine, or for its image."""
        return not self.pod or bool(self.node)

    @classmethod
    def of_process(cls, pid: int, log: str = "") -> Place:
        return cls(f"process {pid}", pid, log)

    @classmethod
    def of_pod(cls, pod: str, uid: str = "", node: str = "") -> Place:
        return cls(f"pod {pod}", pod=pod, uid=uid, node=node)
