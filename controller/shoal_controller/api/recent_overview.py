"""All jobs as the overview has them, made once for all readers that ask at about the same time.

A look at 100 jobs of 100 workers each takes a fifth of a second: so long no heartbeat must wait, and not for every open
browser anew. So it is made job by job, with the loop free between them, and kept for a moment that grows with what it
has cost, `MOST_SECONDS` at most. `app.py` makes one.
"""

from __future__ import annotations

import asyncio
import time

from shoal_controller.api.page_answers import JobRow
from shoal_controller.core.overview.attention import by_attention
from shoal_controller.shell import Shell

MOST_SECONDS = 1.0
"""How old an answer may be."""

KEPT_TIMES = 5.0
"""How many times as long as it took an answer is kept: readers cost a sixth of the loop's time at most."""


class RecentOverview:
    """One API's."""

    def __init__(self) -> None:
        self._making = asyncio.Lock()
        self._rows: list[JobRow] = []
        self._of: Shell | None = None
        self._until = 0.0

    async def rows(self, shell: Shell) -> list[JobRow]:
        """Without their last hours, those that need attention first."""
        async with self._making:
            if self._of is not shell or time.monotonic() >= self._until:
                began = time.monotonic()
                self._rows = await _made(shell)
                now = time.monotonic()
                self._of, self._until = shell, now + min(MOST_SECONDS, KEPT_TIMES * (now - began))
            return self._rows


async def _made(shell: Shell) -> list[JobRow]:
    views, series = [], {}
    for name, runner in list(shell.runners.items()):
        await asyncio.sleep(0)
        views.append(runner.view())
        series[name] = runner.series
    now = shell.clock()
    return [JobRow.of(view, why, series[view.job], now) for view, why in by_attention(views, now)]
