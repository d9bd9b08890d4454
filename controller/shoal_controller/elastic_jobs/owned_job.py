"""One resource and its job: each look brings the job nearer to the resource, and the resource's status to the job.

Level-triggered: a look reads both as they are, does one thing that is missing, and says when to look again. No look
relies on what an earlier look, or an earlier controller, has done. Called by `reconciler.py`, one look at a time.

`SizeSettling` passes a change of size on at once if it goes in the direction of the last one. A change that turns back
waits some seconds, so that the change under way can finish, and twice as long at each further turn; then the newest
size is passed on if it still differs. An autoscaler that flaps for an hour makes a dozen changes, not hundreds.

`next_step` ends the job of a deleted resource: stop after its step, save, end, remove. It is judged by what is seen of
the job, so another controller continues. Every wait is bounded: by `SAVE_SECONDS` for a checkpoint that cannot be
saved, by `END_SECONDS` for pods that do not end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import structlog
from shoal_protos.acts import Cancel, Pause, Save
from shoal_protos.errors import NotFound, UserError

from shoal_controller.core.machine.events import Event
from shoal_controller.core.machine.figures import series_key
from shoal_controller.core.machine.spec import JobSpec, JobView, Phase
from shoal_controller.elastic_jobs.resource_forms import (
    ACCEPTED,
    SETTLING,
    Acceptance,
    Seen,
    dropped_keys,
    job_spec_of,
    patch_between,
    says_over,
    size_change,
    status_of,
    tells_news,
    why_not_followed,
)
from shoal_controller.elastic_jobs.resource_writer import (
    KINDS,
    NORMAL,
    WARNING,
    ClusterEvent,
    EventBursts,
    ResourceWriter,
)
from shoal_controller.jobs.shell import Shell
from shoal_controller.launchers.kubernetes.cluster_api import ObjectWatch
from shoal_controller.launchers.kubernetes.resource_kind import FULL_NAME, has_finalizer, is_deleted, uid_of
from shoal_controller.launchers.kubernetes.section import Json

STATUS_SECONDS = 5.0
"""So seldom is a status written that tells of no change of phase."""
TIME_SECONDS = 60.0
"""And one that tells only for how long something has been so."""
STATUSES_PER_SECOND, TIMES_PER_SECOND = 20.0, 4.0
"""So many of all resources: where there are many, each is written more seldom. The second: of those that tell only for
how long something has been so.
"""
SOON_SECONDS = 0.5
"""Until the next look at a job that is being deleted."""
EVENTS_AT_ONCE = 500
OVER_SECONDS = 60.0
"""So seldom is a job looked at that is over and of which nothing is new."""
DELETING = (
    "the resource is deleted: its job stops, saves where its config has a folder for checkpoints, and its pods go"
)
POD_SECONDS = 60.0
"""How long the pods of a job that is forgotten may take to be gone: then they go with the resource."""

log = structlog.get_logger("shoal.elastic_jobs")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all resources' jobs share."""

    shell: Shell
    copy: ObjectWatch
    """The resources as the cluster has them."""
    writer: ResourceWriter
    count: Callable[[], int]
    """How many resources there are."""

    def status_seconds(self, *, tells_news: bool = True) -> float:
        """Between two writes of a status that tell of no change of phase."""
        if not tells_news:
            return max(TIME_SECONDS, self.count() / TIMES_PER_SECOND)
        return max(STATUS_SECONDS, self.count() / STATUSES_PER_SECOND)


