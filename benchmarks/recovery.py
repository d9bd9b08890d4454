"""What a lost worker costs: from `kill -9`, or SIGSTOP, to the first step of the new world.

    python benchmarks/recovery.py --sizes 1M 10M 40M --trials 7

Four workers train; one is killed 10 % into its forward, killed at a random instant of a step, or stopped with SIGSTOP.
Elapsed is until every survivor has committed the first step of the new world; `excess` is what of it is more than one
normal step of that world (the median of its next steps). The early kill is the best moment: survivors keep the lane in
flight. A frozen worker is told twice: from its suspicion, as the target is, and from SIGSTOP, which has the missed
heartbeats in it, as has what is compared with torchrun. Then a fresh worker joins, and the next trial begins in the
same job. Beside it, on the same model in the same run, torchrun's elastic restart (restart.py): of a worker as here,
and of a node. Meanwhile the job is paused. A job's first loss is a row of its own.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median

import restart
from cluster import Cluster, Job, end_cleanly
from model import SIZES
from restart import INTO_THE_STEP, STEPS_AFTER, NoWorld
from steps import done, normal_step
from tables import Figure, note, show, spread, verdict

KILLED, ANYWHERE, FROZEN = KINDS = ("killed", "killed anywhere", "frozen")
FIRST = ", the first loss of a job"
"""After the kind of that loss."""
RESTARTS = {"torchrun, a worker": False, "torchrun, a node": True}
"""Whether the agent dies too."""
TARGET_SECONDS = 0.2
"""A recovery may take one normal step and this."""
WORKERS = 4


@dataclass(frozen=True)
class Trial:
    """One loss."""

    elapsed: float
    normal: float
    noticed: float
    """To the PREPARE."""
    opened: float
    """To the OPEN."""
    pause: float
    """What the run report says: the longest wait of a survivor."""
    phases: dict[str, float]
    suspected: float = 0.0
    """From SIGSTOP to the suspicion, from which everything else counts."""
    undisturbed: float = 0.0
    """A step of the old world."""

    @property
    def excess(self) -> float:
        return self.elapsed - self.normal

    @property
    def sentence(self) -> str:
        phases = " ".join(f"{name} {seconds:.3f}" for name, seconds in self.phases.items())
        return (
            f"first step after {self.elapsed:.3f} s, a normal one takes {self.normal:.3f} s; noticed after "
            f"{self.noticed:.3f}, open after {self.opened:.3f}, pause {self.pause:.3f} ({phases})"
        )


def lose(cluster: Cluster, worker: str, number: signal.Signals, part: float, trainers: int = WORKERS - 1) -> Trial:
    """Take a worker away when this part of a step has passed, and put a fresh one in its place. `trainers`: how many
    train then.
    """
    settled = cluster.settle()
    generation = cluster.ask("GET", "")["generation"]
    rhythm = normal_step(done(cluster.steps.look(), generation, len(settled))[-STEPS_AFTER:])
    cluster.steps.next_of(worker)
    time.sleep(part * rhythm)
    began = lost = cluster.signal(worker, number)
    if number is signal.SIGSTOP:
        lost = cluster.events.wait("suspected", since=lost, worker=worker)["time"]
    prepare, opened = (cluster.events.wait(kind, since=lost) for kind in ("prepare", "open"))
    times = cluster.steps.until(
        f"{STEPS_AFTER} steps of the new world",
        lambda steps: (found := done(steps, opened["generation"], trainers))[STEPS_AFTER:] and found,
    )
    resized = cluster.events.wait("resized", since=lost)["data"]
    cluster.signal(worker, signal.SIGKILL)
    cluster.add()
    assert worker in settled
    return Trial(
        times[0] - lost, normal_step(times), prepare["time"] - lost, opened["time"] - lost, resized["pause_seconds"],
        resized["phases"], lost - began, rhythm,
    )  # fmt: skip


def shoal_trials(size: str, kinds: Sequence[str]) -> Generator[tuple[str, Trial]]:
    """For ever: one loss of each of these kinds, each time another worker."""
    instants = random.Random(size)
    with Cluster(Job(size=size, workers=WORKERS)) as cluster:
        for kind in cycle(kinds):
            members = cluster.settle(WORKERS)
            victim = members[0] if kind == FROZEN else members[-1]
            number = signal.SIGSTOP if kind == FROZEN else signal.SIGKILL
            part = instants.random() if kind == ANYWHERE else INTO_THE_STEP
            trial = lose(cluster, victim, number, part)
            cluster.settle(WORKERS)
            cluster.ask("POST", "/pause")  # it would take the cores from whoever has its turn meanwhile
            yield kind, trial
            cluster.ask("POST", "/resume")


def measure(size: str, given: argparse.Namespace) -> tuple[dict[str, list[Trial]], dict[str, str]]:
    """Interleaved: a loss of each kind asked for, a restart by torchrun of a worker and of a node, and again. With the
    trials: why there is none of a kind.
    """
    trials, restarts, first = given.trials, given.restarts, given.kinds[0] + FIRST
    found: dict[str, list[Trial]] = {kind: [] for kind in (first, *given.kinds, *RESTARTS)}
    failed: dict[str, str] = {}
    losses = shoal_trials(size, given.kinds)
    for number in range(trials):
        for _ in given.kinds:
            kind, trial = next(losses)
            found[kind if found[first] else first].append(trial)
            print(f"{size} {kind} {number + 1}/{trials}: {trial.sentence}", flush=True)
        for kind, node in RESTARTS.items() if number < restarts else ():
            try:
                elapsed, normal = restart.trial(size, WORKERS, node)
            except NoWorld as error:
                failed[kind] = str(error)
                continue
            found[kind].append(Trial(elapsed, normal, 0.0, 0.0, 0.0, {}))
            print(f"{size} {kind} {number + 1}/{restarts}: {elapsed:.1f} s, normal {normal:.3f} s", flush=True)
    losses.close()
    return found, failed


def rows(size: str, found: dict[str, list[Trial]], failed: dict[str, str]) -> list[list[str]]:
    """One row for each kind of loss. Like is compared with like: a process lost here with a worker lost there."""
    table = []
    like = [trial.elapsed for trial in found[next(iter(RESTARTS))]]
    for kind, trials in found.items():
        if not trials:
            table += [[size, kind, f"none: {failed[kind]}", *6 * "–"]] if kind in failed else []
            continue
        elapsed, excess = [t.elapsed for t in trials], [t.excess for t in trials]
        own, since_lost = kind not in RESTARTS, [t.suspected + t.elapsed for t in trials]
        table.append(
            [size, kind, spread(elapsed), spread([t.normal for t in trials]), spread(excess),
             spread([t.suspected + t.excess for t in trials]) if kind.startswith(FROZEN) else "–",
             spread([t.pause for t in trials]) if own else "–",
             verdict(median(excess), TARGET_SECONDS) if own else "–",
             f"{median(like) / median(since_lost):.1f}" if like else "–"]
        )  # fmt: skip
    return table


def note_targets(size: str, found: dict[str, list[Trial]]) -> None:
    """What README.md judges."""
    for kind, trials in found.items():
        if trials and kind not in RESTARTS:
            measured = f"a worker {kind}: to the next step, beyond a usual one, s"
            note(Figure(measured, f"{size}, {WORKERS} workers", [trial.excess for trial in trials], TARGET_SECONDS))


def main() -> None:
    end_cleanly()
    parser = argparse.ArgumentParser(description="What a lost worker costs.")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1M", "10M", "40M"])
    parser.add_argument("--trials", type=int, default=7, help="losses of each kind and size (default 7)")
    parser.add_argument("--restarts", type=int, default=3, help="restarts by torchrun for each size (default 3)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of losses")
    given = parser.parse_args()
    head = [
        "model",
        "loss",
        "to the first step, s",
        "normal step, s",
        "excess, s",
        "from SIGSTOP, s",
        "pause, s",
        "target",
        "torchrun ÷",
    ]
    lines = []
    for size in given.sizes:
        found, failed = measure(size, given)
        note_targets(size, found)
        lines += rows(size, found, failed)
    show("A lost worker: to the first step of the new world", head, lines)


if __name__ == "__main__":
    main()
