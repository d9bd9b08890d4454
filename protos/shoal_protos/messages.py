"""What workers and the controller say to each other, as plain data. `wire.py` turns it into protobuf and back.

No message is an event: every hello and heartbeat states where its worker stands, and the controller answers with what
is current, so a lost, doubled or late message does no harm. Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from shoal_protos.activity import Activity
from shoal_protos.checkpoint import CheckpointRef, SaveReport, UnreadableCheckpoint
from shoal_protos.corruption import CorruptBlock
from shoal_protos.description import Description
from shoal_protos.gpu import Gpu
from shoal_protos.plan import Plan, WorkerId
from shoal_protos.runs import NO_BLOCKS, Runs
from shoal_protos.shape import Shape

PROTOCOL_VERSION = 2
"""Of what workers and the controller say to each other (CONTRIBUTING.md, "Numbers of formats"). Each side refuses the
other where they differ."""


class MemberState(StrEnum):
    """Where a worker stands in a change of the world."""

    WARMING_UP = "warming_up"
    """A joiner that is not ready: it builds its model or warms up."""
    WAITING = "waiting"
    """A joiner that is ready; it is in no world."""
    JOINING = "joining"
    """A joiner that has built the group `promised` of a planned change and waits in it for its first message."""
    TRAINING = "training"
    """A member that takes part in steps or votes without a step."""
    STOPPED = "stopped"
    """Stopped for PREPARE(`promised`); its inventory is sent."""
    BUILDING = "building"
    """Has PLAN(`promised`): builds the group, rolls forward, promotes, hands out."""
    READY = "ready"
    """Done with all that; waits for OPEN(`promised`)."""
    LEFT = "left"
    """A planned generation began without it; it keeps its blocks until it is told to shut down."""


@dataclass(frozen=True, slots=True)
class Change:
    """What one change of the world cost a worker, for the timeline, the metrics and the run report."""

    generation: int
    from_step: int
    """The committed step at which the generation began."""
    pause_seconds: float
    """From stopping (a planned change: from the passed vote) to the first lane or idle vote begun."""
    phases: Mapping[str, float]
    """Seconds: prepare, plan, group, promote, open, first_step after a loss; plan, group, fill, switch, first_step if
    planned, where group and fill are spent while training goes on."""
    promoted_blocks: int
    pause_bytes: int
    """Bytes this worker received within the pause."""
    checkpoint_bytes: int = 0
    """Bytes that it read from a checkpoint within the pause."""


MOST_REPORTS = 32
"""Most reported numbers that are shown; each is a series of a metric."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Numbers for people; nothing is decided by them."""

    loss: float | None = None
    """The last step's canonical loss."""
    step_seconds: float = 0.0
    """The last step's wall time."""
    step_seconds_median: float = 0.0
    """Median of this process's last thousand steps."""
    training_seconds: float = 0.0
    """All wall time in committed steps of this process."""
    fill_bytes: int = 0
    """Bytes received by fills in this process's life."""
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes by kind: parameters, gradients, state, rss; and state_files, which are on a disk."""
    changes: tuple[Change, ...] = ()
    """The last few, newest last."""
    saves: tuple[SaveReport, ...] = ()
    """Saves that this process led: the last few, newest last."""
    skipped_folders: str = ""
    """Why folders of newer saves than the checkpoint that it has found are none, a sentence for each."""
    changed_values: str = ""
    """What script or config give otherwise than to the run of the checkpoint that it has gone on from."""
    skipped_micro_batches: int = 0
    """Micro-batches that the job has given up, up to this worker's last committed step."""
    not_finite_steps: int = 0
    """Steps of the job up to then whose loss or gradient was not finite."""
    not_finite: str = ""
    """The last such step, and what was not finite in it."""
    state_file_bytes_per_second: int = 0
    """At which the last update read and wrote optimizer state that lies in a file; 0: none does."""
    reports: Mapping[str, float] = field(default_factory=dict)
    """The last number that the script has reported under each name, evaluations included; at most `MOST_REPORTS`."""
    void_lanes: int = 0
    """Lanes that this process had begun in a cell and that counted no more, in its life."""
    cell_wait_seconds: float = 0.0
    """For which it has waited in collectives of its cells."""
    gpu: Gpu | None = None
    """That it computes on; None: on none, or nothing is known of it yet."""
    lane_seconds: float = 0.0
    """What a lane takes here without waits for others: the median of the last ones; 0: too few are measured."""


