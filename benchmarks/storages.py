"""The worker's script of memory.py: trains a while and says how many bytes of tensors it holds.

Counted by the allocator and, of parameters that others see, by the kernel (tensor_bytes.py): in a step these stay
as they are. `activations` is what a plain forward and backward of a micro-batch takes beside the parameters when every
gradient is dropped as it is made; `rest` is between two steps, `most` at any time within a step. One JSON file per
worker beside the step log.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import cast

import model
from tensor_bytes import TensorBytes, in_torchs_memory, seen_bytes
from torch import Tensor
from torch.utils.data import default_collate
from train import initialize, note, options

STEPS = 12
"""Before anything is counted: by then all mirrors are filled."""


def activations(size: str, counter: TensorBytes) -> int:
    """Bytes of a plain forward and backward, beside the parameters."""
    gpt, windows = model.build(size), model.Windows()
    batch = default_collate([windows[number] for number in range(model.MICRO_BATCH)])

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in gpt.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    gpt(**batch).backward()
    counter.forget_most()
    before = counter.now
    gpt(**batch).backward()
    return counter.most - before


def main() -> None:
    given, counter = options(), TensorBytes()
    in_torchs_memory()
    result = {"activations": activations(given.size, counter)}
    before = counter.now
    engine = initialize(given.size, {"lanes": given.lanes, "mirrors": given.mirrors}, stage=given.stage)
    result["parameters"] = sum(one.numel() * one.element_size() for one in engine.module.parameters())
    layers = (sum(one.numel() for one in layer.parameters()) for layer in cast(model.GPT, engine.module).blocks)
    result["unit"] = max(layers)
    file = os.open(os.environ["BENCH_STEPS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    goal = 0
    for batch in engine:
        engine.backward(engine.module(**batch))
        at = engine.global_step
        engine.step()
        del batch
        if engine.global_step == at or engine.world_size < given.workers:
            continue
        note(file, engine)
        goal = goal or engine.global_step + STEPS
        if engine.global_step == goal:
            result["rest"] = counter.now - before + seen_bytes(engine.context.state.memory)
            counter.forget_most()
        elif engine.global_step == goal + STEPS:
            most = counter.most - before + seen_bytes(engine.context.state.memory)
            result |= {"most": most, "lanes": len(engine.lanes)}
            place = Path(f"{os.environ['BENCH_STEPS']}.{engine.rank}")
            Path(f"{place}.new").write_text(json.dumps(result))
            Path(f"{place}.new").rename(f"{place}.json")


if __name__ == "__main__":
    main()
