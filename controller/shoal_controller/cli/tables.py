"""What the command prints: jobs, workers, resizes and events as tables and lines. From JSON to rich, nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from shoal_protos.log_stream import LogStream
from shoal_protos.rest import Json
from shoal_protos.runs import Runs
from shoal_protos.shape import DIMENSIONS, Shape
from shoal_protos.text import number, printable

from shoal_controller.cli.fitted import Column, Fitted
from shoal_controller.cli.options import Form
from shoal_controller.cli.output import echo
from shoal_controller.core.machine.event_kind import EventKind

WIDE = 10_000
"""Width of output to a pipe or a file, where columns are not left out and lines not broken."""

FREE_SECONDS = 0.001
"""A shorter pause counts as none."""

PHASE_STYLES = {"running": "green", "succeeded": "green", "failed": "red", "stalled": "red", "resizing": "yellow"}
LEVEL_STYLES = {"act": "red", "watch": "yellow"}


class TextConsole(Console):
    """A console that shows every string, also in cells of tables, as text."""

    def __init__(self, **given: Any) -> None:
        super().__init__(highlight=False, emoji=False, **given)

    def render_str(self, text: str, **given: Any) -> Text:
        return super().render_str(printable(text), **given)


def console() -> Console:
    """A console as wide as the terminal, or wide enough for everything where there is none."""
    return TextConsole(file=sys.stdout, width=None if sys.stdout.isatty() else WIDE)


def display_console() -> Console:
    """The same on standard error, for a process with a controller in it: what a stopped pager or terminal does not take
    is not shown, and holds up nothing.
    """
    stream = _Shown(lambda count: f"… {count} times nothing could be shown here: nobody read it", _behind_display)
    width = None if stream.isatty() else WIDE
    return TextConsole(file=stream, width=width)


def _behind_display() -> TextIO | None:
    """Standard error itself: while something is redrawn rich stands in its place, and would wait for itself."""
    return getattr(sys.stderr, "rich_proxied_file", sys.stderr)


class _Shown(LogStream):
    """A terminal that was closed and a file on a full disk take nothing either, and end nothing."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            return super().write(text)
        return len(text)


def is_redrawn(stream: TextIO, on: Console) -> bool:
    """Whether what is shown there can be replaced; a terminal without a cursor (TERM=dumb) would show nothing."""
    return stream.isatty() and not on.is_dumb_terminal


def show(*parts: RenderableType) -> None:
    """Print to standard output."""
    out = console()
    for part in parts:
        out.print(part)


def listed(name: str, rows: Sequence[Json], table: Callable[[Sequence[Json]], RenderableType], form: Form) -> None:
    """Print a list as a table, or as REST answers it."""
    if form is Form.TABLE:
        show(table(rows))
    else:
        echo(written({name: list(rows)}, form))


def written(document: Json, form: Form) -> str:
    """Format an object as JSON on one line, or as YAML."""
    if form is Form.JSON:
        return json.dumps(document, ensure_ascii=False)
    import yaml

    document = json.loads(json.dumps(document))  # YAML writes plain dicts only
    text = str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
    if printable(text) != text:  # escaped by YAML itself, which would read our escapes as text
        text = str(yaml.safe_dump(document, sort_keys=False))
    return text.rstrip("\n")


def changed(job: Json) -> None:
    """What a command that changed a job says."""
    show(*job_lines(job))