class OwnedJob:
    """The resource and the job of one name."""

    def __init__(self, name: str, surroundings: Surroundings) -> None:
        self.name = name
        self.due = 0.0
        """When to look again at the latest, by the monotonic clock."""
        self._shell, self._copy = surroundings.shell, surroundings.copy
        self._writer, self._status_seconds = surroundings.writer, surroundings.status_seconds
        self._deletion: Deletion | None = None
        self._forgotten_since: float | None = None
        self._written = float("-inf")
        self.trouble = ""
        """Why the last look has failed; empty where it has not."""
        self._dropped: list[str] = []
        self._uid = ""
        self._begin_anew("")
        self._passed_on: tuple[str, int] = ("", 0)
        """A run, and the number of its last event that the cluster was told."""

    def _begin_anew(self, uid: str) -> None:
        """● A resource that was deleted and made again is another one: what is to be told of the first is not its."""
        self._uid = uid
        self._bursts, self._settling = EventBursts(), SizeSettling()
        self._told_acceptance = ACCEPTED

    # ---- what there is

    @property
    def is_over(self) -> bool:
        """Neither the resource is there nor a job that was made from one."""
        spec = self._spec()
        return self.name not in self._copy.items and (spec is None or not spec.resource)

    @property
    def has_news(self) -> bool:
        """Whether its job has a history that was not passed on."""
        spec = self._spec()
        if spec is None or not spec.resource:
            return False
        return (spec.run, self._shell.runner(self.name).repository.last_event) != self._passed_on

    def _spec(self) -> JobSpec | None:
        try:
            return self._shell.spec(self.name)
        except NotFound:
            return None

    # ---- one look

    async def look(self) -> None:
        """Raises `ShoalError` where the store or the cluster does not do its part: look again later."""
        self.due = time.monotonic() + self._status_seconds()
        item, spec = self._copy.items.get(self.name), self._spec()
        if item is not None and uid_of(item) != self._uid:
            self._begin_anew(uid_of(item))
        if item is None:
            if spec is not None and spec.resource:
                await self._end_job(spec)
        elif is_deleted(item):
            await self._on_deleted(item, spec)
        else:
            self._forgotten_since = None
            acceptance = await self._follow(item, spec)
            if acceptance is not None:
                await self._report(item, acceptance)

    async def _follow(self, item: Json, job: JobSpec | None) -> Acceptance | None:
        """Make the job, or make it as the resource is. None: there is nothing to be said yet."""
        over = job is not None and self._shell.view(self.name).phase.is_over
        own = job is not None and job.resource == uid_of(item)
        if job is not None and not own and not over:
            if job.resource:  # its resource is gone, and another one has the name
                await self._end_job(job)
                return None
            return Acceptance(False, "NameTaken", (
                f"a job {self.name} that no resource has was submitted over REST and is not over; delete it "
                f"(DELETE /v1/jobs/{self.name}), or give the resource another name"
            ))  # fmt: skip
        try:
            asked = job_spec_of(item)
        except UserError as error:
            return Acceptance(False, "Refused", str(error))
        if job is None or not own:
            if says_over(item.get("status") or {}):
                return None
            return await self._submit(item, asked)
        return ACCEPTED if over else await self._follow_changes(job, asked)

    async def _submit(self, item: Json, asked: JobSpec) -> Acceptance | None:
        """● The finalizer is there before the job: no resource can go and leave a job behind."""
        if not has_finalizer(item):
            item = await self._writer.add_finalizer(item)
            self._copy.learn(item)
        try:
            await self._shell.create(asked)
        except UserError as error:
            return Acceptance(False, "Refused", str(error))
        log.info("a job is made from a resource", job=self.name, uid=asked.resource)
        return ACCEPTED

    async def _follow_changes(self, job: JobSpec, asked: JobSpec) -> Acceptance:
        view, now = self._shell.view(self.name), time.monotonic()
        change = size_change(view, asked)
        due = self._settling.due(view.wanted, asked.wanted, now)
        if change is not None and due <= now:
            try:
                await self._shell.submit(self.name, change)
            except UserError as error:
                return Acceptance(False, "ScaleRefused", str(error))
            self._settling.note(view.wanted, asked.wanted, now)
        if sentence := why_not_followed(job, asked):
            return Acceptance(False, "Immutable", sentence)
        if change is not None and due > now:
            self.due = min(self.due, due)
            return SETTLING
        return ACCEPTED

    # ---- its end

    async def _on_deleted(self, item: Json, job: JobSpec | None) -> None:
        """● The job ends without our finalizer, too: another one keeps the resource until the pods are gone, and a job
        that goes on makes new ones.
        """
        if job is not None and job.resource == uid_of(item):
            if self._deletion is None or self._deletion.run != job.run:
                await self._writer.tell(item, ClusterEvent("Deleting", NORMAL, DELETING, 0, time.time()))
            await self._report(item, ACCEPTED)
            if not await self._end_job(job):
                return
        if has_finalizer(item) and await self._pods_are_gone():
            for event in self._bursts.take_due(time.monotonic(), all_of_them=True):
                await self._writer.tell(item, event)
            left = await self._writer.remove_finalizer(item)
            if left is not None and left["metadata"].get("finalizers"):
                self._copy.learn(left)
            else:
                self._copy.forget(self.name, item)

    async def _end_job(self, job: JobSpec) -> bool:
        """Do what is next; returns whether the job is forgotten."""
        self.due = time.monotonic() + SOON_SECONDS
        view, now = self._shell.view(self.name), time.monotonic()
        if self._deletion is None or self._deletion.run != job.run:
            self._deletion = Deletion(job.run, now)
        deletion = self._deletion
        running = 0
        if view.phase.is_over:
            deletion.over_since = deletion.over_since if deletion.over_since is not None else now
            _, running = await self._writer.pods_left(self.name)
        match next_step(view, deletion, running, now):
            case DeletionStep.PAUSE:
                await self._ask(Pause())
            case DeletionStep.SAVE:
                deletion.asked_to_save, deletion.failed_saves = True, failed_saves(view)
                await self._ask(Save())
            case DeletionStep.CANCEL:
                await self._ask(Cancel())
            case DeletionStep.FORGET:
                await self._shell.delete(self.name)
                log.info("the job of a deleted resource is forgotten", job=self.name, uid=job.resource)
                return True
            case DeletionStep.WAIT:
                pass
        return False

    async def _ask(self, request: Event) -> None:
        """What the job refuses is seen at the next look: it is asked by how it is then."""
        try:
            await self._shell.submit(self.name, request)
        except UserError as error:
            log.info("a job that is to end refuses a request", job=self.name, error=str(error))

    async def _pods_are_gone(self) -> bool:
        self.due, now = time.monotonic() + SOON_SECONDS, time.monotonic()
        self._forgotten_since = self._forgotten_since if self._forgotten_since is not None else now
        there, _ = await self._writer.pods_left(self.name)
        return not there or now - self._forgotten_since > POD_SECONDS

    # ---- what the cluster is told

    async def _report(self, item: Json, acceptance: Acceptance) -> None:
        await self._pass_on(item)
        if acceptance != self._told_acceptance:
            if not acceptance.holds:
                number = int(item["metadata"].get("generation") or 0)
                event = ClusterEvent(acceptance.reason, WARNING, acceptance.message, number, time.time())
                await self._writer.tell(item, event)
            self._told_acceptance = acceptance
        await self._write_status(item, acceptance)

    async def _write_status(self, item: Json, acceptance: Acceptance) -> None:
        spec, before = self._spec(), item.get("status") or {}
        own = spec is not None and spec.resource == uid_of(item)
        view = self._shell.view(self.name) if own else None
        generation = int(item["metadata"].get("generation") or 0)
        run, number = self._passed_on if own else ("", 0)
        status = status_of(view, Seen(self.name, generation, acceptance, time.time(), run, number), before)
        patch, now = patch_between(before, status), time.monotonic()
        at_once = _at_once(before) != _at_once(status)
        if not patch and view is not None and view.phase.is_over:
            self.due = now + OVER_SECONDS
        seconds = self._status_seconds(tells_news=tells_news(before, status))
        if not patch or (not at_once and now - self._written < seconds):
            return
        answer = await self._writer.patch_status(item, patch)
        self._written = now
        self._copy.learn(answer)
        dropped = dropped_keys(status, answer.get("status") or {})
        if dropped and dropped != self._dropped:
            sentence = (
                f"the definition of {FULL_NAME} in this cluster is older than the controller: it drops "
                f"{', '.join(f'status.{key}' for key in dropped)}; apply crd/elasticjobs.yaml of the chart's version"
            )
            log.warning(sentence, job=self.name)
            await self._writer.tell(item, ClusterEvent("DefinitionOutdated", WARNING, sentence, 0, time.time()))
        self._dropped = dropped

    async def _pass_on(self, item: Json) -> None:
        """Tell the cluster what has happened to the job."""
        spec = self._spec()
        if spec is None or spec.resource != uid_of(item):
            return
        run, after = self._passed_on
        if run != spec.run:
            status = item.get("status") or {}
            after = int(status.get("events") or 0) if status.get("run") == spec.run else 0
        last = self._shell.runner(self.name).repository.last_event
        now = time.monotonic()
        while after < last:
            events = await self._shell.events(self.name, after, EVENTS_AT_ONCE)
            for event in events:
                if event.kind in KINDS:
                    reason, severity = KINDS[event.kind]
                    made = ClusterEvent(reason, severity, event.message, event.revision, event.time)
                    if (first := self._bursts.put(made, now)) is not None:
                        await self._writer.tell(item, first)
            after = events[-1].revision if events else last
        self._passed_on = spec.run, after
        for due in self._bursts.take_due(now):
            await self._writer.tell(item, due)


