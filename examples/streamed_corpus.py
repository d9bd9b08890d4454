"""A small recurrent network learns Python from a stream of the standard library's source, byte by byte.

Every lane reads a stream of its own. Run it alone (`python examples/streamed_corpus.py`) or on workers that come and go
(`shoal run --workers 3 examples/streamed_corpus.py`). What it was before: tests/scripts/originals/streamed_corpus.py.
"""

import sysconfig
from pathlib import Path

import shoal
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
    loader = DataLoader(Source(), batch_size=8, num_workers=1)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    engine = shoal.initialize(model, {"shoal": {"lanes": 4, "max_steps": STEPS}}, loader, optimizer)
    for inputs, targets in engine:
        loss = model(inputs, targets)
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
