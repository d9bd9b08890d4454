"""The worker's script of step_time.py and zero.py: rounds of PyTorch's own ways (ddp.py) and of Shoal, in turn.

Each member of the world takes part in all of them on the same two cores, so that a busy machine is busy for all alike.
Rank 0 writes what every round took, wall and CPU seconds per step (of all these processes together, without the
controller, of which control_plane.py tells), and what the host that sends most has sent (0 without links), as JSON.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import shoal
import torch
import torch.distributed as dist
from ddp import baseline, in_turn, measured
from train import initialize, options
from wire_rounds import most_sent, sent

GATHERED = 3
"""The stage in which nothing is handed out."""


def elastic(engine: shoal.Engine, batches: Iterator[dict[str, torch.Tensor]]) -> None:
    """One optimizer step of Shoal; the first one after the world has begun, which a batch may wait for."""
    before = after = 0
    while after == before:
        batch = next(batches)
        before = engine.global_step
        engine.backward(engine.module(**batch))
        engine.step()
        after = engine.global_step


def main() -> None:
    given = options()
    section = {"lanes": given.lanes, "mirrors": given.mirrors}
    engine = initialize(given.size, section, stage=given.stage, optimizer=given.optimizer)
    batches = iter(engine)
    place, workers = os.environ["BENCH_STEPS"], given.workers or given.lanes
    elastic(engine, batches)  # the world has begun
    while engine.world_size < workers:
        elastic(engine, batches)
    dist.init_process_group("gloo", init_method=f"file://{place}.group", rank=engine.rank, world_size=workers)
    ways: dict[str, Callable[[], None]] = {
        way: baseline(engine.rank, workers, given.size, given.lanes, way) for way in given.beside
    }
    ways["shoal"] = lambda: elastic(engine, batches)

    def settle() -> None:
        """What the last step has handed out belongs to its round."""
        if given.stage < GATHERED:
            with engine.gathered():
                pass

    for step in ways.values():
        measured(step, steps=given.steps)
    took: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    given.turns.on_ready()
    for number in range(given.rounds):
        given.turns.wait(number)
        for name, step in in_turn(ways.items(), number):
            before = sent()
            wall, processor = measured(step, settle, given.steps)
            took[name].append((wall, processor, most_sent(before) / given.steps))
        if engine.rank == 0:
            given.turns.on_round_over(number)
    if engine.rank == 0:
        beside = Path(f"{place}.new")
        beside.write_text(json.dumps(took))
        beside.replace(f"{place}.json")
    threading.Event().wait()  # until the benchmark ends the cluster


if __name__ == "__main__":
    main()
