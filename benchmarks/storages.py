"""The worker's script of memory.py: trains a while and says how many bytes of tensors it holds.

Counted over storages, each once, of every tensor that Python can see; the data set's text is the user's and left out.
`rest` is between two steps, `most` what a thread saw that looked all the time (activations that a line of Python holds
are in it), `most_in_step` what it saw within `engine.step`, where the buffers of the exchange are. One JSON file per
worker beside the step log.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from pathlib import Path

import model
import torch
from train import initialize, note, options

LOOK_SECONDS = 0.005
STEPS = 12
"""Before anything is counted: by then all mirrors are filled."""


def tensor_bytes() -> int:
    """Of all storages that a living tensor uses, but a data set's."""
    storages: dict[int, int] = {}
    for seen in gc.get_objects():
        if issubclass(type(seen), torch.Tensor) and seen.layout is torch.strided:
            storage = seen.untyped_storage()
            if storage.nbytes() != model.TEXT_BYTES:
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Looker:
    """Remembers the most that was ever held while it looks, and within `engine.step` alone: while `stepping`."""

    def __init__(self) -> None:
        self.most = self.most_in_step = 0
        self.stepping = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            before = self.stepping
            held = tensor_bytes()
            self.most = max(self.most, held)
            if before and self.stepping:
                self.most_in_step = max(self.most_in_step, held)

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def main() -> None:
    given = options()
    engine = initialize(given.size, given.lanes, given.mirrors, stage=given.stage)
    file = os.open(os.environ["BENCH_STEPS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    goal, at_rest, looker = 0, 0, None
    for batch in engine:
        engine.backward(engine.module(**batch))
        before = engine.global_step
        if looker is not None:
            looker.stepping = True
        engine.step()
        if looker is not None:
            looker.stepping = False
        if engine.global_step == before or engine.world_size < int(os.environ["BENCH_WORKERS"]):
            continue
        note(file, engine)
        goal = goal or engine.global_step + STEPS
        if engine.global_step == goal:
            del batch
            at_rest, looker = tensor_bytes(), Looker()
        elif looker is not None and engine.global_step == goal + STEPS:
            looker.end()
            result = {
                "rest": at_rest,
                "most": looker.most,
                "most_in_step": looker.most_in_step,
                "parameters": sum(p.numel() * p.element_size() for p in engine.module.parameters()),
                "lanes": len(engine.lanes),
            }
            place = Path(f"{os.environ['BENCH_STEPS']}.{engine.rank}")
            Path(f"{place}.new").write_text(json.dumps(result))
            Path(f"{place}.new").rename(f"{place}.json")


if __name__ == "__main__":
    main()
