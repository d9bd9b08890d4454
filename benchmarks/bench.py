"""One run of the benchmarks on one machine, and the tables of README.md from it: `make bench`.

    python benchmarks/bench.py                          all parts, half an hour on two quiet cores; writes README.md
    python benchmarks/bench.py --only memory steps      some parts; prints their tables and writes nothing

Each part runs the benchmarks' own programs, one after another, and takes from each what it notes (tables.py). A program
that fails or takes too long leaves a row that says so, and the others go on. No figure of another run is kept, and none
is chosen: a table is of one commit, one machine and one run. Imports nothing that takes a core while others measure.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

from tables import FIGURES, Cell, Figure, noted, table

HERE = Path(__file__).resolve().parent
PAGE = HERE / "README.md"
BEGIN, END = "<!-- begin: make bench -->", "<!-- end: make bench -->"
DEFAULT_MIRRORS = 1
PATIENCE = 4
"""How many times longer than expected a program may take."""
LONGEST_SECONDS = 3600.0
"""For a run: what is not done by then fails."""
ENDING_SECONDS = 30.0
"""For a program that is told to end its processes."""

TARGETS, PRICE = "targets", "price"
HEAD = ("what", "settings", "target", "figure", "")


@dataclass(frozen=True)
class Run:
    """A program with its arguments."""

    command: tuple[str, ...]
    minutes: float
    """Expected, on two quiet cores."""

    @property
    def text(self) -> str:
        return shlex.join(self.command)


@dataclass(frozen=True)
class Part:
    """Programs that belong together."""

    name: str
    runs: tuple[Run, ...]
    fills: tuple[str, ...] = (TARGETS,)
    """The tables that get what they note."""


@dataclass(frozen=True)
class Failed:
    """A program that did not come to its end."""

    run: Run
    why: str


def _run(command: str, minutes: float) -> Run:
    return Run(tuple(shlex.split(command)), minutes)


BESIDE = "--beside ddp 'fsdp2 reshard'"
PRICED = "10M, 4 workers"
PARTS = (
    Part(
        "steps",
        (
            _run(f"zero.py --size 10M --workers 2 --mirrors 1 0 --rounds 5 {BESIDE}", 3.5),
            _run("step_time.py --only tiny --tiny-workers 2 4", 1.5),
        ),
    ),
    Part("memory", (_run("memory.py --workers 4 --mirrors 1 0 2", 5.5),), fills=(TARGETS, PRICE)),
    Part(
        "price",
        tuple(
            _run(f"zero.py --stages {stage} --mirrors 1 0 2 --rounds 4 --steps 2 {BESIDE}", 2.0) for stage in (1, 2, 3)
        ),
        fills=(PRICE,),
    ),
    Part(
        "recovery",
        (
            _run("recovery.py --sizes 10M --kinds killed --trials 4 --restarts 0", 1.8),
            _run("recovery.py --sizes 10M --kinds frozen --trials 4 --restarts 0", 1.8),
        ),
    ),
    Part("changes", (_run("changes.py --sizes 10M --rounds 2", 2.5),)),
    Part("checkpoint", (_run("checkpoint.py --size 10M --rounds 2", 3.0),)),
    Part("controller", (_run("control_plane.py --workers 1000 --seconds 20 --parts many planner", 3.0),)),
    Part(
        "cells",
        (
            _run("cell_collectives.py", 0.5),
            _run("cell_plans.py --workers 1000", 0.5),
            _run("cell_step.py --by context --size 40M --rounds 3", 2.0),
            _run("cell_step.py --by pipeline --rounds 3", 1.5),
        ),
    ),
    Part("messages", (_run("messages.py --models 1.3B --workers 8", 0.5),)),
)
"""`PRICED` is what zero.py and memory.py take where they are not told otherwise."""


# ---- running


def measure(parts: Sequence[Part]) -> dict[str, list[Figure | Cell | Failed]]:
    """What each part noted, and what failed of it."""
    found: dict[str, list[Figure | Cell | Failed]] = {}
    end = time.monotonic() + LONGEST_SECONDS
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        for part in parts:
            found[part.name] = []
            for number, run in enumerate(part.runs):
                place, began = Path(folder) / f"{part.name}.{number}", time.monotonic()
                print(f"\n== {part.name}: {run.text} (about {run.minutes:g} min)", flush=True)
                why = outcome(run, place, min(60 * run.minutes * PATIENCE, end - began))
                print(f"== {part.name}: {why or 'done'}, {(time.monotonic() - began) / 60:.1f} min", flush=True)
                found[part.name] += [*noted(place), *([Failed(run, why)] if why else [])]
    return found


def outcome(run: Run, place: Path, seconds: float) -> str:
    """Why a program did not come to its end within these seconds; empty: it did. `place`: for what it notes."""
    if seconds <= 0:
        return "not begun: the hour of a run was over"
    program, *arguments = run.command
    environment = {**os.environ, FIGURES: str(place), "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        [sys.executable, str(HERE / program), *arguments], env=environment, start_new_session=True
    )
    try:
        code = started.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds / 60:.3g} minutes"
    finally:
        _end(started)
    return f"exit status {code}" if code else ""


def _end(started: subprocess.Popen[bytes]) -> None:
    """A benchmark ends its processes when it is told to; what is left of its session is killed."""
    if started.poll() is None:
        started.terminate()
        with suppress(subprocess.TimeoutExpired):
            started.wait(ENDING_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()


# ---- the tables


def targets(parts: Sequence[Part], found: Mapping[str, Sequence[Figure | Cell | Failed]]) -> str:
    """The table of figures, part by part; in each the default's come first."""
    rows: list[list[str]] = []
    for part in parts:
        of = found[part.name]
        figures = [one for one in of if isinstance(one, Figure)] if TARGETS in part.fills else []
        rows += [_row(one) for one in sorted(figures, key=lambda one: one.mirrors != DEFAULT_MIRRORS)]
        rows += [[f"`{one.run.text}`", "", "", f"**failed**: {one.why}", ""] for one in of if isinstance(one, Failed)]
    return table(HEAD, rows)


