"""What machines that come and go cost: Shoal, torchrun elastic with DCP, and torchft on one trace of a cloud, in turns.

    make goodput                                             one round of p3 at 60, 15 and 8 ×, and of the harsh trace
    python benchmarks/goodput.py --systems shoal --speeds 60 --rounds 3 --departures notice
    python benchmarks/goodput.py --trace us-east-2a_v100_1.json --speeds 120 --least 0

Of a trace's machines four are followed, each with the trace's rate of changes; which machine a change concerns is drawn
by the round's number (shoal_controller/simulation/traces.py). A machine that comes starts a process at once, one that
goes is killed with all that runs on it (goodput_systems.py). First each system is measured undisturbed with each number
of machines. Goodput is what a system committed within the time, each step once, of what it would have at that rate:
what the *changes* cost.
Beside it stand where the machine-seconds went (goodput_account.py) and what a machine-second trained, for systems
differ in that too: Shoal and torchrun keep the batch, torchft's is smaller with fewer replicas. Real clouds are slower
by the given factor. A run with busy cores says nothing: it is marked.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import psutil
from cluster import end_cleanly
from goodput_account import USES, Account, Logged, account, first_commits
from goodput_systems import SYSTEMS, System, Work
from shoal_controller.simulation.traces import SHIPPED, BadTrace, Counts, TraceWindow, harsh, read, typical
from steps import until
from tables import show, verdict

TARGETS = {60.0: 0.90, 15.0: 0.95, 8.0: 0.97}
"""Goodput on p3, by speed."""
HARSH_SPEED = 120.0
STEPS_TO_SETTLE = 4
NOTICE_SECONDS = 120.0
"""Of a cloud, in its own time."""
FROZEN_SECONDS = 10.0
"""After which a machine that stands still is killed, here."""
MOST_BUSY = 0.8
"""Part of all cores, beyond which a run says nothing."""
DEPARTURES = ("kill", "notice", "freeze")
PAUSE_SECONDS = 0.05


class Stopped(Exception):
    """A system that does not train here: why."""


@dataclass(frozen=True)
class Run:
    """One system on one window."""

    system: str
    trace: str
    speed: float
    round: int
    window: TraceWindow
    account: Account
    committed: list[float]
    """When each new step was, seconds since the start."""
    busy: float
    """Part of all cores."""


# ---- one system


def settle(system: System, machines: int) -> None:
    """Until so many machines train in one world, a few steps long."""
    since = time.time()

    def settled() -> bool:
        if ended := system.ended():
            raise Stopped(f"the processes of machines {ended} ended by themselves\n{system.last_words()}")
        steps = [line for line in system.logged() if line.kind == "step" and line.time > since]
        last = max((line.step for line in steps), default=0)
        those = [line.machine for line in steps if line.step > last - STEPS_TO_SETTLE]
        return all(those.count(one) >= STEPS_TO_SETTLE - 1 for one in set(those)) and len(set(those)) == machines

    try:
        until(f"{machines} machines that train by {system.name}", settled, pause=PAUSE_SECONDS)
    except TimeoutError as error:
        raise Stopped(f"{error}\n{system.last_words()}") from None


def undisturbed(kind: type[System], work: Work, seconds: float) -> dict[int, float]:
    """Micro-batches a second with each number of machines, of so many seconds and some steps at least."""
    found = {}
    with kind(work) as system:
        for machine in range(work.machines):
            system.come(machine)
        for machines in range(work.machines, 0, -1):
            settle(system, machines)
            found[machines] = _rate(system, time.time(), seconds)
            system.go(machines - 1)
    return found


def _rate(system: System, began: float, seconds: float) -> float:
    def new() -> list[Logged]:
        """Once there are enough."""
        first = sorted(first_commits(system.logged()).values(), key=lambda line: line.time)
        steps = [line for line in first if line.time > began]
        return steps if time.time() > began + seconds and len(steps) > STEPS_TO_SETTLE else []

    steps = until(f"steps of {system.name}", new, pause=PAUSE_SECONDS)
    return sum(line.samples for line in steps[1:]) / (steps[-1].time - steps[0].time)


def replay(
    kind: type[System], work: Work, window: TraceWindow, departures: str, speed: float
) -> tuple[float, list[Logged]]:
    """When the window began, and what the processes logged."""
    with kind(work) as system:
        for machine in window.first:
            system.come(machine)
        if window.first:
            settle(system, len(window.first))
        began = time.time()
        for at, act, machine in actions(system, window, departures, speed):
            time.sleep(max(0.0, began + at - time.time()))
            act(machine)
        time.sleep(max(0.0, began + window.seconds - time.time()))
        return began, system.logged()


def actions(
    system: System, window: TraceWindow, departures: str, speed: float
) -> list[tuple[float, Callable[[int], None], int]]:
    """(seconds, what happens, to which machine) in order."""
    found: list[tuple[float, Callable[[int], None], int]] = []
    for number, move in enumerate(window.moves):
        back = next((m.at for m in window.moves[number:] if m.machine == move.machine and m.comes), window.seconds)
        if move.comes:
            found.append((move.at, system.come, move.machine))
        elif departures == "freeze":
            found.append((move.at, system.freeze, move.machine))
            found.append((min(back, move.at + FROZEN_SECONDS), system.go, move.machine))
        else:
            if departures == "notice":
                found.append((max(0.0, move.at - NOTICE_SECONDS / speed), system.notice, move.machine))
            found.append((move.at, system.go, move.machine))
    return sorted(found, key=lambda action: (action[0], action[1] == system.come))


# ---- all of them


def windows(given: argparse.Namespace, number: int) -> Iterator[tuple[str, float, TraceWindow]]:
    """(trace, speed, what the machines see) of a round."""
    for name, counts, speeds, least in traces(given):
        for speed in speeds:
            seconds = given.minutes * 60 * speed
            yield name, speed, typical(counts, given.machines, seconds, least, number).faster(speed)


def traces(given: argparse.Namespace) -> list[tuple[str, Counts, Sequence[float], int]]:
    """(name, trace, speeds, least machines)"""
    if given.trace:
        return [(given.trace.name, read(given.trace), given.speeds, given.least)]
    shipped = ("p3", read(SHIPPED), given.speeds, given.least)
    return [shipped] if given.without_harsh else [shipped, ("harsh", harsh(), [HARSH_SPEED], 0)]


def compare(given: argparse.Namespace) -> tuple[dict[str, dict[int, float]], list[Run]]:
    """The undisturbed rates of each system that trains here, and all runs."""
    work = Work(given.machines, given.lanes, given.size, given.work, given.mirrors)
    rates: dict[str, dict[int, float]] = {}
    for name in given.systems:
        missing = SYSTEMS[name].missing()
        try:
            rates[name] = {} if missing else undisturbed(SYSTEMS[name], work, given.calm)
        except Stopped as error:
            missing = str(error)
        if missing:
            rates.pop(name, None)
            print(f"{name} is left out: {missing}", flush=True)
            continue
        shown = ", ".join(f"{count}: {rate:.1f}" for count, rate in sorted(rates[name].items()))
        print(f"{name} undisturbed, micro-batches a second by machines: {shown}", flush=True)
    runs = []
    for number in range(1, given.rounds + 1):
        for trace, speed, window in windows(given, number):
            for name in rates:
                before = busy_seconds()
                began, log = replay(SYSTEMS[name], work, window, given.departures, speed)
                ended = began + window.seconds
                spans = [(machine, began + since, began + upto) for machine, since, upto in window.spans()]
                of = account(log, spans, rates[name], began, ended)
                commits = sorted(line.time - began for line in first_commits(log).values())
                after = busy_seconds()
                busy = (after[0] - before[0]) / (after[1] - before[1])
                committed = [at for at in commits if 0 < at <= window.seconds]
                runs.append(Run(name, trace, speed, number, window, of, committed, busy))
                print(f"round {number}, {trace} at {speed:g} ×, {name}: {of.goodput:.1%}", flush=True)
    return rates, runs


def busy_seconds() -> tuple[float, float]:
    """Seconds in which cores of the machine were busy, and seconds of all."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait, sum(times)


