"""The leak fixture itself: each kind of thing that a test can forget is found.

Runs pytest once, in a process of its own, on small tests that forget something.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tiers import check

pytestmark = check("runs pytest")

FORGETFUL = """
import asyncio, socket, subprocess, tempfile, threading

kept = []

def test_that_forgets_nothing():
    tempfile.TemporaryFile().close()

def test_that_forgets_a_thread():
    threading.Thread(target=threading.Event().wait, args=(30,), daemon=True).start()

def test_that_forgets_a_process():
    kept.append(subprocess.Popen(["sleep", "30"]))

def test_that_forgets_a_socket():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_that_forgets_a_file():
    tempfile.mkdtemp()

def test_that_forgets_a_task():
    async def main():
        kept.append(asyncio.create_task(asyncio.sleep(30), name="forgotten"))
    asyncio.run(main())

def teardown_module():
    assert kept[0].wait(timeout=100) == -9
"""


def test_a_test_that_leaves_something_behind_fails(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    conftest = (tests / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest.replace("GRACE_SECONDS = 30.0", "GRACE_SECONDS = 0.1"))
    (tmp_path / "test_it.py").write_text(FORGETFUL)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base")]
    command += [str(tmp_path)]
    wide = os.environ | {"COLUMNS": "300", "PYTHONPATH": str(tests)}
    done = subprocess.run(command, cwd=tmp_path, env=wide, capture_output=True, text=True, timeout=100)
    found = set(
        re.findall(r"ERROR test_it.py::test_that_forgets_a_(\w+) - AssertionError: the test has left", done.stdout)
    )
    assert found == {"thread", "process", "socket", "file", "task"}, done.stdout + done.stderr
    assert "6 passed, 5 errors" in done.stdout
