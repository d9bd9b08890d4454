"""Run an original and its port: the loss of both, and the port's bits in several worlds and through a kill.

Everything is a process of its own: the original in Python, the port under `shoal run`. Called by run.py and by the
short test of `make test`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.table import ROOT, VENV, Script

SHOAL = str(Path(sys.executable).with_name("shoal"))
PATIENCE_SECONDS = 400.0
"""Far above what any of these runs takes."""
LOSS = re.compile(r"(?<!\w)loss\W+(\d+\.\d+)")
RELATIVE = 1e-4
"""How far a loss may be from the original's: sums in another order, over some dozens of steps."""


@dataclass(slots=True)
class Measured:
    """One row's figures."""

    files: str
    """The digest of what was run."""
    original_loss: str
    """As the original printed it: of its last step, over the whole batch."""
    loss: float = float("nan")
    steps: int = 0
    fingerprints: dict[str, str] = field(default_factory=dict)
    """By world: "1", "2", "3"; "killed" is a world of three in which one was killed."""
    saved: dict[str, str] = field(default_factory=dict)
    """By world, the digest of the weights that the script itself has saved; empty where it saves none."""

    def wrong(self) -> list[str]:
        """What is not as it should be, a sentence each."""
        decimals = len(self.original_loss.partition(".")[2])
        allowed = RELATIVE * float(self.original_loss) + 0.5 * 10**-decimals
        found = []
        if not abs(self.loss - float(self.original_loss)) <= allowed:
            found.append(f"the loss is {self.loss}, the original's {self.original_loss}; they may differ by {allowed}")
        if len(set(self.fingerprints.values())) != 1:
            found.append(f"the fingerprints differ: {self.fingerprints}")
        if len(set(self.saved.values())) > 1:
            found.append(f"the weights that the script saved differ: {self.saved}")
        return found


class RunFailed(Exception):
    """A process did not end as it should; its last output."""


def environment(script: Script, **more: str) -> dict[str, str]:
    """Of every process of a script."""
    paths = [*(str(VENV / package) for package in script.packages), str(ROOT / "tests")]
    own = {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "DNNL_MAX_CPU_ISA": "AVX2",  # wider ones round convolutions by the batch and the threads: 1.0092 or 1.0107
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(VENV / "deepspeed" / "built"),  # what DeepSpeed compiles when it runs
    }
    tools = os.pathsep.join([*(str(VENV / package / "bin") for package in script.packages), os.environ["PATH"]])
    return {**os.environ, **own, "PATH": tools, **more}


def loss_of_the_original(script: Script) -> str:
    """The last one that it prints."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "scripts.original", script.name]
        printed = _output(command, environment(script), folder)
    losses = LOSS.findall(printed)
    if not losses:
        raise RunFailed(f"{script.original} prints no loss; its last output:\n{printed[-2000:]}")
    return str(losses[-1])


def report_of_the_port(script: Script, workers: int, fault: str = "") -> dict[str, Any]:
    """`shoal run --json` of the port, and in `saved` what it has saved."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made"
        made.mkdir()
        report = Path(folder) / "report.json"
        places = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--data", folder, "--store", f"embedded:{folder}/s"]
        command = [SHOAL, "run", "--workers", str(workers), "--json", str(report), *places, str(script.port)]
        _output(command, environment(script, **({"SHOAL_FAULT": fault} if fault else {})), str(made))
        return {**json.loads(report.read_text()), "saved": digest_of_weights(made)}


def digest_of_weights(folder: Path) -> str:
    """Of all files of weights in it, by name; empty where there is none."""
    files = sorted(folder.rglob("*.safetensors"))
    listed = [f"{file.relative_to(folder)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]
    return hashlib.sha256("\n".join(listed).encode()).hexdigest() if listed else ""


def measure(script: Script, worlds: tuple[int, ...] = (1, 2, 3), through_a_kill: bool = True) -> Measured:
    """Raises `RunFailed` where a process fails, or where the kill found nobody."""
    measured = Measured(script.digest, loss_of_the_original(script))
    for workers in worlds:
        report = report_of_the_port(script, workers)
        measured.fingerprints[str(workers)], measured.saved[str(workers)] = report["fingerprint"], report["saved"]
        measured.loss, measured.steps = report["final_loss"], report["steps"]
    if through_a_kill:
        report = report_of_the_port(script, 3, f"w1@{measured.steps // 2}:exchange:kill")
        reasons = [world["reason"] for world in report["generations"]]
        if "kill" not in reasons:
            raise RunFailed(f"{script.name}: the kill is not in the report; reasons of its worlds: {reasons}")
        measured.fingerprints["killed"], measured.saved["killed"] = report["fingerprint"], report["saved"]
    return measured


def _output(command: list[str], env: dict[str, str], folder: str) -> str:
    done = subprocess.run(
        command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise RunFailed(f"`{' '.join(command)}` ended with {done.returncode}; its last output:\n{done.stdout[-4000:]}")
    return done.stdout
