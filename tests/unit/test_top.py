"""`shoal top` while jobs come and go, and while no controller answers."""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from asynchronous import asynchronous
from forked_command import SHOAL
from rich.console import Console, RenderableType
from shoal_controller.cli.tables import workers_table
from shoal_controller.cli.top import _screen
from shoal_protos.errors import NoController, NotFound, Refused, ShoalError, StoreError
from told_controller import Controller

JOB = {
    "job": "kept", "phase": "running", "generation": 3, "workers": {"wanted": 3, "active": 2, "min": 1, "max": None},
    "lanes": 8, "step": 7, "max_steps": 100, "loss": 1.25, "samples": 56, "last_checkpoint_step": None, "reason": "",
}  # fmt: skip

ROW = {
    "attention": {"level": "watch", "sentence": "trains: step 7 of 100; [b]2[/b] blocks"}, "last_checkpoint": None,
    "last_resize": {"sentence": "w2 was lost: training paused for 63 ms"},
}  # fmt: skip

LEAVES_THE_SCREEN, SHOWS_THE_CURSOR = b"\x1b[?1049l", b"\x1b[?25h"


class Answers:
    """A client of a controller that forgets jobs, or fails."""

    def __init__(self, *gone: str, fails: ShoalError | None = None) -> None:
        self._gone, self._fails = gone, fails

    async def overview(self) -> list[dict[str, Any]]:
        if self._fails is not None:
            raise self._fails
        return [{**ROW, "job": {**JOB, "job": name}} for name in ("first", "kept", "last")]

    async def workers(self, job: str) -> list[dict[str, Any]]:
        if job in self._gone:
            raise NotFound(f"there is no job {job}")
        return []


def printed(shown: RenderableType) -> str:
    screen = Console(width=120, file=io.StringIO())
    screen.print(shown)
    return screen.file.getvalue()  # type: ignore[attr-defined]


@asynchronous
async def test_a_job_that_is_forgotten_meanwhile_is_left_out() -> None:
    shown = printed(await _screen(Answers("first", "last")))  # type: ignore[arg-type]
    assert "kept running" in shown and "first running" not in shown and "last running" not in shown


@asynchronous
async def test_a_job_is_shown_with_the_sentences_of_the_page() -> None:
    shown = printed(await _screen(Answers("first", "last")))  # type: ignore[arg-type]
    assert "trains: step 7 of 100; [b]2[/b] blocks\n" in shown
    assert "last change: w2 was lost: training paused for 63 ms\n" in shown and "last checkpoint" not in shown


@pytest.mark.parametrize("error", [NoController("no controller answers at http://[::1]:1"), StoreError("it is away")])
@asynchronous
async def test_while_no_controller_answers_it_says_so_and_tries_again(error: ShoalError) -> None:
    shown = printed(await _screen(Answers(fails=error)))  # type: ignore[arg-type]
    assert shown.strip() == f"{error}; trying again"


@asynchronous
async def test_what_will_not_change_ends_it() -> None:
    with pytest.raises(Refused):
        await _screen(Answers(fails=Refused("another token")))  # type: ignore[arg-type]


def test_a_worker_that_failed_is_a_row_without_its_traceback() -> None:
    worker = {
        "worker": "w0", "host": "here", "pid": 7, "state": "lost", "rank": None, "lanes": [], "blocks": 0,
        "mirrored_blocks": 0, "step": 7, "step_seconds": 0.5, "memory_bytes": 1000, "log": None,
        "activity": {"sentence": "its process 7 ended with status 1\nTraceback (most …):\n  File x\nKeyError: 'RANK'"},
    }  # fmt: skip
    console = Console(width=300, file=io.StringIO())
    console.print(workers_table([worker]))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "its process 7 ended with status 1: KeyError: 'RANK'" in printed and "Traceback" not in printed
    worker["activity"] = {"sentence": "KeyError: 'RANK'\nTraceback (most …):\n  File x\nKeyError: 'RANK'"}
    console.print(workers_table([worker]))
    assert console.file.getvalue().removeprefix(printed).count("KeyError") == 1  # type: ignore[attr-defined]


def test_of_a_worker_that_was_not_heard_the_table_claims_no_step_and_no_memory() -> None:
    """After a controller's restart it would have gone back to step 0."""
    worker = {
        "worker": "w0", "host": "here", "pid": 7, "state": "lost", "rank": None, "lanes": [], "blocks": 0,
        "mirrored_blocks": 0, "step": 0, "step_seconds": 0.0, "memory_bytes": 0, "log": None,
    }  # fmt: skip
    console = Console(width=300, file=io.StringIO())
    console.print(workers_table([worker]))
    row = console.file.getvalue().splitlines()[-1].split()  # type: ignore[attr-defined]
    assert row[:9] == ["w0", "lost", "–", "–", "0", "0", "–", "–", "–"]


def read_until(terminal: int, *parts: bytes) -> None:
    seen = b""
    while not all(part in seen for part in parts):
        seen += os.read(terminal, 4096)


def test_q_leaves_top(controller: str) -> None:
    Controller.body = json.dumps({"jobs": []})
    with top_on_a_terminal(controller, "xterm") as (top, terminal):
        read_until(terminal, b"no jobs")
        os.write(terminal, b"q")
        assert top.wait(timeout=100) == 0


def test_sigterm_ends_top_with_the_terminal_as_it_was(controller: str) -> None:
    Controller.body = json.dumps({"jobs": []})
    with top_on_a_terminal(controller, "xterm") as (top, terminal):
        read_until(terminal, b"no jobs")
        top.terminate()
        read_until(terminal, LEAVES_THE_SCREEN, SHOWS_THE_CURSOR)
        assert top.wait(timeout=100) == 0


def test_top_shows_jobs_once_on_a_terminal_without_a_cursor(controller: str) -> None:
    Controller.body = json.dumps({"jobs": []})
    with top_on_a_terminal(controller, "dumb") as (top, terminal):
        assert top.wait(timeout=100) == 0
        assert os.read(terminal, 4096).split() == [b"no", b"jobs"]


@contextmanager
def top_on_a_terminal(url: str, kind: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`shoal top`, and its terminal's other end."""
    ours, theirs = os.openpty()
    command, environment = [SHOAL, "top", "--url", url], {**os.environ, "TERM": kind}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as top:
        try:
            yield top, ours
        finally:
            top.kill()
            os.close(theirs)
            os.close(ours)
