"""`shoal doctor`: whether this machine has what Shoal needs; each line says what was found, expected, and what to do.

It looks in processes of their own (`shoal_controller.doctor`, `shoal.doctor`) and ends what does not answer in time, so
that nothing hangs, and a library that crashes is a line like any other.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from shoal_protos.finding import Finding, Verdict, from_line

from shoal_controller.cli.endings import DONE, FAILED
from shoal_controller.cli.options import DEFAULT_URL, Data, Form, Grpc, Http, Output, Store
from shoal_controller.cli.output import echo

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from rich.console import RenderableType

CHECK_SECONDS = 30.0
"""How long a check may take; torch is imported in the first one."""
DEATH_SECONDS = 2.0


class Purpose(StrEnum):
    """What a machine is for."""

    RUN = "run"
    CONTROLLER = "controller"
    WORKER = "worker"
    CLIENT = "client"


OF_MACHINE = ("python", "packages", "clock")
CONTROLLER_SIDE = {
    Purpose.RUN: (*OF_MACHINE, "shared memory", "open files", "ports", "store", "token", "controller"),
    Purpose.CONTROLLER: (*OF_MACHINE, "open files", "ports", "store", "token", "controller"),
    Purpose.WORKER: (*OF_MACHINE, "shared memory", "open files", "session"),
    Purpose.CLIENT: (*OF_MACHINE, "token", "controller"),
}
OF_CONFIG = ("config", "checkpoints")
TRAINING_SIDE = ("torch", "devices", "cells", "backend", *OF_CONFIG)
TRAINS = (Purpose.RUN, Purpose.WORKER)
EXTRAS = {
    Purpose.RUN: ["shoal[controller]", "shoal[worker]"],
    Purpose.CONTROLLER: ["shoal[controller]"],
    Purpose.WORKER: ["shoal[worker]"],
    Purpose.CLIENT: [],
}

For = Annotated[Purpose, typer.Option("--for", help="What this machine is for.")]
Config = typer.Option("--config", metavar="FILE", help="Training config to check, with its checkpoint path.")
Checkpoint = typer.Option("--checkpoint", metavar="PATH", help="Folder or URL of checkpoints to try.")
MaybeUrl = typer.Option("--url", envvar="SHOAL_URL", metavar="URL", help="REST address of a controller to ask.")


async def doctor(
    purpose: For = Purpose.RUN,
    config: Annotated[Path | None, Config] = None,
    checkpoint: Annotated[str | None, Checkpoint] = None,
    http: Http = None,
    grpc: Grpc = None,
    store: Store = None,
    data: Data = None,
    url: Annotated[str | None, MaybeUrl] = None,
    output: Output = Form.TABLE,
) -> int:
    """Check whether this machine has what Shoal needs.

    Each line says what was found, what was expected, and what to do. Nothing is changed or left behind. Exit status 1:
    a check failed.
    """
    from shoal_controller.cli.serve import interrupts
    from shoal_controller.cli.tables import show, written

    given = {
        "extras": EXTRAS[purpose], "config": str(config or ""), "checkpoint": checkpoint or "",
        "http": http or "127.0.0.1:7070", "grpc": grpc or "127.0.0.1:7071", "store": store or "embedded:.shoal",
        "data": str(data or ".shoal"), "url": url or DEFAULT_URL, "is_url_given": url is not None,
    }  # fmt: skip
    with interrupts() as signals, signals.ending_this():  # who looks is ended too, which may wait for a pipe for ever
        found = [finding async for finding in findings(purpose, given)]
    if output is Form.TABLE:
        show(_table(found), _verdict(found))
    else:
        echo(written({"checks": [_row(one) for one in found]}, output))
    return FAILED if any(one.verdict is Verdict.FAILED for one in found) else DONE


async def findings(purpose: Purpose, given: dict[str, Any]) -> AsyncIterator[Finding]:
    """All of them, in their order."""
    async for finding in looked("shoal_controller.doctor", CONTROLLER_SIDE[purpose], given):
        yield finding
    named = OF_CONFIG if given["config"] or given["checkpoint"] else ()
    async for finding in looked("shoal.doctor", TRAINING_SIDE if purpose in TRAINS else named, given):
        yield finding


async def looked(module: str, checks: Sequence[str], given: dict[str, Any]) -> AsyncIterator[Finding]:
    """What a process finds; another one goes on after a check at which it hung or died."""
    left = list(checks)
    while left:
        async for finding in _of_one_process(module, tuple(left), given):
            left.remove(finding.check)
            yield finding


async def _of_one_process(module: str, checks: Sequence[str], given: dict[str, Any]) -> AsyncIterator[Finding]:
    """Findings up to the end, or to the check that has not ended."""
    import asyncio
    from asyncio.subprocess import PIPE

    arguments = (sys.executable, "-m", module, ",".join(checks), json.dumps(given))
    process = await asyncio.create_subprocess_exec(*arguments, stdout=PIPE, stderr=PIPE, start_new_session=True)
    try:
        for check in checks:
            try:
                yield await _next(process)
            except _NoFinding as error:
                yield Finding(check, Verdict.FAILED, str(error), "a check that ends", error.todo)
                return
    finally:
        await _end(process)


class _NoFinding(Exception):
    """A process that looks has nothing more to say."""

    def __init__(self, sentence: str, todo: str) -> None:
        super().__init__(sentence)
        self.todo = todo


async def _next(process: Process) -> Finding:
    """The next finding of a process. Raises `_NoFinding`."""
    import asyncio

    assert process.stdout and process.stderr
    line = b""
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            line = await process.stdout.readline()
            if line:
                return from_line(line.decode())
            last_words = (await process.stderr.read()).decode(errors="replace").strip().rpartition("\n")[2]
            status = await process.wait()
    except TimeoutError:
        todo = "look for a mount or a server that hangs"
        raise _NoFinding(f"it has not ended for {CHECK_SECONDS:g} s", todo) from None
    except (ValueError, TypeError, KeyError):
        raise _NoFinding(f"it printed {line[:80]!r}", "look at what prints when Python starts") from None
    ended = f"signal {-status}" if status < 0 else f"status {status}"
    why = f": {last_words[:300]}" if last_words else ""
    raise _NoFinding(f"it ended with {ended}{why}", "install shoal and its packages anew")


async def _end(process: Process) -> None:
    """Kill it with all that it has started. One that the kernel does not let go is left."""
    import asyncio

    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(TimeoutError):
        async with asyncio.timeout(DEATH_SECONDS):
            await process.communicate()


def _row(one: Finding) -> dict[str, str]:
    """A finding as JSON."""
    shown = {"check": one.check, "status": one.verdict.value, "found": one.found, "expected": one.expected}
    return {**shown, "todo": one.todo}


MARKS = {Verdict.OK: "[green]✓[/]", Verdict.WARNING: "[yellow]![/]", Verdict.FAILED: "[red]✗[/]"}


def _table(found: Sequence[Finding]) -> RenderableType:
    """A line for each; more lines where the terminal is narrow, or something is to be done."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in found:
        expected = f"[dim](expected: {escape(one.expected)})[/]" if one.expected else ""
        todo = f"\n→ {escape(one.todo)}" if one.todo and one.verdict is not Verdict.OK else ""
        table.add_row(MARKS[one.verdict], one.check, f"{escape(one.found)} {expected}{todo}")
    return table


def _verdict(found: Sequence[Finding]) -> str:
    failed = [one.check for one in found if one.verdict is Verdict.FAILED]
    warned = [one.check for one in found if one.verdict is Verdict.WARNING]
    if failed:
        return f"[red]{len(failed)} failed[/]: {', '.join(failed)}"
    return "all is well" + (f"; to be looked at: {', '.join(warned)}" if warned else "")
