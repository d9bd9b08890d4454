"""What is trained while faults strike: a small model with everything that has to keep its bits.

Dropout, batch normalization, a tied parameter, clipping and a schedule. Environment: `PACE` seconds a micro-batch,
`STEPS`, `CHECKPOINTS` (a folder; empty: none), `STAGE` of ZeRO, whose bits are the same in all. Prints the
fingerprint at its end.
"""

from __future__ import annotations

import os
import threading

import shoal
import torch
from shoal.group import host_peers
from torch import Tensor, nn
from torch.utils.data import TensorDataset

STEPS = int(os.environ["STEPS"])
PACE = float(os.environ.get("PACE", "0"))
PAUSE = threading.Event()
host_peers.LEAST_BYTES = 4 << 10  # with so small a model; workers on hosts of their own share nothing


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 256), nn.Linear(256, 16)
        self.norm, self.drop = nn.BatchNorm1d(256), nn.Dropout(0.1)
        self.again = nn.Linear(16, 256)
        self.again.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(torch.relu(self.enter(x))))
        return self.leave(torch.relu(self.again(self.leave(hidden))))


def main() -> None:
    torch.manual_seed(0)
    points = torch.randn(1024, 16)
    checkpoint = {"path": os.environ["CHECKPOINTS"], "every_steps": 40, "keep": 2}
    engine = shoal.initialize(
        model=Model(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50}},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": int(os.environ.get("STAGE", "0"))},
            "shoal": {
                "lanes": 6, "mirrors": 1, "max_steps": STEPS,
                **({"checkpoint": checkpoint} if checkpoint["path"] else {}),
            },
        },
        dataset=TensorDataset(points, points.roll(1, 1)),
    )  # fmt: skip
    for x, y in engine:
        PAUSE.wait(PACE)
        loss = nn.functional.mse_loss(engine.module(x), y)
        engine.backward(loss)
        engine.step()
    print("FINGERPRINT", engine.fingerprint(), flush=True)


if __name__ == "__main__":
    main()
