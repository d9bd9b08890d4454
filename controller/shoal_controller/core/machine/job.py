"""A job as the machine sees it: what is durable, and what is only known while this controller lives.

`Job` is replaced whole by `machine.step`. [Note: what a restart changes] Besides numbers, nothing. Every promise and
every deadline that others count on is in `durable`; the rest of `Job` is forgotten when the controller dies, because

- it is asked anew: what workers are, hold and have measured comes back with their hellos and heartbeats
  (`processes`, `connections`, `changes`), what became of launched ones with the launcher's answer to `Adopt`
  (`spawned_at`, `pending`); what was wanted is seen to be fulfilled or is planned again (`goal`, `goals`), and what the
  planner was asked is asked again (`planner`);
- it belongs to a stream, which ends with the controller (`greeting`, `asked_to_describe`);
- it gives *us* time to hear: whoever could not reach a controller that was away gets all of it again (`started_at`,
  `ready_since`, `planned_at`, `spawned_at`, `probed_at`, and `durable.ending_since`);
- or it belongs to a number: a change under way is begun again with the next one (`attempt`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from shoal_protos.activity import Activity
from shoal_protos.messages import Change, Inventory, Status, Telemetry
from shoal_protos.plan import Plan, Reason, WorkerId
from shoal_protos.runs import NO_BLOCKS, Runs
from shoal_protos.shape import ONE

from shoal_controller.core.machine.durable import Durable, Goal
from shoal_controller.core.machine.events import Connected, PlannerAnswered
from shoal_controller.core.machine.figures import Figures
from shoal_controller.core.machine.pending import Pending
from shoal_controller.core.machine.spec import JobSpec, Phase
from shoal_controller.core.machine.wait_graph import BrokenLink
from shoal_controller.core.planning.lanes import Since


class Listening(NamedTuple):
    """How long this controller has listened; see `phases/silence.py`."""

    running: float = 0.0
    """Seconds of its own running time."""
    uncut: float = 0.0
    """Seconds without the time in which most workers were silent."""


NO_LISTENING = Listening()


@dataclass(frozen=True, slots=True)
class PingSent:
    """A worker that had fallen silent was asked directly."""

    at: float
    """Time in seconds, as `Listening.uncut`."""
    suspected: bool = False
    """It has missed its heartbeats since, and the history says so."""


@dataclass(frozen=True)  # no slots: `replaced`
class Process:
    """What a worker that has said hello in this controller's life last said of itself."""

    worker: WorkerId
    connection: int | None
    """None: its stream is broken."""
    status: Status
    last_message_at: float
    """When anything was last heard of it."""
    last_message_listening: Listening = NO_LISTENING
    """What `Job.listening` was then."""
    cut_at: float | None = None
    """When its stream broke."""
    reachable: bool | None = None
    """Whether this controller has reached it at its address and read its incarnation there; None: not known yet."""
    refused_since: float | None = None
    """Since when its host refuses connections to it, while it has no stream."""
    answered_again_at: float | None = None
    """When the last probe was sent that it answered, of those after the first that reached it."""
    telemetry: Telemetry = field(default_factory=Telemetry)
    inventory: Inventory | None = None
    failure: str = ""
    activity: Activity = field(default_factory=Activity)
    """What its training thread does."""
    builds: tuple[Activity, ...] = ()
    """Activities of the groups that it builds, or keeps for plans that may begin."""
    moved_at: float = 0.0
    """When its position was last seen to change, or its script to end."""
    steady_since: float = 0.0
    """Since when it has been heard without a gap: a process that was frozen says old things for a moment."""
    ping: PingSent | None = None
    """None: it is not silent."""
    pace_before: tuple[int, float] | None = None
    """Its step and its seconds in steps, as of the heartbeat before the last one. None: it had reported no seconds: it
    had made no step, or this controller's life had not heard of them."""
    last_sent: tuple[str, int, float] = ("", 0, 0.0)
    """What was last sent to it: kind, number, when."""


