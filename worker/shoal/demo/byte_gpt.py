"""The demo's script: a byte-level GPT of about a million parameters learns to write Python.

`python -m shoal.demo.byte_gpt [--text FILE] [--steps N] [--lanes 8] [--json]`, the same on every worker, or alone. The
text is the source of Python's standard library, found on any machine, unless `--text` names a file. The model is the
usual decoder (after karpathy/nanoGPT, MIT licence); nothing in it knows of other workers.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

# Legend of shapes: B samples, T bytes of a sample, C channels, H heads.
VOCABULARY = 256
CONTEXT = 128
CHANNELS = 128
HEADS = 4
LAYERS = 5
DROPOUT = 0.1
MICRO_BATCH = 2
WARMUP_STEPS = 20
LIBRARY_BYTES = 4_000_000


class Block(nn.Module):
    """Attention to what came before, then a small perceptron; both add to what passes through."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(CHANNELS)
        self.query_key_value = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.attended = nn.Linear(CHANNELS, CHANNELS)
        self.mlp_norm = nn.LayerNorm(CHANNELS)
        self.widen = nn.Linear(CHANNELS, 4 * CHANNELS)
        self.narrow = nn.Linear(4 * CHANNELS, CHANNELS)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) → (B, T, C)
        x = x + self.dropout(self.attended(self.attend(self.attention_norm(x))))
        wide = F.gelu(self.widen(self.mlp_norm(x)))  # (B, T, 4 C)
        mixed: Tensor = x + self.dropout(self.narrow(wide))
        return mixed

    def attend(self, x: Tensor) -> Tensor:  # (B, T, C) → (B, T, C)
        batch, length, _ = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, HEADS, CHANNELS // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)  # each (B, H, T, C / H)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, CHANNELS)


class ByteGPT(nn.Module):
    """Predicts each next byte. The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, CHANNELS)
        self.places = nn.Embedding(CONTEXT, CHANNELS)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(CHANNELS)
        self.head = nn.Linear(CHANNELS, VOCABULARY, bias=False)
        self.apply(_initialise)
        self.head.weight = self.bytes.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # (B, T), (B, T) → the mean loss
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.bytes(inputs) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (B, T, VOCABULARY)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class ByteWindows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A text cut into windows that follow each other; a window's targets are its bytes, one further."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return {"inputs": window[:-1], "targets": window[1:]}


def library_text() -> bytes:
    """The standard library's modules in the order of their paths, up to a few megabytes."""
    root = Path(sysconfig.get_path("stdlib"))
    return b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))[:LIBRARY_BYTES]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups: matrices lose weight, biases and norms do not."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [one for one in parameters if one.dim() >= 2], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)


def train(text: bytes, steps: int, lanes: int) -> tuple[shoal.Engine, str | None]:
    """The engine after its last step, and the fingerprint."""
    torch.manual_seed(0)
    model = ByteGPT()
    optimizer = optimizer_of(model)
    engine = shoal.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1},
            "shoal": {"lanes": lanes, "max_steps": steps},
        },
        dataset=ByteWindows(text),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS)),
    )
    for batch in engine:
        loss = engine.module(**batch)
        engine.backward(loss)
        engine.step()
    return engine, engine.fingerprint()


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m shoal.demo.byte_gpt", description="Train a byte-level GPT.")
    options.add_argument("--text", type=Path, help="a file to learn; default: Python's standard library")
    options.add_argument("--steps", type=int, default=100, help="optimizer steps (default 100)")
    options.add_argument("--lanes", type=int, default=8, help="micro-batches of a step, shared by the workers")
    options.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    chosen = options.parse_args()
    try:
        text = chosen.text.read_bytes() if chosen.text else library_text()
    except OSError as error:
        options.error(f"--text {chosen.text} cannot be read: {error.strerror}")
    engine, fingerprint = train(text, chosen.steps, chosen.lanes)
    if engine.rank != 0:
        return
    result = {"step": engine.global_step, "loss": engine.loss, "fingerprint": fingerprint}
    print(json.dumps(result) if chosen.json else f"step {result['step']}, loss {result['loss']:.4f}, {fingerprint}")


if __name__ == "__main__":
    main()
