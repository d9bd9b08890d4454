"""Where the seconds of a job's workers went, in one sentence. Pure.

What is counted is in `core/machine/phases/worker_seconds.py`. REST, `describe`, the page and an ElasticJob show it.
"""

from __future__ import annotations

from shoal_controller.core.machine.figures import Use
from shoal_controller.core.machine.spec import JobView

WORDS = {
    Use.MISSING: "missing",
    Use.STARTING: "starting",
    Use.STANDBY: "standing by",
    Use.PAUSED: "paused",
    Use.IDLE_LANE: "without a lane",
    Use.LOST_STEP: "in lost steps",
}
SAID_FROM = 0.005
"""The part of the wanted seconds from which on a use is named."""


def goodput_sentence(view: JobView) -> str:
    """Return `goodput 24% of the wanted workers' time; 75% missing, 1% starting`; empty before any was wanted."""
    if view.wanted_seconds <= 0 or view.started_at is None:
        return ""
    parts = {use: view.worker_seconds.get(use, 0.0) / view.wanted_seconds for use in WORDS}
    most = sorted((use for use in WORDS if parts[use] >= SAID_FROM), key=lambda use: -parts[use])
    rest = ", ".join(f"{parts[use]:.0%} {WORDS[use]}" for use in most)
    return f"goodput {view.goodput_ratio:.0%} of the wanted workers' time{f'; {rest}' if rest else ''}"