# ---- what is shown


def tell(rates: Mapping[str, Mapping[int, float]], runs: Sequence[Run]) -> None:
    """A table for each trace and speed."""
    for trace, speed in dict.fromkeys((run.trace, run.speed) for run in runs):
        those = [run for run in runs if (run.trace, run.speed) == (trace, speed)]
        window = those[0].window
        target = TARGETS.get(speed) if trace == "p3" else None
        rows = [row(name, [run for run in those if run.system == name], target) for name in rates]
        kills = sum(not move.comes for move in window.moves)
        show(
            f"{trace} at {speed:g} ×: {window.seconds:.0f} s, in the first round {len(window.moves)} moves, {kills} of "
            f"them departures, {window.mean():.2f} machines",
            (
                "system",
                "goodput",
                "lost, by the target",
                "micro-batches a machine-second",
                *USES,
                "longest gap, s",
                "cores",
            ),
            [one for one in rows if one],
        )


def row(name: str, runs: Sequence[Run], target: float | None) -> list[str]:
    """Of one system: means of its rounds; machine-seconds as a part of all."""
    if not runs:
        return []
    good = mean(run.account.goodput for run in runs)
    each = ", ".join(f"{run.account.goodput:.1%}" for run in runs) if len(runs) > 1 else ""
    parts = [mean(run.account.uses[use] / run.account.machine_seconds for run in runs) for use in USES]
    busy = max(run.busy for run in runs)
    judged = verdict(1 - good, round(1 - target, 4)) if target and name == "shoal" else ""
    return [
        name,
        f"{good:.1%}" + (f" ({each})" if each else ""),
        judged,
        f"{mean(run.account.committed / run.account.machine_seconds for run in runs):.2f}",
        *(f"{part:.1%}" for part in parts),
        f"{max(run.account.longest_gap for run in runs):.2f}",
        f"{busy:.0%}" + (" **void: too busy**" if busy > MOST_BUSY else ""),
    ]