GRACE_SECONDS = 30.0
"""How long a worker that is drained may take to go, where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class Status:
    """Where a worker stands. In every hello, heartbeat and READY."""

    sequence: int
    """Grows with every message of the process; an older one than the last heard says nothing."""
    generation: int
    """The world it is in; 0: none yet."""
    state: MemberState
    promised: int
    """The highest generation that it has stopped for, built or voted."""
    step: int
    """Last committed step (0: the initial state); -1: none, a joiner."""
    committed_in: int
    """The generation in which that step was committed; 0 for the initial state and joiners."""
    boundaries: int = 0
    """Votes passed in its generation."""
    holds: Runs = NO_BLOCKS
    """Blocks whose state it holds with valid bits as of `step`."""
    broken: tuple[WorkerId, ...] = ()
    """Peers of its generation to whom its connection broke."""
    dead: tuple[str, ...] = ()
    """Incarnations of peers on its host whose processes it has seen to die."""
    done: bool = False
    """It has committed the last step and given its digests."""
    ended: bool = False
    """Its script has ended too; it serves changes at exit. Not `done`, where nothing says at which step the job ends:
    it has ended at `step`."""
    drain: bool = False
    """It was asked to end (SIGTERM) and asks to be drained."""
    grace_seconds: float = GRACE_SECONDS
    """How long it may then take to go."""
    checkpoint: CheckpointRef | None = None
    """The newest whole checkpoint that it knows of: found at its start, or saved since."""
    unreadable_checkpoint: UnreadableCheckpoint | None = None
    """The checkpoint of the plan that it is carrying out cannot be read."""
    highest_saved: int = 0
    """The highest generation of any save, whole or not, that lay in `checkpoint.path` at its start. The next one
    exceeds it, whichever checkpoint training begins from: saves are ordered by their generation."""
    corrupt: tuple[CorruptBlock, ...] = ()
    """Blocks whose copies it has seen to differ since all began, or went back to a checkpoint; the newest last."""
    last_step: int = 0
    """The job's last step, where nothing said it beforehand and it is known by now; 0: else."""

    @property
    def position(self) -> tuple[object, ...]:
        """What is said at once when it changes; step and holdings wait for the next heartbeat."""
        ends = self.done, self.ended, self.drain, self.last_step
        knows = self.checkpoint, self.unreadable_checkpoint, self.corrupt
        return self.generation, self.state, self.promised, self.committed_in, (self.broken, self.dead), ends, knows


# ---- worker → controller


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of every stream, also after a broken one. Of one of another version only the version, job,
    worker, incarnation, host, pid, run and release are read; the version refuses it.
    """

    version: int
    job: str
    worker: WorkerId
    """Empty: the controller gives one."""
    incarnation: str
    address: str
    """`HOST:PORT` of the rendezvous server that this process opened; a connection refused there may prove its death."""
    host: str
    pid: int
    domain: str
    """Failure domain."""
    description: Description
    """Brief, unless the controller has asked for all of it."""
    status: Status
    next_generation: int = 0
    """Generations must exceed this: a checkpoint's manifest knew that many, or a plan that may still begin has it."""
    run: str = ""
    """The run that it belongs to: named by its launcher or by its first welcome. Empty: it has been in none yet."""
    release: str = ""
    """The release of Shoal that it runs; empty: one from before releases were named."""
    coordinate: int = 0
    """Its place in a cell, for as long as the process lives: its seat, where it has asked for one."""


