"""What tests of optimizers that need whole tensors train, and in which forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from crew import ONE_AT_A_TIME, Task, engine_of, train
from shoal.process.faults import Faults
from shoal.session.link_choice import AloneLink
from torch import Tensor, nn

BF16 = {"precision": {"bf16": {"enabled": True}}}
FORMS: dict[str, dict[str, Any]] = {
    "clipped": {},
    "not clipped": {"gradient_clipping": 0.0},
    "bf16": BF16,
    "two micro-batches, two mirrors": {"micro_batches_per_lane": 2, "mirrors": 2},
    "on the host": {"offload": "cpu"},
}


class Net(nn.Module):
    """Matrices that end within blocks, some of several blocks, and one that no lane uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 192, bias=False), nn.Linear(192, 33, bias=False)
        self.c, self.unused = nn.Linear(33, 256, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        inputs = (tokens.float().repeat(1, 4) / 256.0).to(self.a.weight.dtype)
        found = self.c(torch.tanh(self.b(torch.tanh(self.a(inputs)))))
        return nn.functional.cross_entropy(found.float(), targets[:, 0])


class Mixed(Net):
    """And what is not for Muon: an embedding, tied with the head, biases and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(256, 64), nn.LayerNorm(64), nn.Linear(64, 256)
        self.back = nn.Linear(256, 64)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        inputs = self.norm(self.embedding(tokens)).mean(1)
        found = self.c(torch.tanh(self.b(torch.tanh(self.a(inputs)))))
        return nn.functional.cross_entropy(self.head(self.back(found)).float(), targets[:, 0])


def trained_here(
    given: Task, make: Callable[[nn.Module], torch.optim.Optimizer], clipping: float = 0.0
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that an engine has trained alone, and those that plain torch has, on the same batches, with gradients
    that are clipped by the engine's norms.
    """
    seen: list[dict[str, Tensor]] = []
    norms: list[float] = []

    def body(engine: Any, batch: dict[str, Tensor]) -> None:
        seen.append(batch)
        engine.backward(engine.module(**batch))
        engine.step()
        norms.append(engine.context.state.record.norm or 0.0)

    options = {**given.options, "lanes": 1, "gradient_clipping": clipping}
    one = Task(options, given.model, make, given.scheduler, body=body)
    with ONE_AT_A_TIME:
        engine = engine_of(one, AloneLink(), Faults([]))
        train(engine, one, lambda: None)
    torch.manual_seed(0)
    plain = given.model()
    optimizer = make(plain)
    scheduler = one.scheduler(optimizer)
    for batch, norm in zip(seen, norms, strict=True):
        plain.zero_grad()
        plain(**batch).backward()
        if clipping:
            torch._foreach_mul_([p.grad for p in plain.parameters() if p.grad is not None], clipping / (norm + 1e-6))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return list(engine.module.parameters()), list(plain.parameters())