def _row(one: Figure) -> list[str]:
    mirrors = "" if one.mirrors == DEFAULT_MIRRORS else f"; mirrors {one.mirrors}"
    if one.target is None:
        return [one.measured, one.settings + mirrors, "–", one.text, ""]
    met = "met" if median(one.values) <= one.target else "**missed**"
    return [one.measured, one.settings + mirrors, f"{one.target:g}", one.text, met]


def price(cells: Iterable[Cell]) -> str:
    """The table of what a copy costs: a row for a way and its mirrors, in the order of their first cell."""
    merged: dict[tuple[str, int | None], dict[str, Cell]] = {}
    columns: dict[str, None] = {}
    for cell in cells:
        columns[cell.column] = None
        row = merged.setdefault((cell.way, cell.mirrors), {})
        before = row[cell.column].values if cell.column in row else ()
        row[cell.column] = Cell(**{**vars(cell), "values": [*before, *cell.values]})
    head = [PRICED, "mirrors", *columns]
    rows = [
        [way, "–" if mirrors is None else str(mirrors), *(_shown(row.get(column)) for column in columns)]
        for (way, mirrors), row in merged.items()
    ]
    return table(head, rows)


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    value = median(cell.values)
    text = f"{value:.{cell.digits}f}"
    return text if cell.target is None or value <= cell.target else f"**{text}, not {cell.target:g}**"


def section(parts: Sequence[Part], found: Mapping[str, Sequence[Figure | Cell | Failed]], heading: str) -> str:
    """All that is between the markers."""
    cells = [
        one for part in parts if PRICE in part.fills for one in found[part.name] if isinstance(one, Cell)
    ]  # fmt: skip
    texts = [heading, targets(parts, found)]
    if cells:
        texts += ["### The price of a copy", price(cells)]
    return "\n\n".join(texts)


def written(page: str, text: str) -> str:
    """The page with this text between its markers. Raises `ValueError` where it has not both, in order."""
    before, begin, rest = page.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    if not begin or not end:
        raise ValueError(f"README.md has no line {BEGIN!r} with a line {END!r} after it: put both back.")
    return f"{before}{begin}\n{text}\n\n{end}{after}"


# ---- the machine


def machine() -> str:
    """Commit, versions and hardware, in two lines."""
    commit = _git("rev-parse", "--short=12", "HEAD") or "unknown"
    changed = ", with uncommitted changes" if _git("status", "--porcelain", "--untracked-files=no") else ""
    versions = f"Shoal {version('shoal')}, Python {platform.python_version()}, PyTorch {version('torch')}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"commit {commit}{changed}; {versions};\n{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB"


def _git(*arguments: str) -> str:
    """What git says; empty where there is none."""
    done = subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip()


def _processor() -> str:
    processors = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", processors.read_text(), re.MULTILINE) if processors.exists() else None
    return found[1] if found else platform.machine()


def run(parts: Sequence[Part], page: Path | None) -> bool:
    """Whether all came to their end. `page`: where the tables are written; None: they are only printed."""
    load, began, head = os.getloadavg()[0], time.monotonic(), machine()  # of the code that is measured
    date = time.strftime("%Y-%m-%d", time.gmtime())
    print(f"{sum(run.minutes for part in parts for run in part.runs):g} minutes, load {load:.1f}: {head}", flush=True)
    found = measure(parts)
    heading = f"{date}, {(time.monotonic() - began) / 60:.0f} minutes, load before {load:.1f}; {head}."
    text = section(parts, found, heading)
    print(f"\n{text}", flush=True)
    if page is not None:
        page.write_text(written(page.read_text(), text))
    return not any(isinstance(one, Failed) for rows in found.values() for one in rows)


def asked(arguments: Sequence[str]) -> tuple[list[Part], Path | None]:
    """What a command line asks for, in the form of `run`."""
    parser = argparse.ArgumentParser(description="One run of the benchmarks, and the tables of README.md from it.")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, help="print the tables of some parts, and write nothing")
    only = parser.parse_args(arguments).only
    return [part for part in PARTS if not only or part.name in only], None if only else PAGE


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(0 if run(*asked(sys.argv[1:])) else 1)
