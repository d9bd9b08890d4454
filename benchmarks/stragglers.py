"""What a slow worker costs, with lanes shared by speed and with even ones: a step while all are well, slow, well again.

    python benchmarks/stragglers.py --workers 3 --lanes 12 --factor 2

Two jobs of the same steps, one after the other. A lane takes `--lane-seconds`, which its worker sleeps, as if a device
computed; from one step to another a lane of worker w1 takes `--factor` times as long. Beside each median is that of the
best whole sharing: its lanes' seconds, and what the first steps took beyond theirs. Exit status 1 where the two jobs
end with other bits.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import train
from cluster import Cluster, Job, end_cleanly
from shoal_controller.core.planning.lanes import counts_by_speed, seconds_of_step
from steps import Step
from tables import Figure, note, show

SLOW, TARGET, IN_PLACE_SECONDS = "w1", 1.1, 10.0
"""A step may take so many times that of the best whole sharing, so long after the worker became slow."""
PATIENCE_SECONDS = 600.0


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a slow worker costs.")
    parser.add_argument("--size", default="tiny", help="of the model")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--lane-seconds", type=float, default=0.1, help="more on a machine that has other work")
    parser.add_argument("--lanes", type=int, default=12)
    parser.add_argument("--mirrors", type=int, default=1)
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO")
    parser.add_argument(
        "--factor", type=float, default=2.0, help="so many times as long a lane of the slow worker takes"
    )
    parser.add_argument(
        "--between", type=int, nargs=2, default=[20, 60], help="the steps after which it is slow, and well"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--on-slow", default="", help=argparse.SUPPRESS)  # given: this is a worker
    return parser.parse_args()


def work(given: argparse.Namespace) -> None:
    """A worker's script."""
    section = {"lanes": given.lanes, "mirrors": given.mirrors, "max_steps": given.steps, "on_slow": given.on_slow}
    engine = train.initialize(given.size, section, stage=given.stage)
    begin, end = given.between

    def pace(*_: object) -> None:
        is_slow = os.environ["SHOAL_WORKER_ID"] == SLOW and begin <= engine.global_step < end
        time.sleep(given.lane_seconds * (given.factor if is_slow else 1.0))

    engine.module.register_forward_pre_hook(pace)
    train.train(engine)


def run(given: argparse.Namespace, on_slow: str) -> tuple[dict[int, list[Step]], str]:
    """The lines of each step, and the fingerprint at the end."""
    paces = ("--factor", f"{given.factor}", "--lane-seconds", f"{given.lane_seconds}", "--on-slow", on_slow)
    length = ("--steps", f"{given.steps}", "--between", *map(str, given.between))
    job = Job(
        size=given.size, workers=given.workers, lanes=given.lanes, mirrors=given.mirrors, script="stragglers.py",
        arguments=("--stage", f"{given.stage}", *paces, *length),
    )  # fmt: skip
    with Cluster(job) as cluster:
        cluster.events.until("the end", lambda all_: any(e["kind"] == "succeeded" for e in all_), PATIENCE_SECONDS)
        for event in cluster.events.all:
            if event["kind"] in ("slow", "lanes_shared"):
                print(f"    {event['message']}", flush=True)
        lines = defaultdict[int, list[Step]](list)
        for line in cluster.steps.look():
            lines[line.step].append(line)
        return dict(lines), str(cluster.ask("GET", "/report")["fingerprint"])


def medians(given: argparse.Namespace, lines: dict[int, list[Step]]) -> dict[str, float]:
    """Of a step, in each part of the job."""
    done = {step: max(line.time for line in those) for step, those in sorted(lines.items()) if step > 3}
    begin, end = given.between
    parts = defaultdict[str, list[float]](list)
    for step, later in pairwise(done):
        since = "well" if step < begin else "slow" if step < end else "well again"
        from_ = done[begin] if since == "slow" else done[end] if since == "well again" else 0.0
        early = since != "well" and done[step] < from_ + IN_PLACE_SECONDS
        parts[f"{since}, first {IN_PLACE_SECONDS:g} s" if early else since].append(done[later] - done[step])
    return {part: median(seconds) for part, seconds in parts.items()}


def lanes_of(lines: Sequence[Step]) -> str:
    return ", ".join(str(line.lanes) for line in sorted(lines, key=lambda line: line.worker))


def main() -> int:
    given = options()
    if given.on_slow:
        work(given)
        return 0
    end_cleanly()
    begin, end = given.between
    paces = [given.lane_seconds] * given.workers
    slow = [given.lane_seconds * (given.factor if number == int(SLOW[1:]) else 1) for number in range(given.workers)]
    rounds = given.stage >= 2
    seconds = {name: seconds_of_step(counts_by_speed(given.lanes, taken, rounds), taken, rounds)
               for name, taken in (("well", paces), ("slow", slow), ("well again", paces))}  # fmt: skip
    rows, fingerprints = [], set[str]()
    for name, on_slow in (("evenly", "name"), ("by speed", "share")):
        print(f"lanes {name}:", flush=True)
        lines, fingerprint = run(given, on_slow)
        found = medians(given, lines)
        fingerprints.add(fingerprint)
        beyond = found["well"] - seconds["well"]
        for part, taken in found.items():
            best = seconds[part.partition(",")[0]] + beyond
            at = {"well": begin, "slow": end, "well again": given.steps}.get(part)
            rows.append([f"lanes {name}", part, f"{taken:.3f}", f"{best:.3f}", f"{taken / best:.2f}",
                         lanes_of(lines[at]) if at else "", fingerprint[:8]])  # fmt: skip
            if name == "by speed" and part == "slow":
                settings = f"{given.workers} workers, {given.lanes} lanes, stage {given.stage}"
                note(Figure("a step with a slow worker, of the best whole sharing's", settings, [taken / best], TARGET))
    show(
        "A slow worker",
        ["job", "the slow worker is", "step, s", "best whole, s", "ratio", "lanes", "fingerprint"],
        rows,
    )
    print(f"fingerprints {'equal' if len(fingerprints) == 1 else 'DIFFER'}")
    return 0 if len(fingerprints) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
