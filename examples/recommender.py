"""A recommender learns which items a user clicks on, from the items of their history (EmbeddingBag) and who they are.

Run it alone (`python examples/recommender.py`) or on workers that come and go (`shoal run --workers 3
examples/recommender.py`). What it was before: tests/scripts/originals/recommender.py.
"""

import shoal
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

USERS, ITEMS, DIMENSION = 500, 2000, 16
EPOCHS = 3
CONFIG = {"train_batch_size": 128, "steps_per_print": 16, "shoal": {"lanes": 4, "epochs": EPOCHS}}


class Clicks(Dataset):
    """Histories of unequal length; a click is likely where the item is near one of the history."""

    def __init__(self, count=4096):
        self.generator = torch.Generator().manual_seed(7)
        self.rows = [self.row() for _ in range(count)]

    def row(self):
        def draw(high, count):
            return torch.randint(high, (count,), generator=self.generator)

        taste = int(draw(ITEMS - 50, 1))
        history = taste + draw(50, int(draw(12, 1)) + 1)
        near = bool(draw(2, 1))
        item = taste + draw(50, 1) if near else draw(ITEMS, 1)
        return draw(USERS, 1), history, item, torch.tensor([float(near)])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def collate(rows):
    """Histories one after the other, and where each begins."""
    users, histories, items, clicks = zip(*rows, strict=True)
    lengths = torch.tensor([0] + [len(history) for history in histories[:-1]])
    return torch.cat(users), torch.cat(histories), lengths.cumsum(0), torch.cat(items), torch.cat(clicks)


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, DIMENSION)
        self.items = nn.Embedding(ITEMS, DIMENSION)
        self.history = nn.EmbeddingBag(ITEMS, DIMENSION, mode="mean")
        self.top = nn.Sequential(nn.Linear(4 * DIMENSION, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, users, history, offsets, items):
        user, item, bag = self.users(users), self.items(items), self.history(history, offsets)
        return self.top(torch.cat([user, item, bag, item * bag], dim=1)).squeeze(1)


def main():
    torch.manual_seed(0)
    loader = DataLoader(Clicks(), batch_size=128, shuffle=True, collate_fn=collate, drop_last=True)
    model = Recommender()
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    engine = shoal.initialize(model, CONFIG, loader.dataset, optimizer, collate_fn=collate)
    for users, history, offsets, items, clicks in engine:
        loss = criterion(model(users, history, offsets, items), clicks)
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
