"""How late the event loop is: a timer of a quarter of a second, and by how much it came too late.

What holds the loop up holds up every heartbeat and every answer. Made by `server.py`; `metrics.py` shows `recent.most`.
"""

from __future__ import annotations

import asyncio

from shoal_controller.recent_most import RecentMost

LOOK_SECONDS = 0.25


class LoopLag:
    """`run` as a task."""

    def __init__(self) -> None:
        self.recent = RecentMost()

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)
            self.recent.see(max(0.0, loop.time() - due))
