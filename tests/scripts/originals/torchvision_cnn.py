"""A ResNet of torchvision learns shapes, from pictures that are cropped, flipped and tinted at random.

python torchvision_cnn.py
"""

from functools import partial

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

SIZE, CLASSES, EPOCHS = 24, 4, 2


class Shapes(Dataset):
    """Pictures with a bar, a box, a cross or noise."""

    def __init__(self, count=320, transform=None):
        generator = torch.Generator().manual_seed(3)
        self.images = torch.randint(0, 80, (count, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)
        self.labels = torch.arange(count) % CLASSES
        for image, label in zip(self.images, self.labels, strict=True):
            x, y = torch.randint(4, SIZE - 8, (2,), generator=generator).tolist()
            if label in (0, 2):
                image[:, y : y + 2, :] += 120
            if label in (1, 2):
                image[:, :, x : x + 2] += 50
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.labels[index]


def main():
    torch.manual_seed(0)
    augmentation = v2.Compose(
        [
            v2.RandomResizedCrop(SIZE, scale=(0.6, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.3, 0.3),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.3] * 3, [0.2] * 3),
        ]
    )
    loader = DataLoader(Shapes(transform=augmentation), batch_size=32, shuffle=True, drop_last=True)
    model = torchvision.models.resnet18(num_classes=CLASSES, norm_layer=partial(nn.GroupNorm, 8))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=EPOCHS * len(loader))
    for epoch in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