@dataclass(frozen=True, slots=True)
class PlannerState:
    """What has become of this job's questions to the planner: one is out at a time."""

    asked: int = 0
    """The number of the last question."""
    asked_at: float | None = None
    """When it was asked; None: it is answered, or given up."""
    begun_at: float | None = None
    """When the planner took it up; None: it stands in line behind questions of other jobs."""
    answer: PlannerAnswered | None = None
    """The newest answer, until it is used."""
    failures: int = 0
    """How often in a row it has failed."""
    failing_since: float = 0.0
    """When the first of these failures was noticed."""
    failed_at: float = 0.0
    """When the last one was."""
    why: str = ""
    """How it failed the last time."""


class AttemptPhase(StrEnum):
    """How far an attempt at a world made from inventories has come."""

    PREPARE = "prepare"
    PLAN = "plan"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A start or a recovery under way: PREPARE(number) → inventories → PLAN(number) → READY of all → OPEN."""

    generation: int
    reason: Reason
    why: str
    """What was noticed, by whom."""
    noticed_at: float
    """When the cause was noticed; kept over attempts that follow one another."""
    since: float
    """When this number was given."""
    phase: AttemptPhase = AttemptPhase.PREPARE
    start: bool = False
    """Nobody holds anything: a world is made from joiners."""
    starters: frozenset[WorkerId] = frozenset()
    """Members of a start. A recovery asks whoever may hold something."""
    reports: tuple[tuple[WorkerId, WorkerId], ...] = ()
    """Broken connections between members: who reported, whom."""
    links: tuple[BrokenLink, ...] = ()
    """Connections between members that carry nothing, though nobody reports them."""
    links_seen_at: float = 0.0
    inseparable: str = ""
    """Why none of those who cannot reach each other stays outside."""
    inseparable_since: float = 0.0
    avoided_builders: frozenset[WorkerId] = frozenset()
    """Whose rendezvous server should not build the group: it failed last time."""
    plan: Plan | None = None
    goal: Goal | None = None
    """What the plan was asked for."""
    judged: bool = False
    """Whether its reports of broken connections have been counted."""
    committed_in: int = 0
    """The generation in which the plan's step was committed, as far as the inventories tell."""
    planned_at: float = 0.0
    """When its plan was sent."""
    respondents: frozenset[WorkerId] = frozenset()
    """Whose inventories the planner was asked with."""
    back_from: int = 0
    """The step from which all go back to a checkpoint."""
    lost_blocks: Runs = NO_BLOCKS
    """Blocks of which none of those inventories tells a copy."""
    waits_for: str = ""
    """What it waits for, as a sentence."""
    waits_since: float = 0.0
    """When it began to wait in this phase."""
    announced_wait: str = ""
    """The last such sentence that went into the history."""


