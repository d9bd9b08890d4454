"""What workers print, read from growing logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal_controller.cli.printed import MOST_BYTES, Printed, Tail, lengths


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
