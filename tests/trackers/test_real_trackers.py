"""Real packages of trackers, which `make trackers` puts into a folder of their own: one run through a worker's death.

Two processes, one after the other, are two workers of one run of a job: the second goes on from the first one's step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from types import SimpleNamespace
from shoal.callbacks import MLflow, WandB
from shoal.callbacks.step_callback import JobOfRow

kind, folder, first, last, ends = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "ends"
tracker = WandB("mine", mode="offline", folder=folder) if kind == "wandb" else MLflow("mine", f"file://{folder}")
for step in range(first, last + 1):
    row = {"step": step, "samples": 8 * step, "time": 1.0 + step, "world_size": 2, "loss": 1 / step, "lr": 0.1}
    tracker.write(row, JobOfRow("job", "0123456789abcdef"))
if ends:
    tracker.close()
else:
    import os, time
    os.kill(os.getpid(), 9)
"""


def worker(kind: str, folder: Path, first: int, last: int, ends: str) -> subprocess.CompletedProcess[str]:
    settings = {"MLFLOW_ALLOW_FILE_STORE": "true", "WANDB_SILENT": "true", "HOME": str(folder), "TMPDIR": str(folder)}
    command = [sys.executable, "-c", SCRIPT, kind, str(folder), str(first), str(last), ends]
    return subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=110)


def two_workers(kind: str, folder: Path) -> None:
    assert worker(kind, folder, 1, 3, "is killed").returncode == -9
    second = worker(kind, folder, 3, 5, "ends")
    assert second.returncode == 0, second.stderr


def test_mlflow_has_one_run_through_a_workers_death(tmp_path: Path) -> None:
    two_workers("mlflow", tmp_path)
    [losses] = tmp_path.glob("*/*/metrics/loss")
    assert [line.split()[2] for line in losses.read_text().splitlines()] == ["1", "2", "3", "3", "4", "5"]
    assert "status: 3" in (losses.parent.parent / "meta.yaml").read_text(), "finished"


def test_weights_and_biases_has_one_run_id_through_a_workers_death(tmp_path: Path) -> None:
    """Offline: a folder for each worker, which `wandb sync` puts into the run of that id."""
    two_workers("wandb", tmp_path)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == ["run-0123456789abcdef.wandb"] * 2
    assert b"world_size" in files[1].read_bytes()
