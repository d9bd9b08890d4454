"""The training side's log where it cannot be written: its lines are lost, and nobody fails."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO

import pytest
from crew import Crew, Task, undisturbed
from shoal.logs import get_logger, say

TASK = Task({"max_steps": 6})


def closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


def unread_pipe() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", buffering=1)


@pytest.fixture(params=["full", "closed", "pipe", "none"])
def unwritable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Standard error as it is when a disk is full, when it was closed, when nobody reads it, when there is none."""
    made = {"full": lambda: open("/dev/full", "w", buffering=1), "closed": closed, "pipe": unread_pipe}  # noqa: PTH123, SIM115
    stream = made[request.param]() if request.param in made else None
    monkeypatch.setattr(sys, "stderr", stream)
    yield
    if stream is not None:
        try:
            stream.close()
        except OSError:
            assert stream.closed


def test_a_line_that_cannot_be_written_is_lost(unwritable: None) -> None:
    get_logger("shoal.world").info("world", generation=2, rank=0)
    say("a sentence")


def test_what_can_be_written_is(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger("shoal.world").info("world", generation=2)
    say("a sentence")
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("logger='shoal.world' event='world' generation=2")
    assert said[1:] == ["shoal: a sentence"]


@pytest.mark.parametrize("unwritable", ["full"], indirect=True)
def test_a_kill_costs_no_survivor_whose_standard_error_is_full(unwritable: None) -> None:
    with Crew("abc", TASK) as crew:
        crew.train_to(2)
        crew.kill("b")
        assert crew.finish() == undisturbed(TASK)