def _at_once(status: Json) -> object:
    """What is written as soon as it changes."""
    accepted: Json = next((one for one in status.get("conditions") or () if one.get("type") == "Accepted"), {})
    return status.get("phase"), status.get("observedGeneration"), accepted.get("reason"), accepted.get("message")


FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 300.0
QUIET_SECONDS = 600.0
"""After so long without a change the first pause counts again."""


class SizeSettling:
    """The size of one resource, until it is passed on. The time is passed in, and never goes back."""

    def __init__(self) -> None:
        self._direction = 0
        self._changed_at = float("-inf")
        self._pause = FIRST_PAUSE_SECONDS

    def due(self, wanted: int, asked: int, now: float) -> float:
        """When to pass on a change from `wanted` to `asked`: now, or later."""
        return max(now, self._changed_at + self._pause) if self._turns(wanted, asked) else now

    def note(self, wanted: int, asked: int, now: float) -> None:
        """It was passed on."""
        if asked == wanted:
            return
        if now - self._changed_at > QUIET_SECONDS:
            self._pause = FIRST_PAUSE_SECONDS
        elif self._turns(wanted, asked):
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self._direction, self._changed_at = _sign(asked - wanted), now

    def _turns(self, wanted: int, asked: int) -> bool:
        return _sign(asked - wanted) * self._direction < 0


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


