"""PyTorch's tutorial on DistributedDataParallel, elastic: no process group, no sampler, no ranks.

Run it alone (`python examples/ddp_tutorial.py`) or on workers that come and go (`shoal run --workers 3
examples/ddp_tutorial.py`). What it was before: tests/scripts/originals/ddp_tutorial.py.
"""

import argparse

import shoal
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class MyTrainDataset(Dataset):
    def __init__(self, size):
        self.size = size
        generator = torch.Generator().manual_seed(1)
        sources = torch.randn(size, 20, generator=generator)
        self.data = [(source, source[:3].argmax()) for source in sources]

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, train_data, optimizer):
        self.model = model
        self.data = train_data
        self.optimizer = optimizer

    def _run_batch(self, source, targets):
        output = self.model(source)
        loss = F.cross_entropy(output, targets)
        self.engine.backward(loss)
        self.engine.step()
        self.loss = loss.item()

    def train(self, max_epochs):
        config = {"train_batch_size": 32, "steps_per_print": 64, "shoal": {"lanes": 4, "epochs": max_epochs}}
        self.engine = shoal.initialize(self.model, config, self.data.dataset, self.optimizer)
        for source, targets in self.engine:
            self._run_batch(source, targets)


def load_train_objs():
    train_set = MyTrainDataset(2048)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return train_set, model, optimizer


def prepare_dataloader(dataset, batch_size):
    return DataLoader(
        dataset,
        batch_size=batch_size,
        pin_memory=False,
    )


def main(total_epochs, batch_size):
    dataset, model, optimizer = load_train_objs()
    train_data = prepare_dataloader(dataset, batch_size)
    trainer = Trainer(model, train_data, optimizer)
    trainer.train(total_epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("--total_epochs", type=int, default=2, help="Total epochs to train the model")
    parser.add_argument("--batch_size", default=32, type=int, help="Input batch size on each device (default: 32)")
    args = parser.parse_args()

    main(args.total_epochs, args.batch_size)
