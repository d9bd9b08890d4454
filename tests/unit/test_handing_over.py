"""Commands that need torch become another program: with which arguments, and what that says of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_command import SHOAL
from shoal.checkpoint.__main__ import main as checkpoint
from shoal_controller.cli import main
from tiers import check

pytestmark = check("starts commands")


def handed_over(*arguments: str) -> list[str]:
    """What this process would become, as arguments of `python -m shoal.checkpoint`."""
    becomes: list[str] = []

    def become(program: str, command: list[str]) -> None:
        becomes.extend(command)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(os, "execv", become)
        patch.setattr(sys, "argv", ["shoal", *arguments])
        main.main()
    assert becomes[:3] == [sys.executable, "-m", "shoal.checkpoint"]
    return becomes[3:]


def test_what_needs_torch_is_handed_over_with_its_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([SHOAL, "verify", str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (2, f"shoal: there is no checkpoint in {tmp_path}.\n")
    assert checkpoint(handed_over("export", str(tmp_path), "m.safetensors", "--dtype", "int1")) == 2
    assert capsys.readouterr().err.partition(";")[0] == "shoal: --dtype is int1"
    assert checkpoint(handed_over("import", str(tmp_path / "m"), str(tmp_path))) == 2
    assert capsys.readouterr().err == f"shoal: {tmp_path / 'm'} cannot be read: No such file or directory.\n"