@dataclass(frozen=True, slots=True)
class AskSeat:
    """Before a process builds its part of a model: which coordinate is it to have? Asked again while no answer comes; a
    hello follows when the part is built.
    """

    job: str
    worker: WorkerId
    """Empty: the controller gives one."""
    incarnation: str
    host: str
    pid: int
    cell: Shape
    """What its script says that a cell is."""
    run: str = ""
    """The run that it belongs to, as its launcher named it; empty: not known yet."""
    wish: int = -1
    """The coordinate of a process whose place it takes; -1: it takes none."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Once a heartbeat interval, and at once after any change of the status but the step's."""

    status: Status
    telemetry: Telemetry
    echo: int = 0
    """The number of the last ping."""
    activity: Activity = field(default_factory=Activity)
    """What the training thread does."""
    builds: tuple[Activity, ...] = ()
    """Activities of the groups that are being built, or kept for plans that may begin."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The group of PLAN(n) is built and the state is in place: READY."""

    generation: int
    status: Status


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a stopped worker holds; the answer to PREPARE(`answers`)."""

    answers: int
    generation: int
    step: int
    committed_in: int
    record: bytes
    """The vote's record of `step`; empty for the initial state."""
    holds: Runs
    """Valid as of `step`."""
    pending: Runs
    """Held blocks for which the gradient of `step + 1` is in, whole; empty unless all that the commit reads was in."""
    current: Runs
    """Blocks whose parameters are those of `step`; all, where parameters are sharded."""
    lane: int = -1
    """The lane in flight; -1: none."""
    status: Status | None = None
    """Where it stands when this is said; None: it has been said already."""


class RequestKind(StrEnum):
    """What a worker may ask for."""

    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class Request:
    """A worker's request, for instance to be drained after SIGTERM."""

    kind: RequestKind
    grace_seconds: float = GRACE_SECONDS
    generation: int = 0
    """The world that it is said in; 0: none, or nothing depends on it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What ended a script, so that the same fault is known again."""

    exception: str
    """Its class; empty where there was none (the loop was left)."""
    message: str
    frame: str
    """The last line of the script that took part, `train.py:31 forward`."""
    outage: bool = False
    """Something outside (a file system, a network) failed, which may be back later."""


@dataclass(frozen=True, slots=True)
class Result:
    """How it ended for one worker: digests, or why it failed."""

    step: int
    fingerprint: str = ""
    """Hexadecimal; empty where it failed."""
    loss: float | None = None
    failure: str = ""
    """One sentence, then the last lines of a traceback."""
    everyone: bool = False
    """The failure is the job's (bad config, hyper-parameters that differ), not this worker's: no replacement helps."""
    fault: Fault | None = None
    """What failed."""
    generation: int = 0
    """The world that it is said in; 0: none, or nothing depends on it."""


ToController = AskSeat | Hello | Heartbeat | Ready | Inventory | Request | Result


# ---- controller → worker


@dataclass(frozen=True, slots=True)
class Describe:
    """The controller does not know the parameters that the hello has named: say it again with their text."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The answer to `AskSeat`: the hello that follows names both."""

    worker: WorkerId
    coordinate: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The hello is accepted."""

    worker: WorkerId
    heartbeat_seconds: float
    reconnect_seconds: float
    stall_seconds: float
    generation: int = 0
    """The world that it is said in; 0: none, or nothing depends on it."""
    resume: str = ""
    """The job's `resume` as JSON, which overrides the config's; empty: the job says nothing."""
    opened_generations: Runs = NO_BLOCKS
    """The generations that this job's store has opened; empty: none yet, any checkpoint may be the latest."""
    run: str = ""
    """The job's run, which every later hello names."""
    cluster: str = ""
    """The id of the controller's store."""
    step: int = 0
    """The job's committed steps: what a script is shown until its worker has a step of its own."""
    loss: float | None = None
    """The job's last loss, for the same purpose; None: none yet."""
    controllers: tuple[str, ...] = ()
    """`HOST:PORT` where workers reach the controllers of this store, the one that leads first."""
    checkpoint: str = ""
    """Path of the newest checkpoint that the store knows: one who finds none there does not begin at step 0."""
    checkpoint_marks: tuple[str, ...] = ()
    """Names of files that every worker must see one of where it saves; empty: none is known."""


