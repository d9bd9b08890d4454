"""Ctrl-C while the `shoal` command is only being made: no traceback, and the status of every interrupted command."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
