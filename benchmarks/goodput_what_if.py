"""`shoal what-if` beside the real runs of goodput.py: both of the same machines, steps and starts.

    python benchmarks/goodput.py --systems shoal --json goodput.json
    python benchmarks/goodput_what_if.py goodput.json

What a step takes is fitted to the undisturbed rates of the run, by the lanes of the busiest worker; what a start takes
is the mean of the run's own. Exit status 1 where the two are further apart than the target; a run with busy cores says
nothing, as there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import linear_regression, mean
from typing import Any

from goodput import MOST_BUSY
from goodput_systems import System
from shoal_controller.simulation.paces import Paces, SimulatedJob
from shoal_controller.simulation.sweep import simulate
from shoal_controller.simulation.traces import Move, TraceWindow
from tables import show

TARGET = 0.03
"""Of goodput, to one side or the other."""
FILE_SECONDS = 1.0
"""Until the small model's checkpoint is whole, and to read it."""


def paces(rates: dict[str, float], lanes: int, start: float) -> Paces:
    """`rates`: micro-batches a second undisturbed, by the number of machines."""
    busiest = [-(-lanes // int(machines)) for machines in rates]
    lane, overhead = linear_regression(busiest, [lanes / rate for rate in rates.values()])
    return Paces(lane, max(0.0, overhead), start, write=FILE_SECONDS, restore=FILE_SECONDS)


def start_seconds(run: dict[str, Any]) -> float:
    """The mean of a run's starts; those that were cut off are taken for whole."""
    starts = sum(move["comes"] for move in run["window"]["moves"])
    return float(run["account"]["uses"]["starting"] / starts) if starts else 0.0


def window(run: dict[str, Any]) -> TraceWindow:
    """What the machines of a run saw."""
    of = run["window"]
    return TraceWindow(frozenset(of["first"]), tuple(Move(**move) for move in of["moves"]), of["seconds"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="what goodput.py --json has written")
    found = json.loads(parser.parse_args().figures.read_text())
    work, rates = found["work"], found["rates"].get("shoal", {})
    runs = [run for run in found["runs"] if run["system"] == "shoal"]
    job = SimulatedJob(
        work["machines"], work["lanes"], work["mirrors"], save_steps=System.save_every, is_on_one_host=True
    )
    rows, apart = [], list[float]()
    for run in runs:
        start = start_seconds(run)
        simulated = simulate(job, paces(rates, work["lanes"], start), window(run)).undisturbed
        difference = simulated - run["goodput"]
        is_void = run["busy"] > MOST_BUSY
        apart += [] if is_void else [difference]
        rows.append([
            f"{run['trace']} at {run['speed']:g} ×, round {run['round']}", f"{run['goodput']:.1%}", f"{simulated:.1%}",
            f"{100 * difference:+.1f}", f"{start:.1f}", f"{run['busy']:.0%}" + is_void * " **void: too busy**",
        ])  # fmt: skip
    show(
        "shoal what-if beside real runs",
        ["run", "goodput", "by what-if", "points apart", "a start, s", "cores"],
        rows,
    )
    if apart:
        print(f"on average {100 * mean(apart):+.1f} points apart; expected: {100 * TARGET:g} at most in each")
    return int(not rows or max(map(abs, apart), default=0.0) > TARGET)


if __name__ == "__main__":
    sys.exit(main())
