"""A reader of a step, of heartbeats, of a recovery or of a save meets no more files than today."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tiers import check

pytestmark = check("it runs three jobs under a profiler")

MOST = {
    "step": 80,
    "stage 3 beyond a step": 7,
    "heartbeats": 28,
    "recovery": 123,
    "save beyond steps, without the machine": 17,
}
PROGRAM = Path(__file__).resolve().parents[1] / "entered_files.py"


def test_what_happens_all_the_time_enters_few_files() -> None:
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == MOST.keys()
    assert {name: count for name, count in found.items() if count > MOST[name]} == {}
