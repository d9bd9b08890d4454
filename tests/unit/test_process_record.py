"""The local launcher's records on disk: what is read of them, what is removed, and what is kept for another time."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import patch

import pytest
from shoal_controller.launchers.process_record import ProcessRecord, ProcessRecords

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


def test_records_are_cleared_whatever_they_say(tmp_path: Path) -> None:
    records = ProcessRecords(tmp_path)
    records.write(RECORD)
    (tmp_path / "w1.json").write_text("{")
    (tmp_path / "w0.log").write_text("a log stays")
    with patch.object(Path, "open", side_effect=OSError(errno.EIO, "input/output error")):
        records.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["w0.log"]
