"""What planned changes cost: a join with the joiner ready, a drain, scaling down; and how long a joiner takes.

    python benchmarks/changes.py --sizes 1M 10M 40M --rounds 7

Three workers and a lane more under a real controller with the local launcher. A round adds one, drains one
(the launcher starts another in its place) and scales back to three: a joiner shares the cores with three others, so
that there are four processes in all (`--workers 4`: five). `longest` is seen from outside and judged: how much longer
than usual the longest step of any member was, of the one in which the change began and the next ones, in which fills
and first touches fall. Usual is the slower of the worlds before and after; where a joiner comes, its start is on the
same cores as the world before, of which "others' steps while it starts" tells. `none` is the same of as many steps in
which nothing changed: by so much the longest of them is longer by chance. `pause` is what members report: the longest
from the end of a hand-out to the first lane in the new world. A joiner's time runs from the start of its process to its
first lane in a committed step. In between, `ready` runs from the plan that names it, for which it has warmed up, until
that lane begins: a group is built, the others' step under way is made, and the world begins. `first step` runs from
there on: as long as a step of so many processes on these cores. CPU seconds are what its process had computed by then,
which other work on the machine changes little.
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
from tables import Figure, note, show, spread, verdict

MOST_LONGER_SECONDS = 0.1
MOST_JOINER_SECONDS = 3.0
MOST_READY_SECONDS = 0.5
MOST_SLOWER = 1.1
NEIGHBOURS = 5
"""Steps on either side that say how long a step usually is."""
AFFECTED = 3
"""Steps from the one in which a change begins that may be longer by it."""


class Figures:
    """All that is measured of one model."""

    def __init__(self) -> None:
        self.pauses: dict[str, list[float]] = defaultdict(list)
        self.longest: dict[str, list[float]] = defaultdict(list)
        self.joiners: list[float] = []
        self.ready: list[float] = []
        self.first_steps: list[float] = []
        self.cpu: list[float] = []
        """Of a joiner: seconds from its start to its first lane's step, from its being ready until that lane began, and
        from there on; and of CPU by then."""
        self.slower: list[float] = []
        self.slower_at_start: list[float] = []
        """The others' steps to those before: while a joiner is filled, and from its start until it joins."""


def measure(size: str, rounds: int, workers: int) -> Figures:
    figures = Figures()
    with Cluster(Job(size=size, workers=workers, lanes=workers + 1, launcher="local")) as cluster:
        cluster.settle(workers)
        for number in range(rounds):
            first = cluster.report()[-1]["generation"]
            cluster.steps.next_of(cluster.settle(workers, steps=2 * (AFFECTED + NEIGHBOURS))[0])
            welcome(cluster, figures, partial(cluster.scale, workers + 1))
            leaver = cluster.settle(workers + 1, steps=NEIGHBOURS)[0]
            welcome(cluster, figures, partial(cluster.drain, leaver))
            cluster.scale(workers)
            cluster.settle(workers, steps=AFFECTED + NEIGHBOURS)
            note_changes(cluster, figures, first)
            print(
                f"{size} round {number + 1}/{rounds}: joiners {figures.joiners[-2:]}, ready {figures.ready[-2:]}, "
                f"CPU {figures.cpu[-2:]}",
                flush=True,
            )
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
    ready = next(e for e in cluster.events.all if e["kind"] == "plan" and f"add {joiner}" in e["message"])
    figures.joiners.append(first.time - starting["time"])
    figures.ready.append(first.began - ready["time"])
    figures.first_steps.append(first.time - first.began)
    figures.cpu.append(first.cpu)
    cluster.settle(cluster.job.lanes, steps=AFFECTED + NEIGHBOURS)
    slower(cluster, figures, joiner, starting["time"])


def slower(cluster: Cluster, figures: Figures, joiner: str, started: float) -> None:
    """The others' steps until the joiner joins, and from then to the end of its fills, against those before it all."""
    joined = next(
        event for event in cluster.events.all if event["kind"] == "begun" and f" {joiner} " in event["message"]
    )
    later = [e for e in cluster.events.all if e["kind"] == "begun" and e["time"] > joined["time"]]
    until = later[-1]["time"] if later else joined["time"]
    before: list[tuple[float, float]] = []
    starting: list[float] = []
    during: list[float] = []
    for worker, steps in by_worker(cluster.steps.look()).items():
        for one, two in pairwise(steps) if worker != joiner else ():
            if two.time <= started:
                before.append((two.time, two.time - one.time))
            elif one.time >= started and two.time <= joined["time"]:
                starting.append(two.time - one.time)
            elif one.time >= joined["time"] and two.time <= until:
                during.append(two.time - one.time)
    recent = median(seconds for _, seconds in sorted(before)[-4 * cluster.job.workers * NEIGHBOURS :])
    figures.slower += [median(during) / recent] if during else []
    figures.slower_at_start += [median(starting) / recent] if starting else []


