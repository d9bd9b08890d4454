"""The script of docs/first_job.md inside a pod of a test: as the page has it, slow until the test has done its part."""

from __future__ import annotations

import runpy
import threading
from pathlib import Path

PACE_SECONDS, SLOW_SECONDS = 0.02, 0.25
SLOW_FROM = 40
"""Near the end of the page's job."""


def run(script: str, go: str) -> None:
    """Run the file as `python` runs it. A step takes longer as long as the file `go` is not there."""
    import shoal

    step, pause, there = shoal.Engine.step, threading.Event(), Path(go)

    def paced(engine: shoal.Engine) -> None:
        step(engine)
        if not there.exists():
            pause.wait(PACE_SECONDS if engine.global_step < SLOW_FROM else SLOW_SECONDS)

    shoal.Engine.step = paced  # type: ignore[method-assign]
    runpy.run_path(script, run_name="__main__")
