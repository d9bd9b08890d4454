"""Seconds per phase of a change of the world, and what it moved: for people."""

from __future__ import annotations

import time

from shoal_protos.messages import Change


class ChangeClock:
    """Seconds per phase of the change at hand."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """No change is at hand."""
        self._began: float | None = None
        self._mark = 0.0
        self._phases: dict[str, float] = {}
        self._promoted = 0
        self._bytes = 0
        self._checkpoint_bytes = 0

    def _lap(self, phase: str) -> None:
        now = time.monotonic()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._mark
        self._mark = now

    def start(self) -> None:
        if self._began is None:
            self._began = self._mark = time.monotonic()

    def end_prepare(self) -> None:
        self._lap("prepare")

    def end_plan(self, group_seconds: float) -> None:
        self._lap("plan")
        self._phases["group"] = self._phases.get("group", 0.0) + group_seconds
        self._phases["plan"] = max(0.0, self._phases["plan"] - group_seconds)

    def end_promote(self) -> None:
        self._lap("promote")

    def note_promoted(self, blocks: int) -> None:
        self._promoted = blocks

    def note_bytes(self, count: int) -> None:
        self._bytes = count

    def note_checkpoint(self, count: int) -> None:
        self._checkpoint_bytes = count

    def end(self, generation: int, step: int, recovered: bool) -> Change:
        if self._began is None:
            self._began = self._mark = time.monotonic()
        self._lap("open" if recovered else "switch")
        pause = time.monotonic() - self._began
        change = Change(generation, step, pause, dict(self._phases), self._promoted, self._bytes,
                        checkpoint_bytes=self._checkpoint_bytes)  # fmt: skip
        self.forget()
        return change