def by_worker(steps: Sequence[Step]) -> dict[str, list[Step]]:
    found: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        found[step.worker].append(step)
    return found


def note_changes(cluster: Cluster, figures: Figures, since: int) -> None:
    """Every planned change after a generation: its pause, and by how much the longest step was longer; and the latter
    of steps of that generation in which nothing changed.
    """
    steps = by_worker(cluster.steps.look())
    extra = [more for one in steps.values() for more in longer(one, _quiet(one, since))]
    figures.longest["none"] += [max(extra)] if extra else []
    for world in cluster.report():
        if world["generation"] > since:
            reason = "join" if world["reason"] == "scale_up" else world["reason"]
            figures.pauses[reason].append(world["pause_seconds"])
            extra = [more for one in steps.values() for more in longer(one, _beginning(one, world["generation"]))]
            figures.longest[reason] += [max(extra)] if extra else []


def _first(steps: Sequence[Step], generation: int) -> int | None:
    """The first step of a generation; None: there is none."""
    return next((at for at, step in enumerate(steps) if step.generation == generation), None)


def _beginning(steps: Sequence[Step], generation: int) -> int:
    """The first step of a generation on a worker that was there before; 0: there is none."""
    at = _first(steps, generation)
    return at if at and steps[at].step == steps[at - 1].step + 1 else 0


def _quiet(steps: Sequence[Step], generation: int) -> int:
    """A step of a generation as soon after its beginning as that cannot be felt; 0: there is none."""
    at = _first(steps, generation)
    return at + AFFECTED + NEIGHBOURS + 1 if at is not None else 0


def longer(steps: Sequence[Step], at: int) -> list[float]:
    """By how much some steps from a place on were longer than usual there. `at`: 0: nowhere."""
    took = [two.time - one.time for one, two in pairwise(steps)]
    before, after = took[max(0, at - 1 - NEIGHBOURS) : at - 1], took[at - 1 + AFFECTED : at - 1 + AFFECTED + NEIGHBOURS]
    if at < 2 or not after:
        return []
    usual = max(median(before), median(after))
    return [seconds - usual for seconds in took[at - 1 : at - 1 + AFFECTED]]


def note_targets(size: str, workers: int, figures: Figures) -> None:
    """What README.md judges."""
    settings = f"{size}, {workers} workers"
    for reason, longest in sorted(figures.longest.items()):
        if longest:
            measured = f"the longest step of a change, longer than usual by, s: {reason}"
            note(Figure(measured, settings, longest, MOST_LONGER_SECONDS if reason != "none" else None))
    note(
        Figure(
            "a joiner, from its start to its first lane, s", settings, figures.joiners, MOST_JOINER_SECONDS, digits=2
        )
    )
    measured = "a joiner, from its being ready until its first lane begins, s"
    note(Figure(measured, settings, figures.ready, MOST_READY_SECONDS, digits=2))
    note(Figure("a joiner, its first step from there on, s", settings, figures.first_steps, None, digits=2))
    note(Figure("a joiner, CPU to its first lane, s", settings, figures.cpu, None, digits=2))
    if figures.slower:
        measured = "the others' steps while a joiner is filled, of those before"
        note(Figure(measured, settings, figures.slower, MOST_SLOWER, digits=2))


def main() -> None:
    end_cleanly()
    parser = argparse.ArgumentParser(description="What planned changes cost.")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1M", "10M", "40M"])
    parser.add_argument("--rounds", type=int, default=7, help="of each size (default 7)")
    parser.add_argument("--workers", type=int, default=3, help="trainers beside a joiner (default 3)")
    given = parser.parse_args()
    changes, joiners = [], []
    for size in given.sizes:
        figures = measure(size, given.rounds, given.workers)
        note_targets(size, given.workers, figures)
        for reason, longest in sorted(figures.longest.items()):
            judged = verdict(median(longest), MOST_LONGER_SECONDS) if longest and reason != "none" else "–"
            changes.append([size, reason, spread(longest), judged, spread(figures.pauses[reason])])
        took, rate = figures.joiners, figures.slower
        joiners.append(
            [size, spread(took, 2), verdict(median(took), MOST_JOINER_SECONDS), spread(figures.ready, 2),
             verdict(median(figures.ready), MOST_READY_SECONDS), spread(figures.first_steps, 2),
             spread(figures.cpu, 2), spread(rate, 2),
             verdict(median(rate), MOST_SLOWER) if rate else "–", spread(figures.slower_at_start, 2)]
        )  # fmt: skip
    show("Planned changes", ["model", "change", "longest step longer by, s", "target", "pause, s"], changes)
    head = [
        "model", "start to first lane, s", "target", "ready to its begin, s", "target", "first step, s", "CPU, s",
        "others' steps while filled", "target", "while it starts",
    ]  # fmt: skip
    show("A joiner", head, joiners)


if __name__ == "__main__":
    main()
