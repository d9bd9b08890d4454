"""One pod as the launcher keeps it: what it is asked for, what it is, and what its job has been told of its workers.

`news` is what the job does not know yet. It goes by states, not by changes, so that a change that is seen twice, late
or never makes no difference. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal_protos.plan import WorkerId

from shoal_controller.core.machine.events import Endangered, Exited, Preempted, Spared, Spawned, Waiting
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.kubernetes.pod_manifest import pod_name, together
from shoal_controller.launchers.kubernetes.pod_state import PodState

News = Spawned | Waiting | Preempted | Spared | Endangered | Exited


@dataclass(slots=True)
class TrackedPod:
    """The pod of a worker that was asked for, or adopted, and whose end its job has not been told."""

    worker: WorkerId
    """The first one, where it has several."""
    spec: JobSpec
    name: str
    uid: str = ""
    """Of its pod; empty until that is made."""
    is_killed: bool = False
    """It is to end at once."""
    looked_for: str = ""
    """The node that was asked for by name, because it is not among those that are known."""
    sees_node: bool = True
    """Whether the node that it is on is known: what is not known has taken nothing back."""
    state: PodState | None = None
    refusal: Waiting | None = None
    """Why it is not made."""
    end: Exited | None = None
    told_wait: Waiting | None = None
    told_start: bool = False
    told_announcement: Preempted | None = None
    told_deletion: str = ""
    """When its pod was to be gone then: who deletes one a second time may leave it less."""
    told_hint: str = ""
    annotated: Mapping[str, str] = field(default_factory=dict)
    """What its pod says of the worker's world, as it was found or written last."""

    @classmethod
    def of(cls, worker: WorkerId, spec: JobSpec) -> TrackedPod:
        """That of any of its workers."""
        first = together(worker, spec)[0]
        return cls(first, spec, pod_name(spec.job, first))

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """All that are in it."""
        return together(self.worker, self.spec)

    def news(self) -> News | None:
        """The next thing to tell of each of its workers; None where its job knows all."""
        if self.end is not None:
            return self.end
        wait = self.refusal if self.refusal is not None else self.state.wait if self.state is not None else None
        if self.state is not None and self.state.place.has_started:
            if not self.told_start:
                return Spawned(self.worker, self.state.place)
            return self._of_its_node(self.state)
        if wait is not None and wait != self.told_wait and not self.is_killed:
            return wait
        return None if self.state is None else self._of_its_node(self.state)

    def _of_its_node(self, state: PodState) -> News | None:
        before, announced = self.told_announcement, state.announcement
        if (
            announced is not None
            and not self.is_killed
            and (before is None or before.notice is not announced.notice or state.deleted_at != self.told_deletion)
        ):
            return announced
        if announced is None and before is not None and self.sees_node:
            return Spared(self.worker, f"that {before.why} is over")
        return Endangered(self.worker, state.hint) if state.hint != self.told_hint else None

    def was_told(self, news: News) -> None:
        """Its job has heard this."""
        match news:
            case Spawned():
                self.told_start = True
            case Waiting():
                self.told_wait = news
            case Preempted():
                self.told_announcement = news
                self.told_deletion = self.state.deleted_at if self.state is not None else ""
            case Spared():
                self.told_announcement = None
            case Endangered(_, why):
                self.told_hint = why


@dataclass(slots=True)
class TrackedPods:
    """All of them, by job and worker, and by the names of their pods."""

    by_worker: dict[tuple[str, WorkerId], TrackedPod] = field(default_factory=dict)
    by_name: dict[str, TrackedPod] = field(default_factory=dict)

    def add(self, pod: TrackedPod) -> TrackedPod:
        self.by_worker |= {(pod.spec.job, worker): pod for worker in pod.workers}
        self.by_name[pod.name] = pod
        return pod

    def remove(self, pod: TrackedPod) -> None:
        for worker in pod.workers:
            if self.by_worker.get((pod.spec.job, worker)) is pod:
                del self.by_worker[pod.spec.job, worker]
        if self.by_name.get(pod.name) is pod:
            del self.by_name[pod.name]

    def of(self, job: str) -> list[TrackedPod]:
        return [pod for pod in self.by_name.values() if pod.spec.job == job]

    def clear(self) -> None:
        self.by_worker.clear()
        self.by_name.clear()
