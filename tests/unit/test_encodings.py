"""Commands whose output goes where not every character can."""

from __future__ import annotations

import os
import subprocess

import pytest
from forked_command import SHOAL


@pytest.mark.parametrize(("encoding", "dash"), [("ascii", "–".encode()), ("latin-1", b"?"), ("utf-8", "–".encode())])
def test_a_table_is_printed_whatever_the_encoding_of_the_output(encoding: str, dash: bytes) -> None:
    done = subprocess.run(
        [SHOAL, "estimate", "--params", "7e9", "--workers", "4"],
        capture_output=True, timeout=30, env=os.environ | {"PYTHONIOENCODING": encoding}, check=True,
    )  # fmt: skip
    assert not done.stderr
    assert dash in done.stdout
