"""The turn: one batch of events being worked on, with the job so far, the time and the effects in their order.

`machine.step` makes a `Turn`, the functions in `phases/` change it, and `machine.step` takes out the result. What is
durable is written before anything is sent: [Note: stored first] in `effects_in_order`.

`Turn.enter` is the only way to set a job's phase, and it refuses what the table `ALLOWED` does not have;
docs/phases.md is printed from that. `paused`, and `waiting` with a world that is too small to step, are not phases:
`view` shows them for a running world that commits no steps.

`replaced` copies the few frozen records that a turn replaces most (about ten thousand times in a batch of a thousand
workers), at a quarter of the cost of `dataclasses.replace`. Such records have no slots and no checks at construction;
all others use `dataclasses.replace`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from shoal_protos.messages import ToWorker
from shoal_protos.plan import Plan, WorkerId

from shoal_controller.core.machine.durable import Durable, WorkerRecord
from shoal_controller.core.machine.effects import Effect, Note, Persist, Send
from shoal_controller.core.machine.event_kind import EventKind
from shoal_controller.core.machine.figures import Figures
from shoal_controller.core.machine.job import Job, Process
from shoal_controller.core.machine.spec import JobSpec, Phase

LIVING = (Phase.WAITING, Phase.STARTING, Phase.RUNNING, Phase.RESIZING, Phase.STALLED)
"""The phases of a job that is not over."""

ALLOWED: Mapping[tuple[Phase, Phase], str] = {
    (Phase.WAITING, Phase.STARTING): "enough workers are ready",
    (Phase.STARTING, Phase.RUNNING): "every member is ready, the world opens",
    (Phase.STARTING, Phase.WAITING): "too few workers are left to start, or the controller was restarted",
    (Phase.RUNNING, Phase.RESIZING): "a member is lost or cut off, or all return to a checkpoint",
    (Phase.RUNNING, Phase.STALLED): "the last members have left",
    (Phase.RESIZING, Phase.RUNNING): "every member is ready, the world opens",
    (Phase.RESIZING, Phase.STALLED): "a block has no living copy, or two needed workers cannot reach each other",
    (Phase.RESIZING, Phase.WAITING): "too few workers are left, and no step was committed yet",
    (Phase.STALLED, Phase.RESIZING): "a worker came back, or all return to a checkpoint",
    (Phase.STALLED, Phase.RUNNING): "every member is ready, the world opens",
    (Phase.STALLED, Phase.WAITING): "no worker is left: others begin from a checkpoint or step 0",
    (Phase.RUNNING, Phase.SUCCEEDED): "every member has ended its script after the last step",
    (Phase.STALLED, Phase.SUCCEEDED): "every block is lost after the last step, and the digests are known",
    **{(phase, Phase.FAILED): "a failure that another attempt cannot cure" for phase in LIVING},
    **{(phase, Phase.CANCELLED): "an operator has cancelled the job" for phase in LIVING},
}
Answer = TypeVar("Answer")


class Turn:
    """One batch of events being worked on: job, time, and effects so far."""

    __slots__ = ("_own_roster", "answers", "before", "copies", "effects", "incarnations", "job", "now")

    def __init__(self, job: Job, now: float) -> None:
        self.before = job
        self.job = job
        self.now = now
        self.effects: list[Effect] = []
        self.copies: dict[str, dict[Any, Any]] = {}
        self.answers: dict[object, Any] = {}
        self.incarnations: dict[str, WorkerId] | None = None
        self._own_roster: dict[WorkerId, WorkerRecord] = {}

    # ---- reading

    @property
    def durable(self) -> Durable:
        return self.job.durable

    @property
    def spec(self) -> JobSpec:
        return self.job.durable.spec

    @property
    def world(self) -> Plan | None:
        """The plan of the world that may train."""
        return self.job.durable.current

    def record(self, worker: WorkerId) -> WorkerRecord:
        return self.job.durable.roster[worker]

    def serving(self) -> Iterator[Process]:
        """The processes that are alive as far as is known, and wanted."""
        roster = self.job.durable.roster
        return (process for process in self.job.processes.values() if roster[process.worker].serves)

    def process(self, worker: WorkerId) -> Process | None:
        return self.job.processes.get(worker)

    # ---- changing

    def change(self, **fields: Any) -> None:
        """Volatile fields of the job."""
        self.job = replaced(self.job, fields)

    def enter(self, phase: Phase, reason: str = "") -> None:
        """Go to another phase, or stay in this one for another reason. `reason`: why it is stalled or over."""
        before = self.job.durable.phase
        assert phase is before or (before, phase) in ALLOWED, f"a job that is {before} cannot become {phase}"
        durable = replaced(self.job.durable, {"phase": phase, "reason": reason})
        self.job = replaced(self.job, {"durable": durable})

    def keep(self, **fields: Any) -> None:
        """Durable fields of the job, but its phase: `enter`."""
        assert "phase" not in fields, "a phase is entered"
        self.job = replaced(self.job, {"durable": replaced(self.job.durable, fields)})

    def enlist(self, record: WorkerRecord) -> None:
        """A new or changed record. The roster is copied once a turn, whatever it was before stays as it is."""
        if self.job.durable.roster is not self._own_roster:
            self._own_roster = dict(self.job.durable.roster)
            self.keep(roster=self._own_roster)
        self._own_roster[record.worker] = record
        if self.incarnations is not None:
            self.incarnations[record.incarnation] = record.worker

    def mark(self, worker: WorkerId, **fields: Any) -> None:
        """Durable fields of one worker, where they differ."""
        record = self.record(worker)
        if any(getattr(record, name) != value for name, value in fields.items()):
            self.enlist(replaced(record, fields))

    def enlist_new(self, worker: WorkerId, launched: bool = False) -> WorkerRecord:
        """The record of the youngest worker."""
        record = WorkerRecord(worker, self.durable.next_join_order, launched)
        self.keep(next_join_order=record.join_order + 1)
        self.enlist(record)
        return record

    def take_id(self) -> WorkerId:
        """An id for a new process: none is ever used twice."""
        number = self.durable.unused_number
        self.keep(next_id=number + 1)
        return f"w{number}"

    def expect_end(self, worker: WorkerId) -> None:
        """A process of the launcher's is to end by itself, or it is killed; other processes are not ours to end."""
        if self.record(worker).launched:
            self.mark(worker, ending_since=self.now)

    def see(self, worker: WorkerId, **fields: Any) -> None:
        """Volatile fields of one process."""
        self.put("processes", worker, replaced(self.job.processes[worker], fields))

    def put(self, mapping: str, key: object, value: object) -> None:
        """One entry of one of the job's volatile mappings."""
        _own_copy(self, mapping)[key] = value

    def drop(self, mapping: str, key: object) -> None:
        """The entry, if it is there."""
        if key in getattr(self.job, mapping):
            del _own_copy(self, mapping)[key]

    # ---- what is counted

    def count(self, metric: str, value: float = 1, **labels: str) -> None:
        """Add to a counter of `figures.COUNTERS`."""
        self.keep_figures(self.job.figures.counted(metric, value, labels))

    def observe(self, metric: str, value: float, **labels: str) -> None:
        """One observation of a histogram of `figures.HISTOGRAMS`."""
        self.keep_figures(self.job.figures.observed(metric, value, labels))

    def keep_figures(self, figures: Figures) -> None:
        """Durable, so that nothing that was shown goes down in another controller's life."""
        self.change(figures=figures)
        self.keep(figures=figures)

    def set_clock(self) -> None:
        """Another life's clock may be behind that of the one before: nothing has happened after now."""
        self.keep_figures(self.durable.figures.at(self.now))
        if self.durable.ended_at is not None:
            self.keep(ended_at=min(self.durable.ended_at, self.now))

    # ---- effects

    def do(self, effect: Effect) -> None:
        self.effects.append(effect)

    def say(self, worker: WorkerId, message: ToWorker) -> None:
        """Send to a connected worker; one whose stream is broken is told when it comes back."""
        process = self.process(worker)
        if process is not None and process.connection is not None:
            self.do(Send(process.connection, message))

    def note(self, kind: EventKind, message: str, worker: WorkerId = "", **data: object) -> None:
        self.do(Note(kind, message, worker, data))

    def effects_in_order(self) -> list[Effect]:
        """[Note: stored first] One write, before everything else of this turn.

        So a number is in the store before anyone hears of it, a world before it is opened, a worker before it is
        started; and a controller that dies between two effects has only left something unsaid, which it will say again.
        The shown step alone is no reason to write: workers know where they are, and the figures of its steps are
        written once a minute (`phases/progress.py`). It is one where a phase has asked for the write (`Persist`).
        """
        before, after = self.before.durable, self.job.durable
        others: list[Effect] = [effect for effect in self.effects if not isinstance(effect, Persist)]
        is_due = len(others) < len(self.effects) or after != replaced(before, {"step": after.step})
        return [Persist(), *others] if is_due else others


