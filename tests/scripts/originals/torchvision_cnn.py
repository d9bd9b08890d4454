"""A small convolutional network learns five textures from augmented pictures; worker processes augment them.

python torchvision_cnn.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

EPOCHS, CLASSES, SIDE = 2, 5, 32

augment = v2.Compose(
    [
        v2.RandomResizedCrop(SIDE, scale=(0.5, 1.0), antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(brightness=0.3, contrast=0.3),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5, 0.5, 0.5], [0.25, 0.25, 0.25]),
    ]
)


class Textures(Dataset):
    """Stripes and checks of five widths, with noise, as pictures of bytes."""

    def __init__(self, count=512):
        generator = torch.Generator().manual_seed(7)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)
        place = torch.arange(2 * SIDE)
        waves = [((place // (2 + 2 * label)) % 2).float() for label in range(CLASSES)]
        checks = torch.stack([(wave[:, None] + wave) % 2 for wave in waves])
        noise = torch.rand(count, 3, 2 * SIDE, 2 * SIDE, generator=generator)
        self.pictures = (160 * checks[self.labels][:, None] + 90 * noise).to(torch.uint8)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return augment(self.pictures[index]), self.labels[index]


def network():
    def stage(inputs, outputs):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(), nn.MaxPool2d(2)
        )

    return nn.Sequential(stage(3, 16), stage(16, 32), stage(32, 32), nn.Flatten(), nn.Linear(32 * 16, CLASSES))


def main():
    torch.manual_seed(0)
    loader = DataLoader(Textures(), batch_size=32, shuffle=True, num_workers=2, drop_last=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCHS):
        for pictures, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(pictures), labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
