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
from shoal_protos.printable import printable

from shoal_controller.cli.client import Json
from shoal_controller.cli.options import Form
from shoal_controller.cli.output import echo

WIDE = 200
"""Columns for output that is read by a program or a file: nothing is cut off."""

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


def number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


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
    unknown = "?" if job["lanes"] is None else "open"  # the job ends where its scripts do
    return f"{job['step']}/{job['max_steps'] if job['max_steps'] is not None else unknown}"


def phase(name: str) -> str:
    style = PHASE_STYLES.get(name)
    return f"[{style}]{name}[/]" if style else name


def job_lines(job: Json) -> list[str]:
    """A job in two lines: where it stands, and why."""
    stands = _stands(job)
    return [stands, f"  {escape(job['reason'])}"] if job["reason"] else [stands]


def overview_lines(row: Json) -> list[str]:
    """A job of the overview: where it stands, and the sentences that the page shows of it."""
    lines = [_stands(row["job"]), f"  {_styled(row['attention'])}"]
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
        f" ({workers['min']} to {most}), lanes {job['lanes'] or '?'}"
    )


def table_of(*columns: str, title: str | None = None, numbers: Sequence[str] = ()) -> Table:
    """A table without rows yet; the columns in `numbers` are aligned to the right."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    return table


def jobs_table(jobs: Sequence[Json]) -> RenderableType:
    if not jobs:
        return "no jobs"
    table = table_of("job", "phase", "gen", "workers", "step", "loss", numbers=("gen", "workers", "step", "loss"))
    table.add_column("reason", overflow="fold")  # the only one that gives way where the terminal is narrow
    for job in jobs:
        count = f"{job['workers']['active']}/{job['workers']['wanted']}"
        row = (job["job"], phase(job["phase"]), str(job["generation"]), count, step_of(job), number(job["loss"]))
        table.add_row(*row, escape(job["reason"].partition("\n")[0]))
    return table


def checkpoints_table(checkpoints: Sequence[Json]) -> RenderableType:
    if not checkpoints:
        return "no checkpoints"
    table = table_of("step", "gen", "size", "path", numbers=("step", "gen", "size"))
    for one in checkpoints:
        table.add_row(str(one["step"]), str(one["generation"]), amount(one["bytes"] or None), escape(one["path"]))
    return table


def tokens_table(tokens: Sequence[Json]) -> RenderableType:
    if not tokens:
        return "no tokens"
    table = table_of("name", "role", "created", "by", "expires")
    for one in tokens:
        expires = "never" if one["expires"] is None else _day(one["expires"])
        table.add_row(one["name"], one["role"], _day(one["created"]), one["created_by"], expires)
    return table


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def workers_table(workers: Sequence[Json]) -> RenderableType:
    if not workers:
        return "no workers"
    columns = ("worker", "state", "rank", "lanes", "blocks", "mirrored", "step", "step time", "memory", "host", "pid")
    table = table_of(*columns, "log", numbers=("rank", "blocks", "mirrored", "step", "step time", "memory", "pid"))
    table.add_column("does", overflow="fold")
    explained = any(map(_unsettled, workers))
    if explained:
        table.add_column("why", overflow="fold")
    for worker in workers:
        is_measured = bool(worker["memory_bytes"])  # not one that left before this controller led
        table.add_row(
            worker["worker"],
            worker["state"],
            "–" if worker["rank"] is None else str(worker["rank"]),
            ",".join(map(str, worker["lanes"])) or "–",
            str(worker["blocks"]),
            str(worker["mirrored_blocks"]),
            str(worker["step"]) if is_measured else "–",
            seconds(worker["step_seconds"] or None),
            amount(worker["memory_bytes"] or None),
            escape(worker["host"]),
            str(worker["pid"] or "–"),
            escape(worker["log"] or worker.get("pod", "")),
            escape(_in_a_line(worker["activity"]["sentence"]) if "activity" in worker else ""),
            *([escape(_unsettled(worker))] if explained else []),
        )
    return table


def _in_a_line(sentence: str) -> str:
    """A sentence, and of the traceback below it only the end: a table has a row for every worker that failed."""
    first, *below = sentence.splitlines() or [""]
    return first if not below or first.endswith(below[-1].strip()) else f"{first}: {below[-1].strip()}"


def _unsettled(worker: Json) -> str:
    """Why a worker that comes or goes is not at work."""
    return str(worker.get("why", "")) if worker["state"] in ("starting", "draining") else ""


def resizes_table(generations: Sequence[Json]) -> RenderableType:
    """Every world of a job: why it began, what it cost."""
    if not generations:
        return "no world yet"
    columns = ("gen", "reason", "workers", "from step", "pause", "promoted", "bytes in pause", "by fills")
    table = table_of(
        *columns, "from checkpoint", "steps lost", numbers=columns[:1] + columns[2:] + ("from checkpoint", "steps lost")
    )
    for world in generations:
        moved = world["bytes"]
        table.add_row(
            str(world["generation"]),
            escape(world["reason"]),
            str(world["workers"]),
            str(world["from_step"]),
            seconds(world["pause_seconds"]),
            f"{world['promoted_blocks']} blocks",
            amount(moved["pause"]),
            amount(moved["fill"]),
            amount(moved["checkpoint"]),
            str(world["lost_steps"]),
        )
    return table


def event_line(event: Json) -> str:
    """One event as a line: time, generation, what, who, the sentence."""
    when = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S.%f")[:-3]
    who = f" {event['worker']}" if event["worker"] else ""
    return f"{when} g{event['generation']} {event['kind']}{who}: {event['message']}"
