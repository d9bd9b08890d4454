"""torch's compiler is loaded by whoever compiles: not by a worker's start, by an optimizer or by a step."""

from __future__ import annotations

import os
import subprocess
import sys

from tiers import check

pytestmark = check("compiles")

TRAINS = """
import sys
import torch
import shoal
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    def forward(self, x):
        return sum(layer(x).square().sum() for layer in self.layers)

def fingerprint(stage):
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = shoal.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "shoal": {"lanes": 2, "mirrors": 0, "max_steps": 3},
        },
        dataset=[{"x": torch.full((4,), float(number))} for number in range(12)],
        optimizer=optimizer,
    )
    for batch in engine:
        engine.backward(engine.module(**batch))
        engine.step()
    return engine.fingerprint()

first = [fingerprint(1), fingerprint(3)]
assert "torch._dynamo" not in sys.modules
import torch._dynamo
assert [fingerprint(1), fingerprint(3)] == first
"""

OPTIMIZERS = """
import torch
import shoal
import sys
from shoal.optim.elementwise import ELEMENTWISE

def stepped(kind):
    parameter = torch.nn.Parameter(torch.arange(1.0, 5.0))
    optimizer = kind([parameter], lr=0.1)
    for _ in range(2):
        parameter.grad = torch.ones(4)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    assert parameter.grad is None and torch.is_grad_enabled()
    return parameter.detach()

before = [stepped(kind) for kind in ELEMENTWISE]
assert "torch._dynamo" not in sys.modules
module = torch.compile(torch.nn.Linear(2, 2), backend="eager", fullgraph=True)
module(torch.ones(2)).sum().backward()
assert "torch._dynamo" in sys.modules
assert all(map(torch.equal, before, [stepped(kind) for kind in ELEMENTWISE]))
own = torch.optim.Optimizer.add_param_group.__wrapped__
assert getattr(own, "__dynamo_disable")._torchdynamo_orig_callable is own, "torch's own is there again"
"""


def run(script: str) -> None:
    """In a process of its own, where nothing has loaded the compiler."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_job_of_every_kind_of_parameters_loads_no_compiler_and_has_the_same_bits_as_with_it() -> None:
    run(TRAINS)


def test_optimizers_load_no_compiler_and_once_it_is_loaded_they_are_torchs_own() -> None:
    run(OPTIMIZERS)
