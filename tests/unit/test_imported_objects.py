"""What a worker's process imports lasts as long as the process, and the garbage collector leaves it alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tiers import check

pytestmark = check("starts processes")

TORCHS_OBJECTS = 50_000
"""It has 170,000."""


@pytest.mark.parametrize(("controller", "left_alone"), [("127.0.0.1:7071", True), ("", False)])
def test_what_is_imported_is_left_alone_in_a_workers_process_and_in_no_other(controller: str, left_alone: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    environment |= {"SHOAL_CONTROLLER": controller} if controller else {}
    code = "import torch, shoal, gc; print(gc.get_freeze_count())"
    counted = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (int(counted.stdout) > TORCHS_OBJECTS) == left_alone
