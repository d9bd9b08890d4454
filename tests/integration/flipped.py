"""A script in whose memory a bit is flipped, as by a fault of the machine."""

from __future__ import annotations

import os
from typing import Any

import torch
from integration import scripts


def train(result: str, worker: str, step: int, bit: int, **options: Any) -> None:
    """`scripts.train`; after `step` that bit of the first number of Adam's first moment is another one on `worker`."""
    import shoal

    initialize, flipped = shoal.initialize, list[int]()

    def with_a_flip(**given: Any) -> Any:
        engine = initialize(**given)

        def flip() -> None:
            state = engine.context.state
            if state.step == step and not flipped:
                (values,) = state.held.home.states(state.held.runs.first(1)).values()
                memory = values["exp_avg"].detach().reshape(-1)[:1].view(torch.uint8).numpy()
                memory[bit // 8] ^= 1 << bit % 8
                flipped.append(step)

        engine.parts.boundary.add_watcher(flip)
        return engine

    if os.environ.get("SHOAL_WORKER_ID") == worker:
        shoal.initialize = with_a_flip
    scripts.train(result, **options)
