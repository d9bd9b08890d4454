"""`shoal cancel`: it ends a job, and never forgets one that is over, as a second DELETE would."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from shoal_controller.cli.client import Changed, Client
from shoal_controller.cli.jobs import cancel
from shoal_protos.errors import Conflict

JOB = {
    "job": "j",
    "step": 1,
    "max_steps": 2,
    "loss": 0.5,
    "generation": 1,
    "lanes": 2,
    "reason": "",
    "workers": {"active": 1, "wanted": 1, "min": 1, "max": 2},
}


class Controller:
    """Answers with the job's phases, one after the other: its version is which one it is in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *phases: str) -> None:
        self.phases = phases
        self.phase = 0
        self.deleted: list[str] = []
        """In which phase."""
        monkeypatch.setattr(Client, "_ask", self.answer)

    async def answer(self, method: str, path: str, body: object = None, headers: Any = None) -> dict[str, Any]:
        seen, number = self.phases[self.phase], self.phase
        only_if = (headers or {}).get("If-Match", "").strip('"')
        if method == "GET":  # and at once it is in the next one
            self.phase = min(self.phase + 1, len(self.phases) - 1)
        elif only_if not in ("", f"v{number}"):
            raise Changed(f"job j was changed: its version is v{number}, not {only_if}")
        else:
            self.deleted.append(seen)
        return {**JOB, "phase": seen, "version": f"v{number}"}


@pytest.mark.parametrize("phase", ["running", "paused", "succeeded", "failed", "cancelled"])
def test_only_a_job_that_is_not_over_is_stopped(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(monkeypatch, phase)
    if phase in ("running", "paused"):
        asyncio.run(cancel("j", "http://127.0.0.1:1"))
        assert controller.deleted == [phase]
    else:
        with pytest.raises(Conflict, match=rf"^job j is over \({phase}\); there is nothing to cancel$"):
            asyncio.run(cancel("j", "http://127.0.0.1:1"))
        assert controller.deleted == []


def test_a_job_that_ends_just_before_it_is_to_be_stopped_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(monkeypatch, "running", "succeeded")
    with pytest.raises(Conflict, match=r"^job j is over \(succeeded\); there is nothing to cancel$"):
        asyncio.run(cancel("j", "http://127.0.0.1:1"))
    assert controller.deleted == []


def test_a_job_that_somebody_changes_just_before_it_is_to_be_stopped_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controller = Controller(monkeypatch, "running", "paused")
    asyncio.run(cancel("j", "http://127.0.0.1:1"))
    assert controller.deleted == ["paused"]
