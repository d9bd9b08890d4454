"""`shoal cancel`: it ends a job, and never forgets one that is over, as a second DELETE would."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from shoal_controller.cli.client import Client
from shoal_controller.cli.jobs import cancel
from shoal_protos.errors import Conflict

JOB = {
    "job": "j",
    "phase": "running",
    "step": 1,
    "max_steps": 2,
    "loss": 0.5,
    "generation": 1,
    "lanes": 2,
    "reason": "",
}
WORKERS = {"active": 1, "wanted": 1, "min": 1, "max": 2}


@pytest.mark.parametrize("phase", ["running", "paused", "succeeded", "failed", "cancelled"])
def test_only_a_job_that_is_not_over_is_stopped(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []

    async def found(_: Client, job: str) -> dict[str, Any]:
        return {**JOB, "workers": WORKERS, "phase": phase}

    async def stop(_: Client, job: str) -> dict[str, Any]:
        stopped.append(job)
        return {**JOB, "workers": WORKERS, "phase": "cancelled"}

    monkeypatch.setattr(Client, "job", found)
    monkeypatch.setattr(Client, "stop", stop)
    if phase in ("running", "paused"):
        asyncio.run(cancel("j", "http://127.0.0.1:1"))
        assert stopped == ["j"]
    else:
        with pytest.raises(Conflict, match=rf"^job j is over \({phase}\); there is nothing to cancel$"):
            asyncio.run(cancel("j", "http://127.0.0.1:1"))
        assert stopped == []
