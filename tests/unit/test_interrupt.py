"""Ctrl-C while the `shoal` command is only being made, or reads: no traceback, and the status of every interrupted
command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from integration.cluster import until

WHILE_IT_IS_IMPORTED = """
class Interrupting:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
"""
WHILE_ITS_FLAGS_ARE_READ = """
def interrupted(*_, **__):
    raise KeyboardInterrupt

import typer.main
typer.main.get_command = interrupted
"""
BEFORE_IT_RUNS = """
import asyncio

def interrupted(_):
    raise KeyboardInterrupt

asyncio.run = interrupted
sys.argv = ["shoal", "jobs"]
"""


@pytest.mark.parametrize("when", [WHILE_IT_IS_IMPORTED, WHILE_ITS_FLAGS_ARE_READ, BEFORE_IT_RUNS])
def test_an_interrupt_before_the_command_runs_is_exit_130_and_no_traceback(when: str) -> None:
    code = f"import sys\nfrom shoal_controller.cli import console\n{when}\nconsole.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_ends_a_submit_that_waits_for_its_specification(tmp_path: Path) -> None:
    pipe = tmp_path / "job.yaml"
    os.mkfifo(pipe)
    code = "from shoal_controller.cli.console import main; main()"
    command = (sys.executable, "-c", code, "submit", str(pipe))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as submit:
        end = os.open(pipe, os.O_WRONLY)  # returns once the command has opened it
        try:
            # Python looks for signals before it reads: one that comes after that look, yet before the system call,
            # waits for the next byte or the next Ctrl-C. So it is sent to a command that sleeps in its read.
            until("it reads", lambda: "pipe_read" in Path(f"/proc/{submit.pid}/wchan").read_text())
            submit.send_signal(signal.SIGINT)
            printed, _ = submit.communicate(timeout=100)
        finally:
            os.close(end)
            submit.kill()
    assert (submit.returncode, printed) == (130, "")