@dataclass(frozen=True)  # no slots: `replaced`
class Job:
    """One job as the machine knows it."""

    durable: Durable
    started_at: float
    """When this controller's life began."""
    ticked_at: float | None = None
    """When the last tick came, or since when there is somebody to listen to."""
    listening: Listening = NO_LISTENING
    """Listening time in this life, up to the last tick."""
    doubt_shown: bool = False
    """Most workers are silent, and the history says so."""
    back_at: float | None = None
    """When a worker last came back while most were silent: others are on their way."""
    processes: Mapping[WorkerId, Process] = field(default_factory=dict)
    connections: Mapping[int, WorkerId] = field(default_factory=dict)
    probed_at: Mapping[WorkerId, float] = field(default_factory=dict)
    """When a probe was last sent to a process."""
    live_processes: frozenset[WorkerId] = frozenset()
    """Whose process the launcher has started or adopted in this life, and has not seen end."""
    seen_to_die: Mapping[WorkerId, float] = field(default_factory=dict)
    """When others of their host have seen processes die of which the launcher has yet to say how they ended."""
    absent: frozenset[WorkerId] = frozenset()
    """Of whom the launcher has no process, though the store takes them for started."""
    greeting: Mapping[int, Connected] = field(default_factory=dict)
    """Hellos by connection that name a model whose text is not known yet, with what their tokens prove."""
    asked_to_describe: Mapping[int, float] = field(default_factory=dict)
    """Of these: when they were asked for it."""
    attempt: Attempt | None = None
    ready_since: float | None = None
    """Since when at least one joiner has waited for a world."""
    planner: PlannerState = PlannerState()
    goal: Goal | None = None
    """What the newest plan was asked for: the planner is asked again only when this changes."""
    goals: Mapping[int, Goal] = field(default_factory=dict)
    """What each planned change that has not begun was asked for, by its generation."""
    planned_at: float = 0.0
    """When the newest planned change was made."""
    spawned_at: Mapping[WorkerId, float] = field(default_factory=dict)
    """When processes were asked for, or have started, that have not said hello. Of one that waits to start: none."""
    pending: Mapping[WorkerId, Pending] = field(default_factory=dict)
    """Who waits to start, as the launcher last said."""
    reaped_at: float = 0.0
    """When the processes of a job that is over were last killed."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """The last sentence that turned away each incarnation. One that trains on tries again every second."""
    refused_tokens: tuple[str, ...] = ()
    """Sentences that turned away streams by their tokens, the last ones."""
    distrusted: frozenset[WorkerId] = frozenset()
    """Workers whose false claims are in the history."""
    changes: Mapping[WorkerId, Change] = field(default_factory=dict)
    """What the present generation's change cost its members."""
    detect_seconds: float = 0.0
    """From the cause of the present generation to its PREPARE."""
    next_ping: int = 1
    """The number of the next ping."""
    failed_save_step: int = -1
    """The step of the last save that failed."""
    skipped_folders: str = ""
    """What was last reported of folders beside the checkpoints that are not checkpoints."""
    changed_values: str = ""
    """What was last reported of values that are given otherwise than to a checkpoint's run."""
    last_vote: tuple[int, int] = (0, 0)
    """The last vote that is known to have passed: generation, votes passed in it."""
    last_vote_at: float = 0.0
    """When that was noticed."""
    named_stragglers: frozenset[WorkerId] = frozenset()
    """Who was last named for holding the others up, since a vote has passed."""
    speeds_read_at: float = 0.0
    """When it was last looked at what lanes take on each worker."""
    uneven_since: Since | None = None
    """Since when another sharing of lanes would make steps shorter by far; None: it would not."""
    slow_for: Mapping[WorkerId, float] = field(default_factory=dict)
    """For how many seconds of training workers have taken longer for a lane than others."""
    named_slow: frozenset[WorkerId] = frozenset()
    """Of these, who is in the history for it."""
    step_shown_at: float = 0.0
    """When the step that people are shown last moved by itself."""
    figures: Figures = field(default_factory=Figures)
    """What is counted; steps are ahead of `durable.figures`, all else is written at once."""
    figures_known: bool = True
    """Whether the steps are as many as before: after a restart, once all members have reported or a world is open."""
    figures_written_at: float = 0.0
    """When the counted steps were last written."""

    @property
    def spec(self) -> JobSpec:
        return self.durable.spec

    @property
    def is_calm(self) -> bool:
        """Whether everybody is heard, and either a world trains and nothing is to change or one is being made, in which
        every answer is an event: then time brings nothing soon.
        """
        if self.durable.stopping or self.spawned_at or self.seen_to_die or self.planner.failures:
            return False
        if self.attempt is None and not self._is_settled:
            return False
        durable = self.durable
        served = (one for one in self.processes.values() if durable.roster[one.worker].serves)
        return all(one.connection is not None and one.ping is None for one in served)

    @property
    def _is_settled(self) -> bool:
        """Whether a world trains, and nothing is to change."""
        durable, world = self.durable, self.durable.current
        if durable.phase is not Phase.RUNNING or durable.planned or world is None or world.fills:
            return False
        return self.planner.asked_at is None and self.goal is not None


def new_job(spec: JobSpec, now: float) -> Job:
    """A job that was just submitted. Its first event is `Started`."""
    figures = Figures(created=now, counted_until=now)
    durable = Durable(spec, spec.wanted, figures=figures, cell=spec.cell or ONE, spares=spec.spares)
    return Job(durable, started_at=now, figures=figures)


def restore(durable: Durable, now: float) -> Job:
    """The job of an earlier controller. Its first event is `Started`."""
    known = durable.current is None or durable.phase.is_over
    return Job(durable, started_at=now, figures=durable.figures, figures_known=known)