SAVE_SECONDS = 300.0
"""How long a deleted job may take until its state is in a checkpoint."""
END_SECONDS = 20.0
"""How long its pods have to end by themselves; those that are left are deleted."""

FAILED_SAVES = "shoal_checkpoint_failures_total"


class DeletionStep(StrEnum):
    PAUSE = "pause"
    SAVE = "save"
    WAIT = "wait"
    CANCEL = "cancel"
    FORGET = "forget"


@dataclass(slots=True)
class Deletion:
    """A deletion that is under way, as this controller has seen it."""

    run: str
    began: float
    over_since: float | None = None
    asked_to_save: bool = False
    failed_saves: float = 0.0
    """Of the job when it was asked to."""


def next_step(view: JobView, deletion: Deletion, running_pods: int, now: float) -> DeletionStep:
    """`running_pods`: of the job, as the cluster has them."""
    if view.phase.is_over:
        since = deletion.over_since if deletion.over_since is not None else now
        return DeletionStep.WAIT if running_pods and now - since < END_SECONDS else DeletionStep.FORGET
    can_save = view.can_checkpoint and view.active and view.phase is not Phase.STALLED
    if not can_save or now - deletion.began > SAVE_SECONDS:
        return DeletionStep.CANCEL
    if view.phase not in (Phase.PAUSED, Phase.WAITING):
        return DeletionStep.PAUSE if view.phase is Phase.RUNNING else DeletionStep.WAIT
    if view.last_checkpoint_step == view.step:
        return DeletionStep.CANCEL
    if not deletion.asked_to_save:
        return DeletionStep.SAVE
    return DeletionStep.CANCEL if failed_saves(view) > deletion.failed_saves else DeletionStep.WAIT


def failed_saves(view: JobView) -> float:
    return view.figures.counters.get(series_key(FAILED_SAVES, {}), 0.0)
