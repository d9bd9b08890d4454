"""Equal bits are also right bits: the same training written plainly in PyTorch gives the same losses and weights.

One process, `loss.backward()`, `clip_grad_norm_`, the user's own optimizer on the user's own parameters; the samples
and seeds are Shoal's. Sums run in another order there, so a tolerance is right here: a rounding error or so in float32
with SGD; in float64 with AdamW, whose division by small second moments makes more of it with every step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integration.cluster import Cluster, alone
from safetensors.torch import load_file
from tiers import promise

ADAMW: dict[str, Any] = {"max_steps": 25, "gradient_clipping": 0.5, "double": True}
SGD: dict[str, Any] = {
    "max_steps": 25, "lanes": 3, "micro_batches_per_lane": 2, "optimizer": {"name": "SGD", "momentum": 0.9}
}  # fmt: skip


COMPARED = ("embedding.weight", "up.weight", "down.weight", "down.bias", "norm.weight", "norm.bias", "unused", "frozen")
"""Not `up.bias`: normalization takes it out again, so its gradient is rounding errors, of which AdamW makes steps."""


@pytest.mark.parametrize(("options", "tolerance"), [(ADAMW, 1e-9), (SGD, 1e-6)], ids=["adamw", "sgd"])
@promise("float32", "adamw")
def test_training_is_what_a_plain_loop_does(options: dict[str, Any], tolerance: float, tmp_path: Path) -> None:
    plain_file, file = tmp_path / "plain.safetensors", tmp_path / "shoal.safetensors"
    plain = alone({**options, "export": str(plain_file)}, "integration.scripts:train_plainly")["losses"]
    with Cluster(workers=3, options={**options, "export": str(file)}) as cluster:
        cluster.wait_done()
        assert cluster.wait_exit("w0") == 0
        losses = cluster.result("w0")["losses"]
    assert sum(plain[-5:]) < sum(plain[:5])
    torch.testing.assert_close(_vector(losses), _vector(plain), rtol=tolerance, atol=0.0)
    weights, plain_weights = load_file(file), load_file(plain_file)
    for name in COMPARED:
        torch.testing.assert_close(weights[name], plain_weights[name], rtol=10 * tolerance, atol=tolerance, msg=name)


def _vector(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)
