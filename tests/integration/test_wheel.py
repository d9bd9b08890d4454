"""The package as a user installs it: a wheel, and an environment that holds nothing but what the wheel asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiers import check

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [check("builds a wheel and installs it"), pytest.mark.timeout(300)]
SECONDS = 200


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """The command's end, elsewhere than in the repository, so that nothing is imported from there."""
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd="/")


def succeeds(*command: str | Path) -> str:
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    succeeds(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (found,) = folder.glob("shoal-*.whl")
    return found


def test_an_index_would_take_the_wheel(wheel: Path) -> None:
    assert "PASSED" in succeeds(sys.executable, "-m", "twine", "--no-color", "check", "--strict", wheel)


def test_the_controllers_extra_brings_its_commands_and_no_torch(wheel: Path, tmp_path: Path) -> None:
    succeeds(sys.executable, "-m", "venv", tmp_path)
    python, shoal = tmp_path / "bin/python", tmp_path / "bin/shoal"
    constraints = ("--constraint", ROOT / "constraints.txt")
    succeeds(python, "-m", "pip", "install", "--quiet", *constraints, f"{wheel}[controller]")
    assert succeeds(shoal, "--version").split()[-1] in wheel.name
    assert "controller" in succeeds(shoal, "controller", "--help")
    installed = succeeds(python, "-m", "pip", "list", "--format=freeze")
    assert "shoal==" in installed and "torch==" not in installed
    succeeds(python, "-m", "pip", "check")
    (tmp_path / "train.py").write_text("import shoal\n")
    refused = run(shoal, "run", tmp_path / "train.py")
    assert refused.returncode != 0 and "shoal[worker]" in refused.stdout + refused.stderr
