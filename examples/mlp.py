"""The smallest script: a perceptron learns which of two rings a point lies on.

Run it alone (`python examples/mlp.py`) or on workers that come and go (`shoal run --workers 3 examples/mlp.py`): the
fingerprint at the end is the same.
"""

import shoal
import torch


class Rings(torch.utils.data.Dataset):
    """Points on two rings; the batch's names are those of the model's arguments."""

    def __init__(self, count: int = 4096) -> None:
        angles = torch.linspace(0, 40 * torch.pi, count)
        self.labels = torch.arange(count) % 2
        radius = 1.0 + self.labels
        self.points = torch.stack([radius * angles.cos(), radius * angles.sin()], dim=1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"points": self.points[index], "labels": self.labels[index]}


class Perceptron(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(points), labels)


CONFIG = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 1},
    "shoal": {"epochs": 4},
}

torch.manual_seed(0)
engine = shoal.initialize(model=Perceptron(), config=CONFIG, dataset=Rings())
for batch in engine:
    loss = engine.module(**batch)
    engine.backward(loss)
    engine.step()
fingerprint = engine.fingerprint()
if engine.rank == 0:
    print(f"step {engine.global_step}, loss {engine.loss:.4f}, fingerprint {fingerprint}")
