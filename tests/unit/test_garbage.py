"""What a controller's process leaves to the garbage collector."""

import subprocess
import sys

LOOK = """
import gc
of_python = gc.get_freeze_count()
from shoal_controller import server
from shoal_controller.process.descriptors import spare_what_lasts
began = len(gc.get_objects())
by_import = gc.get_freeze_count() - of_python
spare_what_lasts()
print(began, len(gc.get_objects()), by_import)
"""


def test_what_is_imported_is_not_looked_through_again() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, timeout=100)
    before, after, by_import = map(int, done.stdout.split())
    assert before > 50_000 and after < before / 50
    assert by_import == 0, "a process that imports a controller's modules may be none"
