"""Where a worker runs, for people: a process of a host, or a pod. Named by its launcher, else by the worker's hello.

Nothing is decided by it. A launcher finds its workers again by what it keeps itself (records on disk, labels of pods).
"""

from __future__ import annotations

from dataclasses import dataclass


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