# ---- what would cost the square of the workers


def once(turn: Turn, question: Callable[[Job], Answer]) -> Answer:
    """The answer as of the first time that it was asked in this batch: of what goes through all workers, for each of
    many.
    """
    if question not in turn.answers:
        turn.answers[question] = question(turn.job)
    answer: Answer = turn.answers[question]
    return answer


def worker_of(turn: Turn, incarnation: str) -> WorkerId | None:
    """The id that a process was given, the last one where there are several."""
    if turn.incarnations is None:
        turn.incarnations = {record.incarnation: record.worker for record in turn.durable.roster.values()}
    return turn.incarnations.get(incarnation)


def forget_surplus(turn: Turn) -> None:
    """For each worker that is new the oldest that is gone is forgotten, beyond a bound."""
    if turn.durable.next_join_order == turn.before.durable.next_join_order:
        return
    if gone := turn.durable.surplus:
        turn.keep(roster={name: record for name, record in turn.durable.roster.items() if name not in gone})
        turn.change(
            processes={name: one for name, one in turn.job.processes.items() if name not in gone},
            probed_at={name: at for name, at in turn.job.probed_at.items() if name not in gone},
        )


def _own_copy(turn: Turn, name: str) -> dict[Any, Any]:
    """A mapping is copied once a turn: whatever it was before stays as it is."""
    mapping: Mapping[Any, Any] = getattr(turn.job, name)
    if mapping is not turn.copies.get(name):
        turn.copies[name] = dict(mapping)
        turn.change(**{name: turn.copies[name]})
    return turn.copies[name]


Record = TypeVar("Record")


def replaced(record: Record, fields: dict[str, Any]) -> Record:
    """A copy with these fields.

    Raises:
        TypeError: A field that the record does not have.
    """
    values = vars(record)
    if not fields.keys() <= values.keys():
        raise TypeError(f"{type(record).__name__} has no field {', '.join(sorted(fields.keys() - values.keys()))}")
    copy: Record = object.__new__(type(record))
    vars(copy).update(values, **fields)
    return copy
