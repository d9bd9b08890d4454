"""The local launcher where something takes long or fails for a while: a job too busy to hear, a start that hangs while
its job is replaced, a disk that is full while workers are adopted.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from integration.local_processes import SECONDS, SLEEPER, Controller, ended, spec, until, with_controller, written
from shoal_controller.core.machine.spec import JobSpec
from shoal_controller.launchers.process import Process
from shoal_controller.launchers.process_records import ProcessRecords
from shoal_protos.errors import StoreError


def test_an_end_that_a_job_was_too_busy_to_hear_is_reported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal_controller.launchers.end_reports.AGAIN_SECONDS", 0.01)

    async def scene(controller: Controller) -> None:
        controller.refusal = StoreError("job demo is too busy; try again later")
        await controller.launcher.spawn("w0", spec("exit 3"))
        first = await controller.end()
        assert await controller.end() == first
        controller.refusal = None
        await until(lambda: not controller.records())
        while not controller.exits.empty():
            assert await controller.end() == first
        await controller.launcher.spawn("w1", spec("exit 4"))
        assert (await controller.end()).worker == "w1", "the other one is reported no more"

    with_controller(tmp_path, scene)


def test_a_launcher_that_is_let_go_does_not_wait_for_a_job_that_cannot_hear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal_controller.launchers.end_reports.AGAIN_SECONDS", 3600.0)

    async def scene(controller: Controller) -> None:
        controller.refusal = StoreError("this controller does not lead")
        await controller.launcher.spawn("w0", spec("exit 3"))
        await controller.end()
        async with asyncio.timeout(SECONDS):
            await controller.launcher.release()
        assert controller.records() == ["w0.json"], "for whoever leads next"
        controller.refusal = None
        assert await controller.launcher.adopt((), spec(SLEEPER)) == {}
        assert (await controller.end()).code == 3

    with_controller(tmp_path, scene)


def test_an_end_is_reported_once_where_an_adoption_is_tried_again(tmp_path: Path) -> None:
    async def scene(controller: Controller) -> None:
        places = [await controller.launcher.spawn(worker, spec(SLEEPER)) for worker in ("w0", "w1")]
        await until(partial(written, places[1].log))
        await controller.launcher.release()
        os.kill(places[0].pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, places[0].pid, 0)
        (tmp_path / "jobs/demo/w1.json").unlink()  # as if its controller had died before it wrote one
        controller.hears.clear()
        with patch.object(ProcessRecords, "write", side_effect=OSError(errno.ENOSPC, "no space left")):
            for _ in range(3):
                with pytest.raises(OSError, match="no space left"):
                    await controller.launcher.adopt(("w1",), spec(SLEEPER))
        controller.hears.set()
        assert await controller.launcher.adopt(("w1",), spec(SLEEPER)) == {"w1": places[1]}
        assert (await controller.end()).worker == "w0"
        await controller.launcher.kill("w1", spec(SLEEPER))
        assert (await controller.end()).worker == "w1", "and w0 not once more"
        await controller.launcher.release()
        assert controller.exits.empty() and controller.records() == []

    with_controller(tmp_path, scene)


def hanging(gate: threading.Event, began: threading.Event, start: Callable[..., Process]) -> Callable[..., Process]:
    """A start that hangs once, in a file system that does not answer, say."""

    def hang(*given: Any) -> Process:
        if not began.is_set():
            began.set()
            gate.wait(SECONDS)
        return start(*given)

    return hang


def test_a_start_that_hangs_until_its_job_is_replaced_leaves_the_new_run_its_worker(tmp_path: Path) -> None:
    async def scene(controller: Controller) -> None:
        assert await controller.launcher.adopt((), spec(SLEEPER)) == {}
        gate, began, new = threading.Event(), threading.Event(), replace(spec(SLEEPER), run="run-2")
        with patch.object(Process, "start", hanging(gate, began, Process.start)):
            old = asyncio.create_task(controller.launcher.spawn("w0", spec(SLEEPER)), name="the old run's start")
            await until(began.is_set)
            old.cancel()  # its job has ended, and waits for nothing any more
            next_one = asyncio.create_task(controller.launcher.spawn("w0", new), name="the new run's start")
            await asyncio.sleep(0)
            gate.set()
            place = await next_one
            with pytest.raises(asyncio.CancelledError):
                await old
        await assert_watched(controller, new, place.pid)

    with_controller(tmp_path, scene)


def test_an_adoption_that_comes_late_spares_the_new_runs_workers(tmp_path: Path) -> None:
    """Starts do not wait for ever for an adoption that fails, which is tried on."""

    async def scene(controller: Controller) -> None:
        assert await controller.launcher.adopt((), spec(SLEEPER)) == {}
        old = [await controller.launcher.spawn(worker, spec(SLEEPER)) for worker in ("w0", "w7")]
        new = replace(spec(SLEEPER), run="run-2")
        place = await controller.launcher.spawn("w0", new)
        assert await controller.launcher.adopt((), new) == {}
        assert all(ended(one.pid) for one in old)
        assert controller.records() == ["w0.json"]
        await assert_watched(controller, new, place.pid)

    with_controller(tmp_path, scene)


async def assert_watched(controller: Controller, run: JobSpec, pid: int) -> None:
    """That this process is w0 of the run, and no end but its own is reported."""
    assert not ended(pid)
    await controller.launcher.kill("w0", run)
    assert (await controller.end()).why == f"its process {pid} was killed by SIGKILL"
    await controller.launcher.release()
    assert controller.runs == [run.run] and controller.records() == []
