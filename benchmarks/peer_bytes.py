"""What memory.py compares with: bytes of tensors of PyTorch's own ways (ddp.py), by the same counter, as JSON.

    python benchmarks/peer_bytes.py --way "fsdp2 reshard" --size 10M --workers 4

The variables of `tensor_bytes.preloaded` must be set. Printed is the worker that holds most.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from multiprocessing.synchronize import Barrier
from pathlib import Path

import model
import torch
import torch.distributed as dist
from ddp import PATIENCE_SECONDS, WAYS, baseline
from tensor_bytes import TensorBytes

STEPS = 5
"""Before anything is counted, and then counted."""


def _member(rank: int, place: str, given: argparse.Namespace, all_done: Barrier) -> None:
    counter = TensorBytes()
    dist.init_process_group("gloo", init_method=f"file://{place}/group", rank=rank, world_size=given.workers)
    before = counter.now
    step = baseline(rank, given.workers, given.size, given.lanes or given.workers, given.way)
    for _ in range(STEPS):
        step()
    dist.barrier()
    rest = counter.now - before
    counter.forget_most()
    for _ in range(STEPS):
        step()
    result = {"rest": rest, "most": counter.most - before}
    (Path(place) / f"{rank}.json").write_text(json.dumps(result))
    all_done.wait(PATIENCE_SECONDS)  # see ddp.py
    del step
    gc.collect()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes of tensors of PyTorch's own ways.")
    parser.add_argument("--way", choices=WAYS, default="fsdp2 reshard")
    parser.add_argument("--size", choices=list(model.SIZES), default="10M")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--lanes", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        all_done = torch.multiprocessing.get_context("spawn").Barrier(given.workers)
        torch.multiprocessing.spawn(_member, (place, given, all_done), given.workers)
        found = [json.loads((Path(place) / f"{rank}.json").read_text()) for rank in range(given.workers)]
    print(json.dumps(max(found, key=lambda one: one["most"])))


if __name__ == "__main__":
    main()
