"""Pictures are augmented in data workers while the network trains; `benchmarks/data_workers.py` prints how much faster
that is than without them.

Run it alone (`python examples/image_augmentation.py`) or on workers that come and go (`shoal run --workers 2
examples/image_augmentation.py`); the fingerprint is the same, and the same with `DATA_WORKERS=0`.
"""

import os
import time

import shoal
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

SIDE, CLASSES = 64, 4
CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.002}},
    "shoal": {"lanes": 4, "max_steps": int(os.environ.get("STEPS", "30"))},
}


class Pictures(Dataset):
    """Stripes of four widths; every time that one is read it is turned, cropped, tinted and blurred anew."""

    def __init__(self, count: int = 1024) -> None:
        self.labels = torch.arange(count) % CLASSES
        stripes = torch.stack([(torch.arange(2 * SIDE) // (2 + 3 * width)) % 2 for width in range(CLASSES)])
        self.rows = (200 * stripes[self.labels]).to(torch.uint8)  # (count, 2 × SIDE)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        picture = self.rows[index].float().div(255).expand(1, 3, 2 * SIDE, 2 * SIDE)
        return augmented(picture).squeeze(0), self.labels[index]


def augmented(picture: torch.Tensor) -> torch.Tensor:  # (1, 3, 2 × SIDE, 2 × SIDE) → (1, 3, SIDE, SIDE)
    """One random view, drawn under the seed of the micro-batch."""
    angle, scale = torch.rand(2).tolist()
    turn = torch.tensor(0.5 * angle - 0.25)
    move = torch.stack([torch.stack([turn.cos(), -turn.sin()]), torch.stack([turn.sin(), turn.cos()])])
    where = torch.cat([(0.4 + 0.3 * scale) * move, 0.4 * torch.rand(2, 1) - 0.2], dim=1)
    grid = functional.affine_grid(where[None], [1, 3, 2 * SIDE, 2 * SIDE], align_corners=False)
    picture = functional.grid_sample(picture, grid, mode="bicubic", padding_mode="reflection", align_corners=False)
    picture = picture * (0.7 + 0.6 * torch.rand(1, 3, 1, 1)) + 0.1 * torch.randn(picture.shape)
    return functional.avg_pool2d(functional.avg_pool2d(picture, 5, stride=1, padding=2), 2)


def network() -> nn.Module:
    def stage(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.GroupNorm(4, outputs), nn.ReLU())

    return nn.Sequential(stage(3, 16), stage(16, 32), stage(32, 64), nn.Flatten(), nn.Linear(64 * 64, CLASSES))


def main() -> None:
    torch.manual_seed(0)
    workers = int(os.environ.get("DATA_WORKERS", "2"))
    loader = DataLoader(Pictures(), batch_size=16, shuffle=True, num_workers=workers)
    engine = shoal.initialize(network(), CONFIG, loader)
    began = time.monotonic()
    for pictures, labels in engine:
        engine.backward(functional.cross_entropy(engine.module(pictures), labels))
        engine.step()
    seconds = time.monotonic() - began
    fingerprint = engine.fingerprint()
    if engine.rank == 0:
        print(f"loss {engine.loss:.4f}, {seconds:.2f} s with {workers} data workers, fingerprint {fingerprint}")


if __name__ == "__main__":
    main()
