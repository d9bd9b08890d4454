"""The planner with cells: `python benchmarks/cell_plans.py`.

The same workers in cells of eight, and each by itself: CPU seconds of the plan of a start, after the loss of a worker
and of a host, when a host's workers join, and of a world where nothing is to change. A host has eight workers. The two
take turns, and the least of several counts, so that a busy machine is busy for both.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import replace

from control_plane import filled
from shoal_controller.core.planning.planner import Candidate, PlanRequest, Terms, plan_change, plan_recovery, plan_start
from shoal_protos.plan import Member, Plan, Reason
from shoal_protos.runs import Runs, every
from tables import Figure, note, show, verdict

HOST = CELL = 8
"""Workers of a host, and of a cell."""
COMMON = 8
"""Of so many blocks one is common to all coordinates."""
BLOCKS = 65_536
MOST = 1.2
"""Of the plan of so many workers by themselves."""


def terms_of(workers: int, cell: int) -> Terms:
    """A job with a lane for each worker."""
    terms = Terms(workers, BLOCKS, 1, 4, fill_blocks_per_step=4)
    if cell == 1:
        return terms
    own, common = BLOCKS - BLOCKS // COMMON, Runs(((BLOCKS - BLOCKS // COMMON, BLOCKS),))
    homes = [_part(range(own), place, cell) | _part(range(own, BLOCKS), place, cell) for place in range(cell)]
    return replace(terms, homes=tuple(homes), models=tuple(home | common for home in homes))


def _part(blocks: range, place: int, places: int) -> Runs:
    first, size = blocks.start, len(blocks)
    return Runs(((first + place * size // places, first + (place + 1) * size // places),))


def candidate(number: int, cell: int) -> Candidate:
    host = number // HOST
    member = Member(
        f"w{number}", f"i{number:013}", f"10.0.{host >> 8}.{host & 255}:{30000 + number % HOST}", number % cell
    )
    return Candidate(member, f"host{host}", number, host=f"host{host}")


class Job:
    """One job that trains, and the plans that are measured."""

    def __init__(self, workers: int, cell: int) -> None:
        terms = terms_of(workers, cell)
        begun = [candidate(number, cell) for number in range(workers)]
        start = PlanRequest(terms, 1, Reason.START)
        world = plan_start(start, begun)
        held = filled(world, begun)
        living = [replace(one, current=every(BLOCKS)) for one in held]
        middle = workers // 2 // HOST * HOST
        joined = [*held, *(candidate(number, cell) for number in range(workers, workers + HOST))]
        loss, change = PlanRequest(terms, 2, Reason.KILL), PlanRequest(terms, 2, Reason.JOIN)
        self.plans: dict[str, Callable[[], Plan]] = {
            "start": lambda: plan_start(start, begun),
            "a worker lost": lambda: plan_recovery(loss, [*living[:middle], *living[middle + 1 :]], world, 7, b""),
            "a host lost": lambda: plan_recovery(loss, [*living[:middle], *living[middle + HOST :]], world, 7, b""),
            "a host joins": lambda: plan_change(change, joined, world),
            "at rest": lambda: plan_change(change, held, world),
        }


def seconds(plan: Callable[[], Plan]) -> float:
    """CPU seconds, without the garbage collector, as in the planner's process."""
    gc.disable()
    before = time.process_time()
    plan()
    spent = time.process_time() - before
    gc.enable()
    return spent


def compare(workers: int, rounds: int) -> list[list[str]]:
    """A row for each plan of a job of so many workers."""
    alone, cells = Job(workers, 1), Job(workers, CELL)
    rows, ratios = [], list[float]()
    for change, plan in alone.plans.items():
        taken = [(seconds(plan), seconds(cells.plans[change])) for _ in range(rounds)]
        one, eight = (min(column) for column in zip(*taken, strict=True))
        ratios.append(eight / one)
        rows.append(
            [f"{workers:,}", change, f"{one:.3f}", f"{eight:.3f}", f"{eight / one:.2f} ({verdict(eight / one, MOST)})"]
        )
    most = f"the planner, of cells, of single workers: the most of {len(ratios)} plans"
    note(Figure(most, f"{workers:,} workers", [max(ratios)], MOST))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU seconds of the planner with cells and without.")
    parser.add_argument("--workers", nargs="+", type=int, default=[1_000, 8_000])
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    head = ["workers", "plan", "by themselves, CPU s", f"in cells of {CELL}, CPU s", "ratio"]
    show("Plans of cells", head, [row for workers in given.workers for row in compare(workers, given.rounds)])


if __name__ == "__main__":
    main()
