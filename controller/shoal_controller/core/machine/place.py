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

    @classmethod
    def of_process(cls, pid: int, log: str = "") -> Place:
        return cls(f"process {pid}", pid, log)
