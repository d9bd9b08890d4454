"""What people read of a job in a terminal: whole headers, numbers and sentences, however narrow it is."""

from __future__ import annotations

import asyncio
import io
import json
import os
from typing import Any, ClassVar

import forked_command
import pytest
from forked_command import SHOAL
from rich.console import Group, RenderableType
from shoal_controller.cli.display import Terminal, watch
from shoal_controller.cli.tables import (
    TextConsole,
    checkpoints_table,
    jobs_table,
    overview_lines,
    resizes_table,
    spans,
    step_of,
    tokens_table,
    workers_table,
)
from terminal import in_terminal
from tiers import check
from told_controller import Controller, answering

NARROW, MIDDLE, WIDE = (80, 24), (120, 30), (200, 50)

JOB = {
    "job": "train", "phase": "running", "generation": 12, "samples": 3_200_000,
    "workers": {"wanted": 4, "active": 3, "min": 1, "max": None}, "lanes": 8, "step": 12345, "max_steps": 100000,
    "loss": 28.928330421447754, "last_checkpoint_step": 12000,
    "reason": "3 of 4 workers train; worker w4 is starting and has not said hello yet; it takes 1.5 s as a rule",
}  # fmt: skip
SENTENCE = "runs the script: forward and backward, waits for w2 (1.4 s)"


def worker(number: int) -> dict[str, Any]:
    return {
        "worker": f"w{number}", "state": "active", "rank": number, "lanes": [2 * number, 2 * number + 1],
        "blocks": 1033, "mirrored_blocks": 1036, "step": 12345, "step_seconds": 0.123, "memory_bytes": 987_654_321,
        "host": "machine-with-a-name.example.org", "pid": 1234567 + number, "activity": {"sentence": SENTENCE},
        "log": f"/projects/of/somebody/language-model/.shoal/jobs/train/w{number}.log",
    }  # fmt: skip


def world(generation: int, reason: str, pause: float = 0.0, **more: Any) -> dict[str, Any]:
    moved = {"pause": more.pop("moved", 0), "fill": more.pop("fill", 0), "checkpoint": 0}
    return {
        "generation": generation, "workers": 3, "reason": reason, "from_step": 1000 * generation,
        "pause_seconds": pause, "phases": {}, "promoted_blocks": 0, "bytes": moved, "lost_steps": 0, **more,
    }  # fmt: skip


WORLDS = [
    world(1, "start", 0.052), world(2, "kill", 0.063, promoted_blocks=1033), world(3, "balance", fill=5_600_000),
    world(5, "scale_up"), world(6, "balance", 0.0004), world(7, "balance", 0.2), world(8, "balance", moved=100),
]  # fmt: skip


