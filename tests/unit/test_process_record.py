"""The local launcher's records on disk: what is read of them, what is removed, and what is kept for another time."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from shoal_controller.launchers import process_records
from shoal_controller.launchers.process_records import ProcessRecord, ProcessRecords

RECORD = ProcessRecord("w0", 4711, 12.5, "boot", 0, run="run-1")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_a_record_that_cannot_be_read_at_the_moment_is_kept(tmp_path: Path, number: int) -> None:
    records = ProcessRecords(tmp_path)
    records.write(RECORD)
    failure = OSError(number, os.strerror(number))
    with patch.object(Path, "open", side_effect=failure), pytest.raises(OSError, match=os.strerror(number)):
        list(records)
    assert list(records) == [RECORD]


def test_records_in_a_folder_that_cannot_be_read_at_the_moment_are_not_taken_for_none(tmp_path: Path) -> None:
    records = ProcessRecords(tmp_path)
    records.write(RECORD)
    failure = OSError(errno.EIO, os.strerror(errno.EIO))
    with patch("os.listdir", side_effect=failure), patch("os.scandir", side_effect=failure), pytest.raises(OSError):
        list(records)
    assert list(records) == [RECORD]


@pytest.mark.parametrize("content", ["{", "[]", "", '{"worker": "w1"}', "\udcff"])
def test_a_file_that_is_no_record_is_removed_and_the_others_are_read(tmp_path: Path, content: str) -> None:
    records = ProcessRecords(tmp_path)
    records.write(RECORD)
    (tmp_path / "w1.json").write_text(content, errors="surrogateescape")
    assert list(records) == [RECORD]
    assert [path.name for path in tmp_path.iterdir()] == ["w0.json"]


def test_a_record_that_is_removed_while_others_are_read_is_no_failure(tmp_path: Path) -> None:
    records = ProcessRecords(tmp_path)
    for worker in ("w0", "w1"):
        records.write(ProcessRecord(worker, 4711, 12.5, "boot", 0))
    reading = iter(records)
    assert next(reading).worker == "w0"
    records.remove("w1")
    assert list(reading) == []
    assert list(ProcessRecords(tmp_path / "never made")) == []


@pytest.fixture
def ended(tmp_path: Path) -> ProcessRecords:
    """The logs of six workers that ended one after the other; w0 and w1 failed, w2 was killed."""
    records = ProcessRecords(tmp_path / "records", tmp_path / "logs")
    for folder in (records.folder, records.logs):
        folder.mkdir()
    for number, code in enumerate((1, -signal.SIGSEGV, -signal.SIGKILL, 0, None, -signal.SIGTERM)):
        records.note_end(replace(RECORD, worker=f"w{number}").end(code))
        log = records.log(f"w{number}")
        log.write_text("x" * 100)
        os.utime(log, (number, number))
    return records


def logs(records: ProcessRecords) -> list[str]:
    return sorted(path.name for path in records.logs.iterdir())


def test_of_workers_that_have_ended_the_last_logs_stay_and_those_of_workers_that_failed(
    ended: ProcessRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_records, "ENDED_LOGS", 2)
    ended.log("w3").with_suffix(".log.1").write_text("before")
    ended.prune(others=())
    assert logs(ended) == ["w0.log", "w1.log", "w4.log", "w5.log"]
    ended.prune(others=())
    assert len(logs(ended)) == 4


def test_logs_of_workers_that_live_are_neither_removed_nor_counted(
    ended: ProcessRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_records, "ENDED_LOGS", 1)
    ended.prune(others={"w2", "w5"})
    assert logs(ended) == ["w0.log", "w1.log", "w2.log", "w4.log", "w5.log"]


def test_beyond_so_many_bytes_the_oldest_logs_go_whatever_they_are(
    ended: ProcessRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_records, "ENDED_LOG_BYTES", 350)
    ended.log("w4").with_suffix(".log.1").write_text("x" * 100)
    ended.prune(others=())
    assert logs(ended) == ["w4.log", "w4.log.1", "w5.log"]
    assert not list(ended.folder.glob("*.failed"))


def test_records_are_cleared_whatever_they_say(tmp_path: Path) -> None:
    records = ProcessRecords(tmp_path)
    records.write(RECORD)
    (tmp_path / "w1.json").write_text("{")
    (tmp_path / "w0.log").write_text("a log stays")
    with patch.object(Path, "open", side_effect=OSError(errno.EIO, "input/output error")):
        records.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["w0.log"]