@dataclass(frozen=True, slots=True)
class Alive:
    """The controller is there, and has nothing to say. One that has frozen keeps its connections, and is not."""


@dataclass(frozen=True, slots=True)
class SessionToken:
    """What opens this process's session again, after its welcome and anew before it ends. Nobody else is given it."""

    token: str = field(repr=False)
    seconds: float
    """How long it is to be shown by itself; later it is shown beside the token that the process was started with."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer with a heartbeat at once."""

    number: int
    generation: int = 0
    """The world that it is said in; 0: none, or nothing depends on it."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """PREPARE(generation): abort the groups, report the inventory."""

    generation: int


@dataclass(frozen=True, slots=True)
class PlanMessage:
    """PLAN: a plan with a recovery answers the inventories of its generation; one with a base is a planned change."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Open:
    """OPEN(generation): train."""

    generation: int


class AskKind(StrEnum):
    """What the controller may ask the vote to carry."""

    SAVE = "save"
    STOP = "stop"
    END = "end"
    """Not for a vote: all scripts have ended at the step `number`, which is the job's last one."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that the worker brings into its next vote."""

    kind: AskKind
    number: int
    """The same number is asked for once."""
    generation: int = 0
    """The world that it is said in; 0: none, or nothing depends on it."""


@dataclass(frozen=True, slots=True)
class Drain:
    """You are being drained: go on until a planned generation leaves you out."""

    grace_seconds: float
    generation: int = 0
    """The world that it is said in; 0: none, or nothing depends on it."""


WRONG_USE = 2
"""Exit status of a script whose user gave what cannot work; Python and most commands use it so too."""
NO_CONTROLLER = 75
"""Exit status (`EX_TEMPFAIL`) of a launched worker that was in no world and found no controller: not a failure."""
START_AGAIN = 75
"""Exit status (the same one) of a worker that no launcher has started, where a fresh process is to take its place."""
FRESH_PROCESS = "NeedsFreshProcess"
"""`Fault.exception` of a process that has gone too far to take part, where a fresh one can: not a failure either."""


class Ending(StrEnum):
    """How a shutdown is meant."""

    DONE = "done"
    """The job is over: end with the script's own status."""
    DRAINED = "drained"
    """Leave the loop by `SystemExit(0)`."""
    FAILED = "failed"
    """The job failed or was cancelled: leave with an error that gives the reason."""
    START_OVER = "start_over"
    """You were evicted and change nothing any more: come back as a joiner with a new id."""
    REPLACED = "replaced"
    """Another process takes this one's place: end. A launcher starts it; where there is none, `shoal worker` does."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The last message of a stream."""

    ending: Ending
    reason: str
    generation: int = 0
    """The world that it is said in; 0: none, or nothing depends on it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The hello, or a message, was refused in one sentence; the stream ends."""

    sentence: str
    final: bool = True
    """False: try again later (the controller is starting, say)."""
    generation: int = 0
    """The world that it is said in; 0: none, or nothing depends on it."""
    ends_members: bool = False
    """Final also for a worker that is in a world: its run is over or replaced, or another process has its id. Whatever
    else is wrong may be the controller's fault, and training goes on."""
    cluster: str = ""
    """The id of the store that says so; a worker in a world believes only the one that it was welcomed with."""
    unknown_job: bool = False
    """Not final either for a worker that was launched or welcomed for the job before: this controller has lost it, or
    is another one."""
    leader: str = ""
    """`HOST:PORT` where workers reach the controller that leads, of one that does not; empty: not known."""


ToWorker = (
    Describe | Seat | Welcome | Alive | SessionToken | Ping | Prepare | PlanMessage | Open | Ask | Drain | Shutdown
    | Refusal
)  # fmt: skip
