"""Commands whose output goes where not every character can, or nothing at all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from forked_command import SHOAL


@pytest.mark.parametrize(("encoding", "dash"), [("ascii", "–".encode()), ("latin-1", b"?"), ("utf-8", "–".encode())])
def test_a_table_is_printed_whatever_the_encoding_of_the_output(encoding: str, dash: bytes) -> None:
    done = subprocess.run(
        [SHOAL, "estimate", "--params", "7e9", "--workers", "4"],
        capture_output=True, timeout=100, env=os.environ | {"PYTHONIOENCODING": encoding}, check=True,
    )  # fmt: skip
    assert not done.stderr
    assert dash in done.stdout


@pytest.mark.parametrize("arguments", [["estimate", "--params", "7e9", "--workers", "4"], ["--help"]])
def test_an_output_that_takes_no_more_is_a_sentence(arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([SHOAL, *arguments], stdout=full, stderr=subprocess.PIPE, timeout=100)
    assert done.stderr == b"shoal: the output cannot be written: No space left on device\n"
    assert done.returncode == 1


def test_a_command_whose_output_is_closed_ends_as_well_as_any() -> None:
    done = subprocess.run(
        ["sh", "-c", '"$0" estimate --params 7e9 --workers 4 >&-', SHOAL], stderr=subprocess.PIPE, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, b"")
