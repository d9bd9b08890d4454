"""`shoal what-if`: a job on a trace of machines that come and go, simulated: goodput, money, days, and what is lost.

It runs the controller's own job machine and planner on a virtual clock (`shoal_controller/simulation`). It talks to no
controller, but for `--measured`. `what_if_table.py` prints what was assumed and what came of it.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from shoal_protos.errors import UserError
from shoal_protos.memory_estimate import MOST_LANES
from shoal_protos.text import duration

from shoal_controller.cli.options import DEFAULT_URL, Form, Output, Url
from shoal_controller.core.overview.idle_lanes import LANES_EACH

if TYPE_CHECKING:
    from shoal_protos.rest import Json

    from shoal_controller.simulation.paces import Paces
    from shoal_controller.simulation.sweep import Aims
    from shoal_controller.simulation.traces import Counts, TraceWindow

MOST_WORKERS = 10_000
LEAST_STEP_SECONDS = 1e-3
"""While the world changes each step is an event of its own."""
MOST_SECONDS = 1e9
UNITS = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def _option(flag: str, metavar: str, text: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=text)


Trace = Annotated[
    str,
    typer.Argument(
        metavar="TRACE",
        help="p3, harsh, or a file: lines of milliseconds,machines or SkyPilot's JSON.",
        show_default=False,
    ),
]
Workers = Annotated[int | None, _option("--workers", "N", "Workers that are wanted.")]
Lanes = Annotated[str | None, _option("--lanes", "N,…", "Lanes. Default: 5 a worker.")]
Mirrors = Annotated[str, _option("--mirrors", "N,…", "Mirrors of each block.")]
Spares = Annotated[str, _option("--spares", "N,…", "Spares beyond the workers.")]
Least = Annotated[str, _option("--min", "N,…", "Fewest workers to train with.")]
SaveSteps = Annotated[str, _option("--save-steps", "N,…", "Steps between two checkpoints; 0: none is saved.")]
Step = Annotated[float | None, _option("--step-seconds", "S", "An undisturbed step with all workers.")]
Overhead = Annotated[
    float | None, _option("--overhead-seconds", "S", "Of it what is not forward and backward. Default: 0.")
]
Start = Annotated[
    float | None, _option("--start-seconds", "S", "From a machine to a worker that can train. Default: 60.")
]
Save = Annotated[float, _option("--save-seconds", "S", "For which training waits at a checkpoint.")]
Write = Annotated[float, _option("--write-seconds", "S", "Until it is whole, beside training.")]
Restore = Annotated[float, _option("--restore-seconds", "S", "To read it.")]
StateBytes = Annotated[float, _option("--state-bytes", "N", "Of one copy of the training state, which fills move.")]
Stage = Annotated[int, typer.Option("--stage", help="ZeRO stage.")]
Measured = Annotated[
    str | None, _option("--measured", "JOB", "Take workers, lanes and seconds from the figures of this job.")
]
Price = Annotated[float, _option("--price", "D", "Dollars of a machine an hour.")]
Steps = Annotated[int, _option("--steps", "N", "Steps that the job is to make.")]
Deadline = Annotated[str | None, _option("--deadline", "TIME", "In which they are to be made, such as 36h or 7d.")]
Budget = Annotated[float | None, _option("--budget", "D", "Dollars that they may cost.")]
From = Annotated[str, _option("--from", "TIME", "Where in the trace to begin.")]
For = Annotated[str | None, _option("--for", "TIME", "How long; the trace may repeat. Default: to its end.")]
Seed = Annotated[int, typer.Option("--seed", help="Draws which machine each change concerns.")]


async def what_if(
    trace: Trace,
    workers: Workers = None,
    lanes: Lanes = None,
    mirrors: Mirrors = "1",
    spares: Spares = "0",
    least: Least = "1",
    save_steps: SaveSteps = "0",
    step_seconds: Step = None,
    overhead_seconds: Overhead = None,
    start_seconds: Start = None,
    save_seconds: Save = 0.0,
    write_seconds: Write = 10.0,
    restore_seconds: Restore = 10.0,
    state_bytes: StateBytes = 0.0,
    stage: Stage = 1,
    measured: Measured = None,
    price: Price = 0.0,
    steps: Steps = 0,
    deadline: Deadline = None,
    budget: Budget = None,
    start_at: From = "0h",
    length: For = None,
    seed: Seed = 0,
    url: Url = DEFAULT_URL,
    output: Output = Form.TABLE,
) -> None:
    """Simulate a job on machines that come and go: goodput, money, days, and what is lost.

    The controller's own decisions, on a virtual clock. Values with commas make a grid.
    """
    from shoal_controller.cli.what_if_table import Assumed, show_tried
    from shoal_controller.simulation.paces import SimulatedJob
    from shoal_controller.simulation.sweep import grid, tries

    known: dict[str, Any] = await measured_figures(url, measured) if measured is not None else {}
    flags = {
        "workers": workers, "step_seconds": step_seconds, "overhead_seconds": overhead_seconds,
        "start_seconds": start_seconds,
    }  # fmt: skip
    known |= {name: value for name, value in flags.items() if value is not None}
    if "workers" not in known or not {"step_seconds", "lane_seconds"} & known.keys():
        raise UserError("shoal what-if needs --workers and --step-seconds, or --measured JOB.")
    _within("--workers", known["workers"], 1, MOST_WORKERS)
    _within("--stage", stage, 0, 3)
    _within("--state-bytes", state_bytes, 0, 1e18)
    aims = _aims(price, steps, deadline, budget)
    paces = _paces(known, save_seconds, write_seconds, restore_seconds)
    texts = {"lanes": lanes or str(paces.of_lanes), "mirrors": mirrors, "spares": spares, "least": least}
    values = {name: _numbers(name, text) for name, text in (texts | {"save_steps": save_steps}).items()}
    jobs = grid(SimulatedJob(known["workers"], paces.of_lanes, stage=stage, state_bytes=int(state_bytes)), values)
    machines = max(job.slots for job in jobs)
    counts, window = _window(trace, machines, (start_at, length), seed)
    assumed = Assumed(trace, counts, window, _seconds("--from", start_at), paces, known["workers"], machines, measured)
    show_tried(list(tries(jobs, paces, window, aims)), assumed, output)


# ---- what is given

NUMBERS = {
    "lanes": (1, MOST_LANES), "mirrors": (0, MOST_WORKERS), "spares": (0, MOST_WORKERS), "least": (1, MOST_WORKERS),
    "save_steps": (0, 999_999_999),
}  # fmt: skip
"""Flags with commas, with the least and the greatest of their numbers."""


def _within(flag: str, value: float, low: float, high: float) -> None:
    """Raises `UserError`."""
    if not low <= value <= high:
        raise UserError(f"{flag} is {value:g}; expected {low:g} to {high:g}.")


def _numbers(name: str, text: str) -> list[int]:
    """`32,64` → [32, 64]. Raises `UserError`."""
    parts, (low, high) = [part.strip() for part in text.split(",")], NUMBERS[name]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 and low <= int(part) <= high for part in parts):
        flag = "--min" if name == "least" else f"--{name.replace('_', '-')}"
        raise UserError(f"{flag} is {text[:80]!r}; expected whole numbers from {low} to {high}, with commas.")
    return [int(part) for part in parts]


def _seconds(flag: str, text: str) -> float:
    """`36h` → 129,600. Raises `UserError`."""
    try:
        found = float(text[:-1]) * UNITS[text[-1:]]
    except (KeyError, ValueError):
        found = math.nan
    if not 0 <= found <= MOST_SECONDS:
        raise UserError(f"{flag} is {text[:80]!r}; expected hours, days or weeks, such as 36h, 7d or 1w.")
    return found


def _aims(price: float, steps: int, deadline: str | None, budget: float | None) -> Aims:
    """Raises `UserError`."""
    from shoal_controller.simulation.sweep import Aims

    _within("--price", price, 0, MOST_SECONDS)
    _within("--steps", steps, 0, 1e12)
    _within("--budget", budget or 0.0, 0, 1e15)
    if deadline is not None and not steps:
        raise UserError("--deadline needs --steps: how many the job is to make in that time.")
    if budget is not None and not (steps and price):
        raise UserError("--budget needs --steps and --price: how many the job is to make, and what a machine costs.")
    return Aims(price, steps, _seconds("--deadline", deadline) if deadline is not None else None, budget)


def _paces(known: dict[str, Any], save: float, write: float, restore: float) -> Paces:
    """Raises `UserError`."""
    from shoal_controller.simulation.paces import Paces

    workers, step, overhead = known["workers"], known.get("step_seconds"), known.get("overhead_seconds", 0.0)
    start, of_lanes = known.get("start_seconds", 60.0), known.get("lanes", LANES_EACH * workers)
    named = {
        "--overhead-seconds": overhead, "--start-seconds": start, "--save-seconds": save, "--write-seconds": write,
        "--restore-seconds": restore,
    }  # fmt: skip
    for flag, value in named.items():
        _within(flag, value, 0, MOST_SECONDS)
    if step is None:
        lane = known["lane_seconds"]
    else:
        _within("--step-seconds", step, LEAST_STEP_SECONDS, MOST_SECONDS)
        if step <= overhead:
            raise UserError(f"--step-seconds is {step:g}; expected more than {overhead:g}, the overhead of a step.")
        lane = (step - overhead) * workers / of_lanes
    return Paces(lane, overhead, start, save=save, write=write, restore=restore, of_lanes=of_lanes)


def _window(trace: str, machines: int, texts: tuple[str, str | None], seed: int) -> tuple[Counts, TraceWindow]:
    """The trace, and what so many machines see of it. Raises `UserError`."""
    from shoal_controller.simulation import traces

    shipped = {"p3": lambda: traces.read(traces.SHIPPED), "harsh": lambda: traces.harsh(seed)}
    counts = shipped.get(trace, lambda: traces.read(Path(trace)))()
    begin, last = _seconds("--from", texts[0]), counts[-1][0]
    if begin >= last:
        raise UserError(f"--from is {texts[0]}; expected less than {last / 3600:.1f}h, the last change of the trace.")
    seconds = last - begin if texts[1] is None else _seconds("--for", texts[1])
    if seconds <= 0:
        raise UserError(f"--for is {texts[1]}; expected more.")
    whole = traces.repeated(traces.scaled(counts, machines), begin + seconds)
    found = traces.window(traces.moves(whole, seed), machines, begin, seconds, 0)
    if not (found.moves or found.first):
        raise UserError(
            f"{trace} has no machine in the {duration(seconds)} from {texts[0]} on; give another --from or --for."
        )
    return counts, found


# ---- of a job that runs


async def measured_figures(url: str, job: str) -> dict[str, Any]:
    """Return `workers`, `lanes`, `lane_seconds`, `overhead_seconds`, and `start_seconds` where a start was seen.

    Raises `UserError` where nothing is measured of the job yet, or several processes train a lane of it together.
    """
    from shoal_controller.cli.runs import client_of

    async with client_of(url, job) as client:
        shown, report = await client.job(job), await client.report(job)
        members = await client.workers(job)
    return figures_of(shown, report, members)


def figures_of(job: Json, report: Json, members: list[Json]) -> dict[str, Any]:
    """The same from what REST answers."""
    step, lanes = report["step_seconds_median"], job["lanes"]
    timed = [member["lane_seconds"] for member in members if member.get("lane_seconds")]
    if not step or not lanes or not timed:
        missing = "no step" if not step or not lanes else "no lane of a living worker"
        raise UserError(
            f"job {job['job']} has no figures to go by: {missing} has been timed; wait for some steps, or give "
            "--workers and --step-seconds."
        )
    if "cell" in job:
        raise UserError(
            f"job {job['job']} trains in cells of {job['cell']['processes']} processes, and what-if simulates workers "
            "that train by themselves; give --workers and --step-seconds, a cell in place of a worker."
        )
    wanted = job["workers"]["wanted"]
    training = sum(bool(member["lanes"]) for member in members) or wanted
    lane = median(timed)
    overhead = max(0.0, step - lane * -(-lanes // training))
    starts = report["worker_seconds"].get("starting", 0.0)
    began = sum(member["step"] >= 0 for member in members)
    known = {"workers": wanted, "lanes": lanes, "overhead_seconds": overhead, "lane_seconds": lane}
    return known | ({"start_seconds": starts / began} if starts and began else {})
