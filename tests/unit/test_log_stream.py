"""A log whose reader has stopped: entries are lost and counted, and nobody waits."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

import pytest
import structlog
from shoal_controller.cli.display import display
from shoal_controller.process import logs
from shoal_protos import log_stream
from shoal_protos.log_stream import PATIENCE_MILLISECONDS, LogStream, is_entry
from shoal_protos.training_log import get_logger, say

PIPE_BYTES = 1 << 16
ENTRIES = 50
JOB = {
    "job": "train", "phase": "running", "generation": 1, "step": 1, "max_steps": 2, "loss": 1.0, "samples": 1,
    "reason": "", "workers": {"wanted": 1, "active": 1, "min": 1, "max": 1},
}  # fmt: skip


@pytest.fixture(name="pipe")
def unread_pipe() -> Iterator[tuple[int, int]]:
    """A pipe that is full: where it is read, and where it is written."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.write(writer, b"x" * PIPE_BYTES)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def written_to(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on standard error is written there. Returns how long it was waited for room, in milliseconds."""
    monkeypatch.setattr(sys, "stderr", open(pipe[1], "w", buffering=1, closefd=False))  # noqa: SIM115
    has_room, waited = log_stream._has_room, list[int]()

    def noted(stream: TextIO, milliseconds: int) -> bool:
        found = has_room(stream, milliseconds)
        waited.extend([milliseconds] if milliseconds and not found else [])
        return found

    monkeypatch.setattr(log_stream, "_has_room", noted)
    return waited


def test_entries_that_nobody_reads_are_lost_and_told_of_when_somebody_does(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, stream = written_to(pipe, monkeypatch), LogStream()
    for number in range(ENTRIES):
        stream.write(f"entry {number}\n")
    assert waited == [PATIENCE_MILLISECONDS]
    assert os.read(pipe[0], 2 * PIPE_BYTES) == b"x" * PIPE_BYTES
    stream.write("the next entry\n")
    stream.write("and one more\n")
    lost, *entries = os.read(pipe[0], 2 * PIPE_BYTES).decode().splitlines()
    assert json.loads(lost)["entries"] == ENTRIES and is_entry(lost)
    assert entries == ["the next entry", "and one more"]


def test_an_entry_of_which_only_the_beginning_was_taken_ends_its_line(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    written_to(pipe, monkeypatch)
    os.read(pipe[0], PIPE_BYTES)
    stream = LogStream(lambda count: f"{count} lost")
    stream.write(2 * PIPE_BYTES * "y" + "\n")
    stream.write("another one\n")
    assert set(os.read(pipe[0], 2 * PIPE_BYTES)) == {ord("y")}
    stream.write("the next entry\n")
    assert os.read(pipe[0], 2 * PIPE_BYTES) == b"\n2 lost\nthe next entry\n"


def test_a_reader_that_is_only_slow_gets_all_of_a_long_entry(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    written_to(pipe, monkeypatch)
    entry, found, slow = f"{'ä' * PIPE_BYTES}\n", bytearray(), threading.Event()

    def read() -> None:
        while len(found) < PIPE_BYTES + len(entry.encode()):
            slow.wait(0.01)
            found.extend(os.read(pipe[0], 9000))

    reading = threading.Thread(target=read)
    reading.start()
    LogStream().write(entry)
    reading.join()
    assert found[PIPE_BYTES:].decode() == entry


def test_a_worker_does_not_wait_for_whoever_reads_its_log(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = written_to(pipe, monkeypatch)
    for generation in range(ENTRIES):
        get_logger("shoal.exchange.world").info("world", generation=generation)
        say("a sentence")
    assert waited == [PATIENCE_MILLISECONDS]


def test_a_controller_does_not_wait_for_whoever_reads_its_log(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, root, level = structlog.get_config(), list(logging.getLogger().handlers), logging.getLogger().level
    waited = written_to(pipe, monkeypatch)
    try:
        logs.configure("info")
        for number in range(ENTRIES):
            structlog.get_logger("shoal.job").info("an event", number=number)
        assert waited == [PATIENCE_MILLISECONDS]
    finally:
        structlog.configure(**before)
        logging.getLogger().handlers = root
        logging.getLogger().setLevel(level)


def test_a_display_does_not_wait_for_whoever_reads_it(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    waited = written_to(pipe, monkeypatch)
    with display() as shown:
        for _ in range(ENTRIES):
            shown.tell("what rank 0 prints")
        shown.show(JOB, 1.0)
    assert waited == [PATIENCE_MILLISECONDS]
    os.read(pipe[0], 2 * PIPE_BYTES)


def test_a_display_shows_itself_on_a_terminal_and_what_is_logged_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """It handed its own lines to itself: `shoal run` showed nothing on a terminal, and its controller stood still."""
    terminal, end = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(terminal, "rb", buffering=0) as seen, os.fdopen(end, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with display() as shown:
            shown.tell("what rank 0 prints")
            shown.show(JOB, 1.0)
            sys.stderr.write("a log entry\n")
        text = b""
        while select.select([seen], [], [], 0)[0]:
            text += seen.read(4096)
    for expected in (b"what rank 0 prints", b"a log entry", JOB["job"].encode()):
        assert expected in text


def test_a_display_of_a_terminal_that_was_closed_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, end = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    stream = os.fdopen(end, "w")
    monkeypatch.setattr(sys, "stderr", stream)
    with display() as shown:
        os.close(terminal)
        shown.tell("what rank 0 prints")
        shown.show(JOB, 1.0)
    with suppress(OSError):
        stream.close()
