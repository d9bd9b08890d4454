"""`shoal demo` as a user starts it, whole: the one test that shows everything at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SHOAL = str(Path(sys.executable).with_name("shoal"))
STEPS = 60 if (os.cpu_count() or 1) < 4 else 90
"""Enough for two workers to start one after the other: on more cores steps are faster, and starts are not."""


def demo(folder: Path, *arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """The command at its end; where that does not come in time, an AssertionError with what it has printed."""
    command = [SHOAL, "demo", *arguments]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        printed = (late.stdout or b"") + (late.stderr or b"")
        raise AssertionError(f"it has not ended after {seconds:.0f} s:\n{printed.decode()}") from None


@pytest.mark.timeout(600)
def test_the_demo_ends_with_the_same_bits(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 20_000)
    done = demo(tmp_path, "--steps", str(STEPS), "--text", str(text), seconds=570)
    assert done.returncode == 0, done.stdout + done.stderr
    at = re.match(r"http=(127\.0\.0\.1:\d+) grpc=127\.0\.0\.1:\d+\n", done.stdout)
    assert at is not None and f"page: http://{at[1]}" in done.stderr
    assert "The same bits" in done.stdout
    first, second = re.findall(r"\b[0-9a-f]{64}\b", done.stdout)
    assert first == second
    rows = (line for line in done.stdout.splitlines() if re.match(r"\d[\d-]* +[a-z_]+ ", line))
    worlds = [re.split(r"\s{2,}", line.strip()) for line in rows]
    reasons = {world[1] for world in worlds}
    assert {"start", "kill", "scale_up", "drain", "scale_down"} <= reasons
    assert {world[-1] for world in worlds} == {"0"}, "a step was lost"
    assert {world[6] for world in worlds if world[1] != "kill"} == {"0 B"}, "bytes moved in a planned pause"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]


@pytest.mark.timeout(300)
def test_the_demo_says_when_its_steps_ran_out_and_leaves_no_worker_behind(tmp_path: Path) -> None:
    done = demo(tmp_path, "--steps", "3", seconds=280)
    assert done.returncode == 1
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith("shoal: job disturbed succeeded at step 3 before ")
    assert sentence.endswith("(more steps: --steps)")
