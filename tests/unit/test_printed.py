"""What workers print, read from growing logs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from asynchronous import asynchronous
from shoal_controller.cli import display, jobs
from shoal_controller.cli.client import BrokeOff
from shoal_controller.cli.printed import MOST_BYTES, Printed, ShownLines, Tail, lengths
from shoal_protos.errors import NoController, NotFound, PeerError, ShoalError, StoreError


def worker(log: Path, rank: int | None) -> dict[str, Any]:
    return {"worker": log.stem, "rank": rank, "log": str(log)}


def add(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


def test_only_whole_lines_are_read_and_each_once(tmp_path: Path) -> None:
    log = tmp_path / "w0.log"
    log.write_text("one\ntw")
    tail = Tail(log)
    assert list(tail.take_lines()) == ["one"]
    add(log, "o\nthree")
    assert list(tail.take_lines()) == ["two"]
    assert (list(tail.take_lines()), tail.take_rest(), tail.take_rest()) == ([], ["three"], [])


def test_a_log_that_was_cut_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "w0.log"
    log.write_text("long, long ago\n")
    tail = Tail(log)
    list(tail.take_lines())
    log.write_text("new\n")
    assert list(tail.take_lines()) == ["new"]


def test_of_a_line_that_redraws_itself_the_end_is_read_without_its_colours(tmp_path: Path) -> None:
    log = tmp_path / "w0.log"
    log.write_bytes(b"10%\r20%\r30%\r\n\x1b[1;31mred\x1b[0m\n caf\xc3\xa9 \xff\tok\n")
    assert list(Tail(log).take_lines()) == ["30%", "red", " café \N{REPLACEMENT CHARACTER}\tok"]


def test_the_lines_of_rank_0_are_shown_and_none_of_shoals_own_log(tmp_path: Path) -> None:
    first, second = tmp_path / "w0.log", tmp_path / "w1.log"
    first.write_text("of an earlier run\n")
    printed = Printed(lengths(tmp_path))
    add(
        first,
        'before the world\n{"event": "world", "level": "info", "logger": "shoal.exchange.world", "generation": 2}\n',
    )
    second.write_text("from rank 1\n")
    assert printed.take_lines([]) == []
    assert printed.take_lines([worker(first, 0), worker(second, 1)]) == ["before the world"]
    add(second, "still rank 1\n")
    assert printed.take_lines([worker(first, None), worker(second, 0)]) == []
    add(second, "now rank 0\n")
    assert printed.take_lines([worker(second, 0)]) == ["now rank 0"]
    second.unlink()
    assert printed.take_lines([worker(second, 0)]) == []


def test_a_job_that_was_over_before_anybody_was_seen_in_it_shows_what_its_script_has_printed(tmp_path: Path) -> None:
    first, second, refused = (tmp_path / f"w{number}.log" for number in range(3))
    for log in (first, second, refused):
        log.write_text(f"{log.stem} says\nthe end")
    left = [{**worker(log, None), "step": step} for log, step in ((refused, 0), (first, 6), (second, 6))]
    assert Printed({}).take_lines(left) == []
    assert Printed({}).take_last_lines(left) == ["w0 says", "the end"]
    assert Printed({}).take_last_lines(left[:1]) == []
    printed = Printed({})
    assert printed.take_lines([worker(second, 0)]) == ["w1 says"]
    assert printed.take_last_lines(left) == ["the end"]


def test_of_a_script_that_prints_faster_than_anybody_reads_the_end_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "w0.log"
    log.write_text("0123456\n" * MOST_BYTES)
    lines = Printed({}).take_lines([worker(log, 0)])
    assert lines[0] == f"… {7 * MOST_BYTES} bytes more are in {log}"
    assert lines[1:] == ["0123456"] * (MOST_BYTES // 8)


# ---- a log that is streamed by the controller


class Streamed:
    """A client whose controller gives these parts, reading by reading; an error breaks a reading off."""

    def __init__(self, *readings: list[str | ShoalError]) -> None:
        self._readings = list(readings)
        self.lines: list[str] = []
        self.rank_0 = "w0"
        self.read: list[str] = []

    async def log(self, _: str, worker: str, follow: bool) -> AsyncIterator[str]:
        self.read.append(worker)
        for part in self._readings.pop(0):
            if isinstance(part, ShoalError):
                raise part
            yield part

    async def job(self, _: str) -> dict[str, Any]:
        return {"phase": "running" if self._readings else "succeeded"}

    async def workers(self, _: str) -> list[dict[str, Any]]:
        return [{"worker": self.rank_0, "state": "active", "rank": 0, "log": "", "pod": "p"}]

    async def print(self, monkeypatch: pytest.MonkeyPatch, follow: bool = True, moves: bool = False) -> list[str]:
        """Return the lines on standard output; what goes to standard error is in `lines`."""
        shown: list[str] = []
        monkeypatch.setattr(display, "POLL_SECONDS", 0.0)
        monkeypatch.setattr(jobs, "LOOK_SECONDS", 0.0)
        monkeypatch.setattr(jobs, "echo", lambda line, err=False: (self.lines if err else shown).append(line))
        await jobs._print_stream(self, "train", {"worker": "w0"}, follow, moves)  # type: ignore[arg-type]
        return shown


@pytest.mark.parametrize("kind", [BrokeOff, NoController, PeerError, StoreError])
@asynchronous
async def test_a_log_that_breaks_off_is_read_again_past_what_was_shown(
    monkeypatch: pytest.MonkeyPatch, kind: type[ShoalError]
) -> None:
    client = Streamed(["one\ntw", kind("it is away")], [kind("it is away")], ["one\n", "two\nthree"])
    assert await client.print(monkeypatch) == ["one", "two", "three"]
    assert client.lines == ["it is away; trying again"], "once"


@pytest.mark.parametrize("kind", [BrokeOff, NoController, PeerError])
@asynchronous
async def test_a_log_that_nobody_serves_any_more_is_given_up(
    monkeypatch: pytest.MonkeyPatch, kind: type[ShoalError]
) -> None:
    away = [kind("it is away")]
    with pytest.raises(kind):
        await Streamed(["one\n", *away], *[away] * display.MOST_MISSES, ["two\n"]).print(monkeypatch)
    with pytest.raises(kind):
        await Streamed(away, ["one\n"]).print(monkeypatch, follow=False)


@asynchronous
async def test_where_the_pod_of_a_log_that_broke_off_is_gone_the_next_rank_0_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = [NotFound("the pod is gone")]
    client = Streamed(["one\n", BrokeOff("its node is away")], gone, ["two\n"])
    client.rank_0 = "w1"
    assert await client.print(monkeypatch, moves=True) == ["one", "two"]
    assert client.read == ["w0", "w0", "w1"]
    for moves, before in ((False, [["one\n", BrokeOff("its node is away")]]), (True, [])):
        with pytest.raises(NotFound, match="the pod is gone"):
            await Streamed(*before, gone, ["two\n"]).print(monkeypatch, moves=moves)


@asynchronous
async def test_of_a_log_that_was_rotated_meanwhile_all_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ["step 1\n", "step 2\nstep 3\n"]
    client = Streamed(old, ["step 2\nstep 3\n"], ["step 2\n", "step 3\nstep 4\n"])
    assert await client.print(monkeypatch) == ["step 1", "step 2", "step 3", "step 2", "step 3", "step 4"]


def test_a_log_that_still_begins_with_what_was_shown_is_shown_from_its_first_other_line_on() -> None:
    shown = ShownLines()
    assert shown.take("one\ntwo\nthree\n") == ["one", "two", "three"]
    shown.begin_again()
    assert (shown.take("one\nnew\nthr"), shown.take("ee\nlast"), shown.take_rest()) == (["new"], ["three"], ["last"])
