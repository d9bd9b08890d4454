"""What idles: of a step's capacity, where lanes do not divide, and with how many lanes less of it would; and where the
seconds of a job's workers went (`core/machine/phases/worker_seconds.py` counts them). Pure.

A step takes as many rounds as its busiest worker has lanes. REST, `describe`, the page, previews, `/metrics` and
`shoal estimate` say it with these functions; docs/lanes.md has the table of how many lanes to choose.
"""

from __future__ import annotations

from shoal_protos.text import plural

from shoal_controller.core.machine.figures import Use
from shoal_controller.core.machine.spec import JobView

LANES_EACH = 5
"""Lanes for each wanted worker that docs/lanes.md recommends: the number that a sentence compares with."""
SAID_FROM = 0.05
"""The part of the capacity from which on a sentence says that it idles."""


def idle_ratio(lanes: int, workers: int) -> float:
    """Return the part of the workers' capacity, from 0 to below 1, that idles when `workers` share `lanes` evenly.
    Where a cell has several processes, `workers` are cells.
    """
    rounds = -(-lanes // workers)
    return 1 - lanes / (workers * rounds)


def idle_sentence(lanes: int, workers: int, wanted: int, unit: str = "worker") -> str:
    """Return `31 workers for 32 lanes: 2 rounds, 48% of the capacity idles; with 160 lanes 14%`, or an empty string
    where less than `SAID_FROM` of it idles. `wanted`: workers for which lanes would be chosen.
    """
    idle = idle_ratio(lanes, workers)
    if idle < SAID_FROM:
        return ""
    rounds, enough = -(-lanes // workers), LANES_EACH * max(workers, wanted)
    better = idle_ratio(enough, workers)
    instead = f"; with {enough} lanes {better:.0%}" if better < idle else ""
    sharing = f"{plural(workers, unit)} for {plural(lanes, 'lane')}: {plural(rounds, 'round')}"
    return f"{sharing}, {idle:.0%} of the capacity idles{instead}"


def idle_lane_ratio(view: JobView) -> float | None:
    """Return the part of a job's capacity that idles in its world's steps; None while no step runs."""
    sharing = _sharing(view)
    return None if sharing is None else idle_ratio(*sharing)


def idle_lanes(view: JobView) -> str:
    """Return the sentence on a job's world; empty where next to nothing idles, or no step runs."""
    sharing = _sharing(view)
    return idle_sentence_with(view, sharing[1]) if sharing is not None else ""


def idle_sentence_with(view: JobView, cells: int) -> str:
    """Return the sentence on a job with so many cells (workers, where a cell is one process)."""
    if not view.lanes or cells < 1:
        return ""
    return idle_sentence(view.lanes, cells, view.wanted_cells, "worker" if view.cell.processes == 1 else "cell")


def _sharing(view: JobView) -> tuple[int, int] | None:
    """The lanes of the world, and how many cells share them. Members without lanes do not count."""
    world = view.world
    if world is None or not world.steps or not world.trainers or view.phase.is_over:
        return None
    return world.lanes, len(world.trainers) // world.coordinates


# ---- over the job's life

WORDS = {
    Use.MISSING: "missing",
    Use.STARTING: "starting",
    Use.STANDBY: "standing by",
    Use.PAUSED: "paused",
    Use.IDLE_LANE: "without a lane",
    Use.LOST_STEP: "in lost steps",
}
USE_SAID_FROM = 0.005
"""The part of the wanted seconds from which on a use is named."""


def goodput_sentence(view: JobView) -> str:
    """Return `goodput 24% of the wanted workers' time; 75% missing, 1% starting`, with a word on the time of workers
    beyond the wanted ones, which is among these parts; empty before any was wanted.
    """
    if view.wanted_seconds <= 0 or view.started_at is None:
        return ""
    parts = {use: view.worker_seconds.get(use, 0.0) / view.wanted_seconds for use in WORDS}
    most = sorted((use for use in WORDS if parts[use] >= USE_SAID_FROM), key=lambda use: -parts[use])
    rest = ", ".join(f"{parts[use]:.0%} {WORDS[use]}" for use in most)
    beyond = sum(view.worker_seconds.values()) / view.wanted_seconds - 1
    rest += f" ({beyond:.0%} by workers beyond these)" if rest and beyond >= USE_SAID_FROM else ""
    return f"goodput {view.goodput_ratio:.0%} of the wanted workers' time{f'; {rest}' if rest else ''}"
