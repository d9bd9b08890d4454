"""The model that all benchmarks train: a byte-level GPT of 1 to 85 million parameters, and windows of real text.

The usual decoder (after karpathy/nanoGPT, MIT licence) without dropout, so that Shoal and what it is compared with do
the same arithmetic. One micro-batch is 4 windows of 64 bytes. Knows nothing of Shoal.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Legend of shapes: B samples, T bytes of a sample, C channels.
VOCABULARY = 256
CONTEXT = 64
MICRO_BATCH = 4
HEAD_CHANNELS = 64
TEXT_BYTES = 1_000_000


@dataclass(frozen=True)
class Shape:
    channels: int
    layers: int


SIZES = {"1M": Shape(128, 5), "10M": Shape(320, 8), "40M": Shape(640, 8), "85M": Shape(768, 12)}
"""Exactly 1.03, 9.97, 39.6 and 85.3 million parameters."""


class Block(nn.Module):
    """Attention to what came before, then a small perceptron; both add to what passes through."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(channels)
        self.query_key_value = nn.Linear(channels, 3 * channels)
        self.attended = nn.Linear(channels, channels)
        self.mlp_norm = nn.LayerNorm(channels)
        self.widen = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) → (B, T, C)
        batch, length, channels = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, -1, HEAD_CHANNELS)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).reshape(batch, length, channels))
        return x + self.narrow(F.gelu(self.widen(self.mlp_norm(x))))


class GPT(nn.Module):
    """Predicts each next byte. The head's weight is the embedding's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, shape.channels)
        self.places = nn.Embedding(CONTEXT, shape.channels)
        self.blocks = nn.ModuleList(Block(shape.channels) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.channels)
        self.head = nn.Linear(shape.channels, VOCABULARY, bias=False)
        self.apply(_initialise)
        self.head.weight = self.bytes.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # (B, T), (B, T) → the mean loss
        x = self.bytes(inputs) + self.places(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (B, T, VOCABULARY)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Python's standard library, cut into windows of bytes; a window's targets are its bytes, one further."""

    def __init__(self) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        text = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))[:TEXT_BYTES]
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return {"inputs": window[:-1], "targets": window[1:]}


def build(size: str) -> GPT:
    """The same weights everywhere."""
    torch.manual_seed(0)
    return GPT(SIZES[size])


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """PyTorch's fastest one here."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
