"""What planned changes cost: a join with the joiner ready, a drain, scaling down; and how long a joiner takes.

    python benchmarks/changes.py --sizes 1M 10M 40M --rounds 7

Three workers and four lanes under a real controller with the local launcher. A round scales to four, drains one worker
(the launcher starts another in its place) and scales back to three: a joiner shares the cores with three others, so
that there are four processes in all. `pause` is the run report's: the longest of any
member from the end of its hand-out to its first lane in the new world. `longer` is how much longer than its neighbours
the one step was during which the change began, seen from outside. A joiner's time runs from the start of its process
to its first lane in a committed step.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

from cluster import Cluster, Job, end_cleanly
from model import SIZES
from steps import Step
from tables import show, spread, verdict

WORKERS, LANES = 3, 4
MOST_PAUSE_SECONDS = 0.1
MOST_JOINER_SECONDS = 6.0
MOST_SLOWER = 1.1
NEIGHBOURS = 5
"""Steps on either side that say how long a step usually is."""


class Figures:
    """All that is measured of one model."""

    def __init__(self) -> None:
        self.pauses: dict[str, list[float]] = defaultdict(list)
        self.longer: dict[str, list[float]] = defaultdict(list)
        self.joiners: list[float] = []
        self.slower: list[float] = []


def measure(size: str, rounds: int) -> Figures:
    figures = Figures()
    with Cluster(Job(size=size, workers=WORKERS, lanes=LANES, launcher="local")) as cluster:
        cluster.settle(WORKERS)
        for number in range(rounds):
            first = cluster.report()[-1]["generation"]
            cluster.steps.next_of(cluster.settle(WORKERS, steps=NEIGHBOURS)[0])
            welcome(cluster, figures, partial(cluster.scale, WORKERS + 1))
            leaver = cluster.settle(WORKERS + 1, steps=NEIGHBOURS)[0]
            welcome(cluster, figures, partial(cluster.drain, leaver))
            cluster.scale(WORKERS)
            cluster.settle(WORKERS, steps=NEIGHBOURS)
            note_changes(cluster, figures, first)
            print(f"{size} round {number + 1}/{rounds}: joiners {figures.joiners[-2:]}", flush=True)
    return figures


def welcome(cluster: Cluster, figures: Figures, ask: Callable[[], None]) -> None:
    """Ask for what brings a joiner, and follow it until it is a member like any other."""
    known = {event["worker"] for event in cluster.events.all if event["kind"] == "starting"}
    ask()
    starting = cluster.events.until(
        "a joiner",
        lambda events: next((e for e in events if e["kind"] == "starting" and e["worker"] not in known), {}),
    )
    joiner = starting["worker"]
    first = cluster.steps.until(
        f"a lane of {joiner}", lambda steps: next((s for s in steps if s.worker == joiner and s.lanes), None)
    )
    assert first is not None
    figures.joiners.append(first.time - starting["time"])
    cluster.settle(WORKERS + 1, steps=NEIGHBOURS)
    slower(cluster, figures, joiner, starting["time"])


def slower(cluster: Cluster, figures: Figures, joiner: str, started: float) -> None:
    """The others' steps from the joiner's joining to the end of its fills, against those before its process began."""
    joined = next(
        event for event in cluster.events.all if event["kind"] == "begun" and f" {joiner} " in event["message"]
    )
    later = [e for e in cluster.events.all if e["kind"] == "begun" and e["time"] > joined["time"]]
    until = later[-1]["time"] if later else joined["time"]
    before, during = [], []
    for steps in by_worker(cluster.steps.look()).values():
        for one, two in pairwise(steps):
            if two.time <= started:
                before.append(two.time - one.time)
            elif one.time >= joined["time"] and two.time <= until:
                during.append(two.time - one.time)
    if during:
        recent = before[-4 * WORKERS * NEIGHBOURS :]
        figures.slower.append(median(during) / median(recent))


def by_worker(steps: Sequence[Step]) -> dict[str, list[Step]]:
    found: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        found[step.worker].append(step)
    return found


def note_changes(cluster: Cluster, figures: Figures, since: int) -> None:
    """Every planned change after a generation: its pause, and by how much one step was longer."""
    steps = by_worker(cluster.steps.look())
    for world in cluster.report():
        if world["generation"] > since:
            reason = {"scale_up": "join"}.get(world["reason"], world["reason"])
            figures.pauses[reason].append(world["pause_seconds"])
            figures.longer[reason] += [extra for one in steps.values() for extra in longer(one, world["generation"])]


def longer(steps: Sequence[Step], generation: int) -> list[float]:
    """By how much the step in which a generation began was longer than its neighbours on a worker."""
    at = next((i for i, step in enumerate(steps) if step.generation == generation), 0)
    around = steps[max(0, at - 1 - NEIGHBOURS) : at + NEIGHBOURS + 1]
    if at == 0 or steps[at].step != steps[at - 1].step + 1 or len(around) < NEIGHBOURS:
        return []
    usual = median(two.time - one.time for one, two in pairwise(around))
    return [steps[at].time - steps[at - 1].time - usual]


def main() -> None:
    end_cleanly()
    parser = argparse.ArgumentParser(description="What planned changes cost.")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1M", "10M", "40M"])
    parser.add_argument("--rounds", type=int, default=7, help="of each size (default 7)")
    given = parser.parse_args()
    changes, joiners = [], []
    for size in given.sizes:
        figures = measure(size, given.rounds)
        for reason, pauses in sorted(figures.pauses.items()):
            judged = verdict(median(pauses), MOST_PAUSE_SECONDS)
            changes.append([size, reason, spread(pauses), judged, spread(figures.longer[reason])])
        took, rate = figures.joiners, figures.slower
        joiners.append(
            [size, spread(took, 2), verdict(median(took), MOST_JOINER_SECONDS), spread(rate, 2),
             verdict(median(rate), MOST_SLOWER) if rate else "–"]
        )  # fmt: skip
    show("Planned changes", ["model", "change", "pause, s", "target", "step longer by, s"], changes)
    head = ["model", "start to first lane, s", "target", "others' steps while filled", "target"]
    show("A joiner", head, joiners)


if __name__ == "__main__":
    main()
