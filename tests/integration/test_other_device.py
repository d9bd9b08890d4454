"""Nothing of a model's state is made on another device than the model's: PyTorch itself says so (other_device.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matrices import shortened
from rule import Edit, rule

SCRIPT = Path(__file__).resolve().parents[1] / "other_device.py"
BF16 = {"precision": {"bf16": {"enabled": True}}}
FP16 = {"precision": {"fp16": {"enabled": True}}}
SLICES: dict[str, Any] = {"stage": 1, "micro_batches_per_lane": 2, "shoal": {"fill_bytes_per_step": 100_000}}
ON_HOST: dict[str, Any] = {"stage": 1, "offload": "cpu"}
JOBS = shortened(
    [
        [{"stage": 2, **BF16}, {"stage": 3}],
        [{"stage": 0}, {"stage": 3, **BF16}, {"stage": 1, **FP16}, SLICES],
        [ON_HOST, {**ON_HOST, "stage": 2, **BF16}, {**ON_HOST, "stage": 3}],
    ],
    [{"stage": 2, **BF16}, {"stage": 3}],
)
"""Those of one process each."""


@rule(
    "Whatever belongs to a model lies on its device: sums, state, what comes from a peer, a file or a message's head",
    "Devices",
    broken_by=[
        Edit(
            "shoal.blocks.values",
            "torch.empty(part.elements, dtype=dtype, device=self._layout.device)\n",
            "torch.empty(part.elements, dtype=dtype)\n",
        ),
        Edit(
            "shoal.blocks.update_place",
            "            found[key] = value.to(self._device if value.dim() else numbers.get(key, value.device))\n",
            "            found[key] = value.to(numbers.get(key, value.device))\n",
        ),
    ],
)
@pytest.mark.parametrize("jobs", JOBS, ids=json.dumps)
def test_a_job_on_another_device_makes_no_tensor_elsewhere(jobs: list[dict[str, Any]]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, json.dumps(jobs)], capture_output=True, text=True, timeout=110
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, [str(len(jobs))]), done.stderr[-3000:]
