"""What a worker of the elastic benchmarks runs: an ordinary Shoal script that also notes when each step was committed.

`train.py --size 10M --lanes 4 --mirrors 1`. Every process appends one JSON line per committed step to the file that
`BENCH_STEPS` names; steps.py reads it. Started by a controller's launcher or by cluster.py.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import model
import shoal
from turns import Turns

STEPS = 1_000_000
"""No benchmark gets there: its cluster ends the workers."""


def initialize(
    size: str,
    section: Mapping[str, object],
    micro_batch: int = model.MICRO_BATCH,
    stage: int = 1,
    optimizer: str = "adamw",
) -> shoal.Engine:
    """The engine of all benchmarks. `section`: `shoal` of the config."""
    gpt = model.build(size)
    return shoal.initialize(
        model=gpt,
        config={
            "train_micro_batch_size_per_gpu": micro_batch,
            "zero_optimization": {"stage": stage},
            "shoal": {"max_steps": STEPS, **section},
        },
        dataset=model.Windows(),
        optimizer=model.optimizers(gpt, optimizer),
    )


def note(file: int, engine: shoal.Engine, began: float = 0.0) -> None:
    """One write to a file that is open for appending is one line, whoever else writes. `began`: when the
    step's first lane did here.
    """
    line = {
        "time": time.time(), "worker": os.environ["SHOAL_WORKER_ID"], "step": engine.global_step,
        "generation": engine.generation, "lanes": len(engine.lanes), "cpu": time.process_time(),
        "began": began,
    }  # fmt: skip
    os.write(file, json.dumps(line).encode() + b"\n")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A worker of the benchmarks.")
    parser.add_argument("--size", choices=list(model.SIZES), default="10M")
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--mirrors", type=int, default=1)
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: with AdamW beside")
    parser.add_argument("--beside", nargs="+", default=["ddp", "zero"], help="what takes turns with it (ddp.py)")
    parser.add_argument("--workers", type=int, default=0, help="one for each lane, unless given")
    parser.add_argument("--rounds", type=int, default=9, help="of each of those")
    parser.add_argument("--steps", type=int, default=3, help="of a round")
    parser.add_argument("--turns", type=Turns.from_text, default=Turns(), help="with other clusters (turns.py)")
    return parser.parse_args()


def main() -> None:
    given = options()
    train(initialize(given.size, {"lanes": given.lanes, "mirrors": given.mirrors}, stage=given.stage))


def train(engine: shoal.Engine, lane: Callable[[Any], None] | None = None) -> None:
    """The loop. `lane`: what trains a lane, given its batch, where it is no forward of the model."""
    file = os.open(os.environ["BENCH_STEPS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    noted, began = 0, 0.0
    for batch in engine:
        if not (began or engine.warming_up):
            began = time.time()
        if lane is None:
            engine.backward(engine.module(**batch))
        else:
            lane(batch)
        engine.step()
        if engine.global_step > noted and not engine.warming_up:
            noted = engine.global_step
            note(file, engine, began)
            began = 0.0


if __name__ == "__main__":
    main()