def draw(runs: Sequence[Run], place: Path) -> None:
    """A picture of the first round: machines that are there, and micro-batches committed by each system."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys((run.trace, run.speed) for run in runs))
    figure, panes = pyplot.subplots(2, len(kinds), figsize=(5 * len(kinds), 5), sharex="col", squeeze=False)
    for column, (trace, speed) in enumerate(kinds):
        those = [run for run in runs if (run.trace, run.speed, run.round) == (trace, speed, 1)]
        there, rate = panes[0][column], panes[1][column]
        at = 0.0
        for count, seconds in those[0].window.counts():
            there.fill_between([at, at + seconds], [count, count], color="tab:gray", alpha=0.5)
            at += seconds
        there.set_title(f"{trace}, {speed:g} ×")
        for run in those:
            rate.plot(run.committed, range(1, len(run.committed) + 1), label=f"{run.system} {run.account.goodput:.1%}")
        rate.legend()
        rate.set_xlabel("seconds")
    panes[0][0].set_ylabel("machines")
    panes[1][0].set_ylabel("steps committed")
    figure.tight_layout()
    figure.savefig(place, dpi=120)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--trace", type=Path, help="a file of a trace; without: p3 and the harsh one")
    parser.add_argument("--without-harsh", action="store_true", help="p3 alone")
    parser.add_argument("--speeds", nargs="+", type=float, default=list(TARGETS), help="times faster than it was")
    parser.add_argument("--least", type=int, default=1, help="machines that always stay")
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=1.5, help="of each system, trace and speed")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--departures", choices=DEPARTURES, default="kill")
    parser.add_argument("--mirrors", type=int, default=2, help="of Shoal")
    parser.add_argument("--size", default="1M")
    parser.add_argument("--lanes", type=int, default=12, help="micro-batches of a step")
    parser.add_argument("--work", type=float, default=0.1, help="seconds that a micro-batch sleeps")
    parser.add_argument("--calm", type=float, default=12.0, help="seconds of each undisturbed rate")
    parser.add_argument("--json", type=Path, help="where all figures go")
    parser.add_argument("--picture", type=Path, help="where a picture goes (PNG)")
    given = parser.parse_args()
    if given.lanes % given.machines:
        parser.error(
            f"--lanes {given.lanes} over {given.machines} machines: torchft's replicas need a whole number each"
        )
    return given


def main() -> None:
    end_cleanly()
    given = options()
    try:
        rates, runs = compare(given)
    except BadTrace as error:
        raise SystemExit(f"goodput.py: {error}") from None
    tell(rates, runs)
    if given.json:
        work = {"machines": given.machines, "lanes": given.lanes, "mirrors": given.mirrors}
        figures = {"work": work, "rates": rates, "runs": [_plain(run) for run in runs]}
        given.json.write_text(json.dumps(figures, indent=1))
    if given.picture:
        draw(runs, given.picture)


def _plain(run: Run) -> dict[str, object]:
    window = {**asdict(run.window), "first": sorted(run.window.first)}
    return {**asdict(run), "window": window, "goodput": run.account.goodput}


if __name__ == "__main__":
    main()
