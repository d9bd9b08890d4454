"""What a controller's process leaves to the garbage collector."""

import gc
import subprocess
import sys

LOOK = """
import gc, time
from shoal_controller import server
from shoal_controller.process.descriptors import spare_what_lasts
began = len(gc.get_objects())
spare_what_lasts()
print(began, len(gc.get_objects()))
"""


def test_what_is_imported_is_not_looked_through_again() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, timeout=60)
    before, after = map(int, done.stdout.split())
    assert before > 50_000 and after < before / 50
    assert gc.get_freeze_count() == 0, "this process is not a controller's"
