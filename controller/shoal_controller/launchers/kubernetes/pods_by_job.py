"""Which of the known pods belong to which job, by their labels, so that nobody goes through all of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_controller.launchers.kubernetes.pod_manifest import JOB
from shoal_controller.launchers.kubernetes.section import Json


class PodsByJob:
    """Told of each pod that changes or goes."""

    def __init__(self) -> None:
        self._pods: dict[str, dict[str, Json]] = {}
        self._jobs: dict[str, str] = {}
        """By the name of the pod."""

    def note(self, name: str, pod: Json | None) -> None:
        """It is so now; None: it is gone."""
        before = self._jobs.pop(name, None)
        if before is not None:
            self._drop(before, name)
        if pod is not None:
            self._jobs[name] = job = str(pod["metadata"].get("labels", {}).get(JOB, ""))
            self._pods.setdefault(job, {})[name] = pod

    def of(self, job: str) -> Sequence[Json]:
        return list(self._pods.get(job, {}).values())

    def clear(self) -> None:
        self._pods.clear()
        self._jobs.clear()

    def _drop(self, job: str, name: str) -> None:
        del self._pods[job][name]
        if not self._pods[job]:
            del self._pods[job]