def amount(size: int | None) -> str:
    """Bytes for people."""
    if size is None:
        return "–"
    if size < 1000:
        return f"{size} B"
    power = min(4, (len(str(size)) - 1) // 3)
    return f"{size / 1000**power:.1f} {' kMGT'[power]}B"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def step_of(job: Json) -> str:
    last = job["max_steps"]
    if last is None:
        return f"{job['step']}/{'?' if job['lanes'] is None else 'open'}"  # the job ends where its scripts do
    if job["step"] > last:  # it was resumed from a checkpoint beyond
        return f"{job['step']} (max_steps {last})"
    return f"{job['step']}/{last}"


def phase(name: str) -> str:
    style = PHASE_STYLES.get(name)
    return f"[{style}]{name}[/]" if style else name


def job_lines(job: Json) -> list[str]:
    """Return a job in a few lines: its state, its reported numbers, what idles, its reason."""
    lines = ", ".join(reported(job)), job.get("goodput"), job.get("idle_lanes"), job["reason"]
    return [_stands(job), *(f"  {escape(line)}" for line in lines if line)]


def described_lines(job: Json) -> list[str]:
    """Return a job in a few lines, with its owner where it has one."""
    return [*job_lines(job), *([f"  owner {escape(job['owner'])}"] if job.get("owner") else [])]


def reported(job: Json) -> list[str]:
    """Return the reported numbers, each with its name."""
    return [f"{name} {number(value)}" for name, value in job.get("reports", {}).items()]


def overview_lines(row: Json) -> list[str]:
    """A job of the overview: where it stands, and the sentences that the page shows of it."""
    lines = [_stands(row["job"]), f"  {_styled(row['attention'])}"]
    if reports := ", ".join(reported(row["job"])):
        lines.append(f"  {escape(reports)}")
    for title, name in (("last change", "last_resize"), ("last checkpoint", "last_checkpoint")):
        if row[name] is not None:
            lines.append(f"  [dim]{title}:[/] {escape(row[name]['sentence'])}")
    return lines


def _styled(attention: Json) -> str:
    style, sentence = LEVEL_STYLES.get(attention["level"]), escape(attention["sentence"])
    return f"[{style}]{sentence}[/]" if style else sentence


def _stands(job: Json) -> str:
    workers = job["workers"]
    most = "lanes" if workers["max"] is None else workers["max"]
    return (
        f"[bold]{job['job']}[/] {phase(job['phase'])}: step {step_of(job)}, loss {number(job['loss'])}, "
        f"generation {job['generation']}, workers {workers['active']} of {workers['wanted']}"
        f"{_spares(workers)} ({workers['min']} to {most}), lanes {job['lanes'] or '?'}{_in_cells(job)}"
    )


def _spares(workers: Json) -> str:
    """How many spares it has, of how many; empty where it is to have none."""
    wanted = workers.get("spares", 0)
    return f" and {workers['active_spares']} of {wanted} spares" if wanted else ""


def _in_cells(job: Json) -> str:
    """How many cells train, and what a cell is; empty where a cell is one process."""
    if "cell" not in job:
        return ""
    return f", cells {job['cells']['full']} of {job['cells']['wanted']} ({_shape(job)})"


def _shape(job: Json) -> Shape:
    return Shape(**{name: job["cell"][name] for name in DIMENSIONS})


def table_of(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """Return a table without rows, for at most 80 columns; the columns in `numbers` are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    return table


def jobs_table(jobs: Sequence[Json]) -> RenderableType:
    if not jobs:
        return "no jobs"
    counts = [job["workers"] for job in jobs]
    columns = [
        Column("job", [job["job"] for job in jobs]),
        Column("phase", [phase(job["phase"]) for job in jobs]),
        Column("gen", [str(job["generation"]) for job in jobs], 2, is_number=True),
        Column("workers", [f"{one['active']}/{one['wanted']}" for one in counts], 1, is_number=True),
        Column("step", [step_of(job) for job in jobs], is_number=True),
        Column("loss", [number(job["loss"]) for job in jobs], is_number=True),
    ]
    return Fitted(columns, [Column("reason", [escape(job["reason"].partition("\n")[0]) for job in jobs])])


def checkpoints_table(checkpoints: Sequence[Json]) -> RenderableType:
    if not checkpoints:
        return "no checkpoints"
    columns = [
        Column("step", [str(one["step"]) for one in checkpoints], is_number=True),
        Column("gen", [str(one["generation"]) for one in checkpoints], 1, is_number=True),
        Column("size", [amount(one["bytes"] or None) for one in checkpoints], is_number=True),
    ]
    return Fitted(columns, [Column("path", [escape(one["path"]) for one in checkpoints])])


def tokens_table(tokens: Sequence[Json]) -> RenderableType:
    if not tokens:
        return "no tokens"
    return Fitted(
        [
            Column("name", [one["name"] for one in tokens]),
            Column("role", [one["role"] for one in tokens]),
            Column("created", [_day(one["created"]) for one in tokens], 1),
            Column("by", [one["created_by"] for one in tokens], 2),
            Column("expires", ["never" if one["expires"] is None else _day(one["expires"]) for one in tokens]),
        ]
    )


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def workers_table(workers: Sequence[Json]) -> RenderableType:
    if not workers:
        return "no workers"
    is_known = [bool(worker["memory_bytes"]) for worker in workers]  # not one that left before this controller led
    ranks = ["–" if worker["rank"] is None else str(worker["rank"]) for worker in workers]
    steps = [str(worker["step"]) if known else "–" for worker, known in zip(workers, is_known, strict=True)]
    gpus = [_gpu(worker.get("gpu")) for worker in workers]
    takes = [seconds(worker.get("lane_seconds")) for worker in workers]
    columns = [
        Column("worker", [worker["worker"] for worker in workers]),
        Column("state", [worker["state"] for worker in workers]),
        Column("rank", ranks, is_number=True),
        *([Column("cell", [_seat(worker) for worker in workers])] if "cell" in workers[0] else []),
        Column("lanes", [spans(worker["lanes"]) for worker in workers], 1),
        Column("blocks", [str(worker["blocks"]) for worker in workers], 6, is_number=True),
        Column("mirrored", [str(worker["mirrored_blocks"]) for worker in workers], 5, is_number=True),
        Column("step", steps, is_number=True),
        Column("step time", [seconds(worker["step_seconds"] or None) for worker in workers], 2, is_number=True),
        *([Column("a lane", takes, 2, is_number=True)] if any("lane_seconds" in worker for worker in workers) else []),
        Column("memory", [amount(worker["memory_bytes"] or None) for worker in workers], 3, is_number=True),
        *([Column("gpu", gpus, 2)] if any("gpu" in worker for worker in workers) else []),
        Column("host", [escape(worker["host"]) for worker in workers], 7),
        Column("pid", [str(worker["pid"] or "–") for worker in workers], 4, is_number=True),
        Column("log", [escape(worker["log"] or worker.get("pod", "")) for worker in workers], 8),
    ]
    does = [_in_a_line(worker["activity"]["sentence"]) if "activity" in worker else "" for worker in workers]
    sentences = {"does": does, "why": [_unsettled(worker) for worker in workers]}
    return Fitted(columns, [Column(name, list(map(escape, cells))) for name, cells in sentences.items() if any(cells)])


def _gpu(gpu: Json | None) -> str:
    """What a worker's GPU is at: `3: 97% 64°C 71 of 80 GB heat`; `–`: it has none, or it tells nothing."""
    if gpu is None:
        return "–"
    figures = [
        f"{gpu['use_ratio']:.0%}" if gpu["use_ratio"] is not None else "",
        f"{gpu['celsius']:.0f}°C" if gpu["celsius"] is not None else "",
        f"{amount(gpu['memory_bytes'])}/{amount(gpu['memory_total_bytes'])}" if gpu["memory_bytes"] else "",
        *(gpu["throttled"] or ()),
    ]
    return " ".join([f"{gpu['index']}:", *filter(None, figures)]) if any(figures) else "–"


def _seat(worker: Json) -> str:
    """The number of a worker's cell and its place in it: `2:t1p0`; `–` stands for what it has not."""
    return f"{'–' if worker['cell'] is None else worker['cell']}:{_place(worker['coordinate'] or {}) or '–'}"


def cells_table(job: Json, workers: Sequence[Json]) -> RenderableType:
    """Who trains together: a row for each cell, a column for each coordinate; below them who is spare there."""
    shape = _shape(job)
    places = [shape.place(coordinate) for coordinate in shape.coordinates]
    at: dict[tuple[int | None, str], list[str]] = {}
    for worker in workers:
        if worker["coordinate"] is not None and worker["rank"] is not None:
            at.setdefault((worker["cell"], _place(worker["coordinate"])), []).append(worker["worker"])
    found = {cell for cell, _ in at}
    rows = [*sorted(cell for cell in found if cell is not None), *({None} & found)]
    columns = [Column("cell", ["spare" if row is None else str(row) for row in rows])]
    for spare, place in enumerate(map(_place, places)):
        columns.append(Column(place, [", ".join(at.get((row, place), ())) or "–" for row in rows], spare))
    return Fitted(columns)


def _place(coordinate: Json) -> str:
    return "".join(f"{dimension[0]}{index}" for dimension, index in coordinate.items())


def spans(numbers: Sequence[int]) -> str:
    """Return whole numbers as runs: 0-3,6."""
    found = Runs.of(numbers).spans
    return ",".join(str(a) if b - a == 1 else f"{a}-{b - 1}" for a, b in found) or "–"


def _in_a_line(sentence: str) -> str:
    """A sentence, and of the traceback below it only the end: a table has a row for every worker that failed."""
    first, *below = sentence.splitlines() or [""]
    return first if not below or first.endswith(below[-1].strip()) else f"{first}: {below[-1].strip()}"


def _unsettled(worker: Json) -> str:
    """Why a worker that comes or goes is not at work; of the others, why its GPU tells nothing."""
    why = str(worker.get("why", "")) if worker["state"] in ("starting", "draining") else ""
    return why or str((worker.get("gpu") or {}).get("why", ""))


def resizes_table(generations: Sequence[Json]) -> RenderableType:
    """Every world of a job: why it began, what it cost."""
    if not generations:
        return "no world yet"
    worlds = [_merged(rows) for rows in _changes(generations)]
    ends = [world["generation"] - 1 for world in worlds[1:]] + [worlds[-1]["last_generation"]]
    names = [spans(range(world["generation"], end + 1)) for world, end in zip(worlds, ends, strict=True)]
    moved = [world["bytes"] for world in worlds]
    return Fitted(
        [
            Column("gen", names),
            Column("reason", [escape(world["reason"]) for world in worlds]),
            Column("workers", [str(world["workers"]) for world in worlds], 1, is_number=True),
            Column("from step", [str(world["from_step"]) for world in worlds], 2, is_number=True),
            Column("pause", [seconds(world["pause_seconds"]) for world in worlds], is_number=True),
            Column("promoted", [str(world["promoted_blocks"]) for world in worlds], 4, is_number=True),
            Column("in pause", [amount(one["pause"]) for one in moved], 3, is_number=True),
            Column("by fills", [amount(one["fill"]) for one in moved], 5, is_number=True),
            Column("checkpoint", [amount(one["checkpoint"]) for one in moved], 6, is_number=True),
            Column("steps lost", [str(world["lost_steps"]) for world in worlds], is_number=True),
        ]
    )


def _changes(generations: Sequence[Json]) -> list[list[Json]]:
    """Return groups of worlds: each automatic change without cost is grouped with the change before it."""
    changes: list[list[Json]] = []
    for world in generations:
        if changes and is_free(world["reason"], world["pause_seconds"], world["bytes"]["pause"], world["lost_steps"]):
            changes[-1].append(world)
        else:
            changes.append([world])
    return changes


def is_free(reason: str, pause_seconds: float, pause_bytes: int, lost_steps: int = 0) -> bool:
    """Whether a change of the world was automatic and cost nothing."""
    return reason == "balance" and pause_seconds < FREE_SECONDS and not pause_bytes and not lost_steps


def _merged(rows: Sequence[Json]) -> Json:
    """Return one row for a group of worlds; `last_generation` is the last world's."""
    moved = {name: sum(row["bytes"][name] for row in rows) for name in rows[0]["bytes"]}
    promoted = sum(row["promoted_blocks"] for row in rows)
    return {**rows[0], "promoted_blocks": promoted, "bytes": moved, "last_generation": rows[-1]["generation"]}


def event_line(event: Json) -> str:
    """One event as a line: time, generation, what, who, the sentence."""
    when = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S.%f")[:-3]
    is_of_one = event["worker"] and event["kind"] != EventKind.RESIZED  # which every member did
    who = f" {event['worker']}" if is_of_one else ""
    return f"{when} g{event['generation']} {event['kind']}{who}: {event['message']}"
