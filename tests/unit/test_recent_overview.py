"""The overview that several readers share: kept for a moment, and made anew for those who ask later."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_port import serving
from asynchronous import asynchronous
from shoal_controller.api import page_routes
from shoal_controller.api.page_routes import RecentOverview


@asynchronous
async def test_an_overview_is_kept_for_its_moment_and_then_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as api:
        kept, anew = RecentOverview(), RecentOverview()

        async def jobs(recent: RecentOverview, most_seconds: float) -> list[str]:
            monkeypatch.setattr(page_routes, "MOST_SECONDS", most_seconds)
            monkeypatch.setattr(page_routes, "KEPT_TIMES", 1e9)
            return [row.job.job for row in await recent.rows(api.shell)]

        await api.ask("POST", "/v1/jobs", 202, json={"job": "first"})
        assert await jobs(kept, 1000.0) == await jobs(anew, 0.0) == ["first"]
        await api.ask("POST", "/v1/jobs", 202, json={"job": "second"})
        assert await jobs(kept, 1000.0) == ["first"]
        assert await jobs(anew, 0.0) == ["first", "second"]
