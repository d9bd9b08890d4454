"""A script for DeepSpeed: a perceptron learns which of two rings a point lies on.

deepspeed deepspeed_script.py --deepspeed_config ds_config.json
"""

import argparse
from pathlib import Path

import deepspeed
import torch


class Rings(torch.utils.data.Dataset):
    """Points on two rings."""

    def __init__(self, count: int = 2048) -> None:
        angles = torch.linspace(0, 40 * torch.pi, count)
        self.labels = torch.arange(count) % 2
        radius = 1.0 + self.labels
        self.points = torch.stack([radius * angles.cos(), radius * angles.sin()], dim=1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index], self.labels[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("ds_config.json")))
    args = parser.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        training_data=Rings(),
    )
    criterion = torch.nn.CrossEntropyLoss()
    losses = []
    for _ in range(args.epochs):
        for points, labels in loader:
            loss = criterion(engine(points), labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())

    if engine.global_rank == 0:
        last = losses[-engine.gradient_accumulation_steps() :]
        print(f"step {engine.global_steps}, loss {sum(last) / len(last):.6f}")


if __name__ == "__main__":
    main()
