"""The launcher of local processes on a disk that takes its time: only those wait who need what lies there."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from integration.local_processes import (
    SECONDS,
    SLEEPER,
    Controller,
    ended,
    spec,
    until,
    with_controller,
)
from shoal_controller.launchers.process_records import ProcessRecord, ProcessRecords


class SlowDisk:
    """Each write of a record waits until `free`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.free, write = threading.Event(), threading.Event(), ProcessRecords.write

        def slow(records: ProcessRecords, record: ProcessRecord) -> None:
            self.begun.set()
            assert self.free.wait(SECONDS)
            write(records, record)

        monkeypatch.setattr(ProcessRecords, "write", slow)


def test_a_slow_disk_holds_up_nobody_but_those_who_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)

    async def scene(controller: Controller) -> None:
        spawning = asyncio.create_task(controller.launcher.spawn("w0", spec("exit 3")), name="spawn")
        await until(disk.begun.is_set)
        assert not spawning.done()
        disk.free.set()
        assert (await spawning).pid
        assert (await controller.end()).code == 3
        disk.begun.clear()
        disk.free.clear()
        ending = asyncio.create_task(controller.launcher.spawn("w1", spec(SLEEPER)), name="spawn")
        await until(disk.begun.is_set)
        killing = asyncio.create_task(controller.launcher.kill_all("demo"), name="kill")
        disk.free.set()
        await killing
        assert ended((await ending).pid), "what was being started too"
        assert (await controller.end()).code == -9

    with_controller(tmp_path, scene)


def test_a_process_is_watched_though_nobody_waits_for_its_start_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)

    async def scene(controller: Controller) -> None:
        spawning = asyncio.create_task(controller.launcher.spawn("w0", spec("exit 3")), name="spawn")
        await until(disk.begun.is_set)
        spawning.cancel()
        await asyncio.sleep(0)
        disk.free.set()
        with pytest.raises(asyncio.CancelledError):
            await spawning
        assert (await controller.end()).code == 3

    with_controller(tmp_path, scene)
