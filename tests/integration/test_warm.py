"""The warm process that tests fork from: a run of the tests that is killed leaves nothing of it behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from integration.warm import TESTS

RUN = """
import os, sys
from pathlib import Path
from integration.warm import Warm

warm = Warm(modules=())
print(os.getpid(), warm.pid, warm.fork("signal:pause", {}, {}, Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""
PATIENCE_SECONDS = 100


@pytest.mark.parametrize("killed", [0, 1], ids=["the run", "its warm process"])
def test_who_is_killed_takes_all_that_was_forked_with_it(tmp_path: Path, killed: int) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path / "log")]
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as run:
        assert run.stdout
        pids = [int(pid) for pid in run.stdout.readline().split()]
        handles = [os.pidfd_open(pid) for pid in pids]
        signal.pidfd_send_signal(handles[killed], signal.SIGKILL)
        left = [pid for pid, handle in zip(pids[killed:], handles[killed:], strict=True) if not _ends(handle)]
        run.kill()
        for handle in handles:
            os.close(handle)
    assert left == []


def _ends(handle: int) -> bool:
    """Whether its process does; if not, it is killed."""
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    if ended.poll(PATIENCE_SECONDS * 1000):
        return True
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    return False
