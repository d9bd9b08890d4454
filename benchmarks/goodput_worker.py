"""What the machines of goodput.py run: the benchmarks' GPT with AdamW, by Shoal, by DDP under torchrun, or by torchft.

    python goodput_worker.py shoal --size 1M --lanes 12 --work 0.1 --folder FOLDER

A step has so many micro-batches (`--lanes`). Each of them also sleeps for `--work` seconds, in place of the accelerator
that two cores are not: without it four processes would be no faster than two. Shoal and torchrun share a step's
micro-batches among the machines that are there; a replica of torchft trains its own part of them, so that its batch is
smaller with fewer replicas. Each process logs what it does (goodput_account.py) to the file that GOODPUT_LOG names.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

BEGAN = time.time()
SECOND = timedelta(seconds=1)


class Log:
    """The run's file, appended to by all processes: a write of one line is whole."""

    def __init__(self) -> None:
        self._file = os.open(os.environ["GOODPUT_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._machine = int(os.environ["GOODPUT_MACHINE"])

    def note(self, kind: str, step: int = 0, samples: int = 0, at: float | None = None) -> None:
        line = {"time": at or time.time(), "machine": self._machine, "kind": kind, "step": step, "samples": samples}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A process of goodput.py.")
    parser.add_argument("system", choices=["shoal", "torchrun", "torchft"])
    parser.add_argument("--size", default="1M")
    parser.add_argument("--lanes", type=int, default=12, help="micro-batches of a step")
    parser.add_argument("--work", type=float, default=0.1, help="seconds that each of them sleeps")
    parser.add_argument("--machines", type=int, default=4, help="how many the job wants")
    parser.add_argument("--mirrors", type=int, default=2, help="of Shoal")
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints")
    return parser.parse_args()


class Micro:
    """The micro-batches of the PyTorch systems, as Shoal's sampler would not: in the order of the text."""

    def __init__(self, given: argparse.Namespace) -> None:
        import model
        from torch.utils.data import default_collate

        self._windows, self._of, self._batch = model.Windows(), default_collate, model.MICRO_BATCH
        self._lanes = given.lanes

    def batch(self, step: int, lane: int) -> dict[str, Any]:
        at = (step * self._lanes + lane) * self._batch % (len(self._windows) - self._batch)
        return dict(self._of([self._windows[at + row] for row in range(self._batch)]))


def train_shoal(given: argparse.Namespace, log: Log) -> None:
    """A job's ordinary script."""
    from train import initialize

    saves = {"path": str(given.folder), "every_steps": given.save_every, "keep": 2}
    engine = initialize(given.size, {"lanes": given.lanes, "mirrors": given.mirrors, "checkpoint": saves})
    log.note("ready")
    noted = -1
    for batch in engine:
        loss = engine.module(**batch)
        time.sleep(given.work)
        engine.backward(loss)
        engine.step()
        if not engine.warming_up and engine.global_step > noted >= 0:
            log.note("step", engine.global_step, given.lanes)
        noted = max(noted, engine.global_step)


def train_torchrun(given: argparse.Namespace, log: Log) -> None:
    """DDP with a fixed global batch, which saves by DCP and loads the last save that was whole."""
    import model
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    gpt = model.build(given.size)
    parallel = DistributedDataParallel(gpt, gradient_as_bucket_view=True)
    optimizer, micro = model.adamw(gpt), Micro(given)
    whole, step = given.folder / "whole", 0
    if whole.exists():
        step = int(whole.read_text())
        weights, state = get_state_dict(parallel, optimizer)
        saved: dict[str, Any] = {"model": weights, "optimizer": state}
        dcp.load(saved, checkpoint_id=given.folder / str(step))
        set_state_dict(parallel, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    log.note("ready")
    while True:
        mine = range(rank, given.lanes, world)
        for lane in mine:
            with nullcontext() if lane == mine[-1] else parallel.no_sync():
                loss = parallel(**micro.batch(step, lane)) * world / given.lanes
                time.sleep(given.work)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        log.note("step", step, given.lanes)
        if step % given.save_every == 0:
            weights, state = get_state_dict(parallel, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=given.folder / str(step))
            if rank == 0:
                whole.with_suffix(".new").write_text(str(step))
                whole.with_suffix(".new").replace(whole)
                shutil.rmtree(given.folder / str(step - 2 * given.save_every), ignore_errors=True)
            dist.barrier()


def train_torchft(given: argparse.Namespace, log: Log) -> None:
    """A replica group of one process; a joiner heals from a peer."""
    import model
    import torch
    import torch.distributed as dist
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.ddp import DistributedDataParallel

    class Parallel(DistributedDataParallel):
        """As torchft's. The hook of 0.2.0 asserts where an all-reduce has failed; later ones return the bucket. DDP
        takes no annotation that is a text, as all are here.
        """

        @staticmethod
        def _comm_hook(state, bucket):
            state.allreduce(bucket.buffer()).wait()
            done: Any = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gpt = model.build(given.size)
    inner, micro = model.adamw(gpt), Micro(given)

    def load(state: dict[str, Any]) -> None:
        gpt.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=10 * SECOND), load_state_dict=load, min_replica_size=1, rank=0, world_size=1,
        state_dict=lambda: {"model": gpt.state_dict(), "optimizer": inner.state_dict()},
        timeout=10 * SECOND, quorum_timeout=60 * SECOND, connect_timeout=10 * SECOND, heartbeat_interval=SECOND / 10,
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=os.environ["GOODPUT_LIGHTHOUSE"],
        hostname="127.0.0.1", replica_id=f"machine{os.environ['GOODPUT_MACHINE']}_{os.getpid()}_",
    )  # fmt: skip
    parallel, optimizer = Parallel(manager, gpt), Optimizer(manager, inner)
    own, place = given.lanes // given.machines, 0
    log.note("ready")
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        for number in range(own):
            with nullcontext() if number == own - 1 else parallel.no_sync():
                loss = parallel(**micro.batch(before, place * own + number)) / own
                time.sleep(given.work)
                loss.backward()
        optimizer.step()
        committed = manager.current_step() > before
        log.note("step" if committed else "discarded", manager.current_step(), own * (manager.num_participants() or 1))
        place = manager.participating_rank() or 0


TRAIN = {"shoal": train_shoal, "torchrun": train_torchrun, "torchft": train_torchft}


def main() -> None:
    given, log = options(), Log()
    log.note("began", at=BEGAN)
    TRAIN[given.system](given, log)


if __name__ == "__main__":
    main()
