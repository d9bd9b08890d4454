"""A small recurrent network learns Python from a stream of the standard library's source, byte by byte.

python streamed_corpus.py
"""

import sysconfig
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

STEPS, LENGTH = 120, 64


class Source(IterableDataset):
    """Windows of the files, one after the other; nothing is read before it is needed."""

    def __iter__(self):
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            content = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()
            for window in content.unfold(0, LENGTH + 1, LENGTH):
                yield window[:-1], window[1:]


class Network(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, inputs, targets):
        hidden, _ = self.recurrent(self.embedding(inputs))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def main():
    torch.manual_seed(0)
    loader = DataLoader(Source(), batch_size=32, num_workers=1)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for inputs, targets in islice(loader, STEPS):
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