def shown(part: RenderableType, columns: int) -> list[str]:
    on = TextConsole(file=io.StringIO(), width=columns)
    on.print(part)
    return [line.rstrip() for line in on.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def heads(lines: list[str], first: str) -> list[str]:
    """Of the table whose first column has this name."""
    return next(line for line in lines if line.startswith(first)).split("  ")


LONG = {"path": "/mnt/checkpoints/of/us/" + "language-model/" * 4, "step": 12000, "generation": 7, "bytes": 10**9}
TOKEN = {"name": "n" * 12, "role": "operate", "created": 0.0, "created_by": "b" * 20, "expires": 1e9}
TABLES: dict[str, RenderableType] = {
    "workers": workers_table([worker(0), worker(1)]), "resizes": resizes_table(WORLDS), "jobs": jobs_table([JOB]),
    "checkpoints": checkpoints_table([LONG]), "tokens": tokens_table([TOKEN]),
}  # fmt: skip


@pytest.mark.parametrize("columns", [NARROW[0], MIDDLE[0], WIDE[0], 40])
@pytest.mark.parametrize("name", TABLES)
def test_no_header_and_no_cell_of_a_table_is_cut_or_broken(name: str, columns: int) -> None:
    lines = shown(TABLES[name], columns)
    assert max(map(len, lines)) <= columns and not any("…" in line for line in lines)
    whole = shown(TABLES[name], 10_000)[0].split()
    assert set(lines[0].split()) <= set(whole), "a header is a whole word"


def test_what_a_narrow_terminal_leaves_out_is_what_is_needed_least_and_sentences_go_below() -> None:
    narrow, wide = shown(TABLES["workers"], NARROW[0]), shown(TABLES["workers"], 10_000)
    assert narrow[0].split() == [
        "worker", "state", "rank", "lanes", "mirrored", "step", "step", "time", "memory", "pid",
    ]  # fmt: skip
    assert wide[0].split() == [
        "worker", "state", "rank", "lanes", "blocks", "mirrored", "step", "step", "time", "memory", "host", "pid",
        "log", "does",
    ]  # fmt: skip
    assert f"w1: {SENTENCE}" in narrow and len(narrow) == 5
    assert len(wide) == 3 and wide[2].endswith(SENTENCE) and "w1.log" in wide[2]
    assert shown(TABLES["resizes"], NARROW[0])[0].split("  ")[-1] == "steps lost"


def test_a_job_that_has_gone_beyond_its_last_step_is_not_shown_as_a_fraction() -> None:
    assert step_of({**JOB, "step": 80, "max_steps": 40}) == "80 (max_steps 40)"
    assert [step_of({**JOB, "step": 7, "max_steps": last}) for last in (7, None)] == ["7/7", "7/open"]


def test_runs_of_numbers_are_written_as_such() -> None:
    assert [spans(one) for one in ([], [3], [0, 1, 2, 5, 7, 8])] == ["–", "3", "0-2,5,7-8"]


def test_a_change_that_nobody_asked_for_and_that_cost_nothing_belongs_to_the_one_before() -> None:
    rows = [line.split() for line in shown(resizes_table(WORLDS), 10_000)[1:]]
    assert [(row[0], row[1]) for row in rows] == [
        ("1", "start"), ("2-4", "kill"), ("5-6", "scale_up"), ("7", "balance"), ("8", "balance"),
    ], "no number is left out, and a balance that has cost something is a row"  # fmt: skip
    assert "5.6 MB" in shown(resizes_table(WORLDS), 10_000)[2], "fills are counted where they belong"


@pytest.mark.parametrize("columns", [NARROW[0], MIDDLE[0], WIDE[0], 30])
def test_the_progress_is_one_line_and_has_the_step_at_any_width(columns: int) -> None:
    on = TextConsole(file=io.StringIO(), width=columns, force_terminal=True)
    with Terminal(on) as display:
        display.show(JOB, 1759.8)
        lines = shown(Group(display._live.get_renderable()), columns)
    assert "step 12345/100000" in lines[0]
    assert lines[1].startswith("━") and lines[2].startswith("3 of 4 workers train")
    if columns >= MIDDLE[0]:
        assert "loss 28.93   1760 samples/s" in lines[0] and lines[0].endswith("generation 12")


class ToldOf:
    """A client whose job is over, and has had these events."""

    def __init__(self, *events: tuple[str, str, dict[str, Any]]) -> None:
        self._events = [
            {"revision": at, "time": 0.0, "generation": 2, "kind": kind, "worker": "w1", "message": text, "data": data}
            for at, (kind, text, data) in enumerate(events, 1)
        ]

    async def job(self, _: str) -> dict[str, Any]:
        return {**JOB, "phase": "succeeded"}

    async def events(self, _: str, after: int = 0) -> list[dict[str, Any]]:
        return [one for one in self._events if one["revision"] > after]


def test_a_change_is_told_in_one_line_and_a_failure_with_the_end_of_its_traceback() -> None:
    cost = {"reason": "kill", "pause_seconds": 0.06, "pause_bytes": 0}
    free = {"reason": "balance", "pause_seconds": 0.0, "pause_bytes": 0}
    client = ToldOf(
        ("failed", "worker w1 failed:\nTraceback:\n  File x\n    raise\nKeyError: 'RANK'", {}), ("plan", "a", {}),
        ("begun", "b", {}), ("open", "c", {}), ("trains", "d", {}), ("resized", "generation 2 paused", cost),
        ("resized", "generation 3 paused", free),
    )  # fmt: skip
    lines: list[str] = []

    class Shown:
        def tell(self, line: str) -> None:
            lines.append(line.partition(" ")[2])

        def show(self, *_: object) -> None:
            pass

    asyncio.run(watch(client, "train", Shown()))  # type: ignore[arg-type]
    assert lines == [
        "g2 failed w1: worker w1 failed:\n  File x\n    raise\nKeyError: 'RANK'", "g2 resized: generation 2 paused",
    ], "all members had the change, so none is named"  # fmt: skip


def test_the_overview_fits_a_narrow_terminal() -> None:
    row = {"job": JOB, "attention": {"level": "ok", "sentence": SENTENCE}, "last_resize": None, "last_checkpoint": None}
    lines = shown(Group(*overview_lines(row), workers_table([worker(0)])), NARROW[0])
    assert max(map(len, lines)) <= NARROW[0]
    assert heads(lines, "worker")[0] == "worker"


class Told(Controller):
    """Answers each path with what REST has there."""

    answers: ClassVar[dict[str, Any]] = {
        "/v1/jobs": {"jobs": [JOB]},
        "/v1/jobs/train": JOB,
        "/v1/jobs/train/workers": {"workers": [worker(0), worker(1)]},
        "/v1/jobs/train/report": {"generations": WORLDS},
        "/v1/overview": {
            "jobs": [
                {
                    "job": JOB, "attention": {"level": "ok", "sentence": SENTENCE}, "last_resize": None,
                    "last_checkpoint": None,
                }
            ]
        },
    }  # fmt: skip

    @property
    def body(self) -> str:  # type: ignore[override]
        return json.dumps(self.answers[self.path.partition("?")[0]])


@check("starts commands in terminals")
@pytest.mark.parametrize(("size", "kind"), [(NARROW, "xterm"), (NARROW, "dumb"), (MIDDLE, "xterm"), (WIDE, "xterm")])
def test_a_job_is_described_in_a_terminal_of_any_size(size: tuple[int, int], kind: str) -> None:
    with answering(Told) as url, in_terminal([SHOAL, "describe", "train", "--url", url], size, {"TERM": kind}) as seen:
        assert seen.read_to_end() == 0
        rows = [row for row in seen.rows if row]
    assert not any("…" in row for row in rows)
    assert heads(rows, "worker")[:2] == ["worker", "state"] and heads(rows, "gen")[0] == "gen"
    joined = " ".join(rows)
    assert ("w1.log" in joined) == (size == WIDE) and "steps lost" in joined
    assert SENTENCE in joined or size == WIDE, "a sentence is broken within its column at most"


@check("starts commands in terminals")
def test_all_jobs_are_watched_in_a_narrow_terminal() -> None:
    with answering(Told) as url, in_terminal([SHOAL, "top", "--url", url]) as seen:
        seen.read_until(f"w1: {SENTENCE}")
        assert any(row.split()[:3] == ["worker", "state", "rank"] for row in seen.rows)
        seen.type(b"q")
        assert seen.read_to_end() == 0


@check("starts a command")
@pytest.mark.usefixtures("commands")
def test_in_a_pipe_nothing_is_left_out_and_a_worker_is_one_line() -> None:
    with answering(Told) as url:
        done = forked_command.shoal("workers", "train", "--url", url, env={**os.environ, "COLUMNS": "80"})
    header, *rows = done.stdout.splitlines()
    assert header.split()[-2:] == ["log", "does"] and len(rows) == 2
    assert all("w0.log" in row or "w1.log" in row for row in rows)


def test_gpus_are_a_column_where_there_are_any_and_what_one_does_not_tell_stands_beside() -> None:
    gpu = {
        "name": "NVIDIA H100 80GB HBM3", "index": 3, "use_ratio": 0.97, "memory_bytes": 65_498_251_264,
        "memory_total_bytes": 85_520_809_984, "celsius": 86.0, "throttled": ["power_cap", "heat"], "why": "",
    }  # fmt: skip
    why = "NVML has not answered for 42 s"
    mute = {**gpu, **dict.fromkeys(("use_ratio", "memory_bytes", "celsius", "throttled")), "why": why}
    on_gpus = shown(workers_table([{**worker(0), "gpu": gpu}, {**worker(1), "gpu": mute}]), 240)
    assert any("gpu" in line.split() for line in on_gpus)
    assert any("3: 97% 86°C 65.5 GB/85.5 GB power_cap heat" in line for line in on_gpus)
    assert any(why in line for line in on_gpus)
    assert not any("gpu" in line.split() for line in shown(workers_table([worker(0)]), 240))
