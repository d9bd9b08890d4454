"""The worker's script of checkpoint.py: rounds of Shoal and of torch.distributed.checkpoint in turn, on the same cores.

`--task save`: per round each way trains some plain steps, saves within one, trains on until the save is whole, and some
plain steps again. `--task restore`: the world begins from Shoal's newest checkpoint, then both ways restore theirs in
turn. All members step together: a step's time is from all to all. Rank 0 writes what it saw as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import chain, repeat
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any, Protocol

import model
import shoal
import torch
import torch.distributed as dist
from ddp import in_turn
from interleaved import elastic
from sharded import Trained, replicated, sharded
from shoal.exchange.world import World
from train import initialize

PLAIN_STEPS = 3
"""On either side of a save: their median is what a step takes."""
MICRO_BATCH = 1
"""Short steps: what a save costs does not depend on the samples."""
EVER = 1_000_000_000

Figures = dict[str, float]


class Way(Protocol):
    """One way to train and save."""

    begun: float
    """When the last save's call began, here."""
    stall: float
    """Seconds that this call took."""

    def step(self) -> None: ...

    def saving_step(self) -> None:
        """A step at whose end a save begins."""

    @property
    def busy(self) -> bool:
        """Whether the save is still being written, as far as this member knows."""

    def whole(self) -> Path:
        """The file that is written last and makes the newest checkpoint one."""


class Elastic:
    """Shoal: rank 0 asks, and the save begins at the step's boundary."""

    def __init__(self, engine: shoal.Engine, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        self._batches = iter(engine)
        self.begun = self.stall = 0.0
        self._begin, self._summed = engine.parts.saving.begin, engine.parts.corruption.before_vote
        self._is_fresh = False
        engine.parts.saving.begin = self._timed  # type: ignore[method-assign]
        engine.parts.corruption.before_vote = self._timed_sums  # type: ignore[method-assign]

    def _timed(self, world: World) -> None:
        """A save begins: training waits for its copy."""
        self.begun = time.time()
        self._begin(world)
        self.stall, self._is_fresh = time.time() - self.begun, True

    def _timed_sums(self) -> None:
        """Before the vote that follows, training waits for the sums of its blocks."""
        began = time.time()
        self._summed()
        if self._is_fresh:
            self.stall, self._is_fresh = self.stall + time.time() - began, False

    def step(self) -> None:
        elastic(self._engine, self._batches)

    def saving_step(self) -> None:
        if self._engine.rank == 0:
            self._engine.save_checkpoint()
        self.step()

    @property
    def busy(self) -> bool:
        """Rank 0 is the last: it writes the manifest, and deletes the checkpoint before."""
        return self._engine.rank == 0 and self._engine.parts.saving.busy

    def whole(self) -> Path:
        return max(self._folder.glob("step-*")) / "manifest.json"


class Distributed:
    """DCP after a step, by one of the saves of `trained`."""

    def __init__(self, trained: Trained, folder: Path, save: Callable[[str], Any]) -> None:
        self._trained, self._folder, self._save = trained, folder, save
        self._writing: Future[Any] | None = None
        self._number = 0
        self.begun = self.stall = 0.0

    def step(self) -> None:
        self._trained.step()

    def saving_step(self) -> None:
        self.step()
        self._number += 1
        self.begun = time.time()
        self._writing = self._save(str(self._newest))
        self.stall = time.time() - self.begun

    @property
    def busy(self) -> bool:
        if not isinstance(self._writing, Future):
            return False
        if self._writing.done():
            self._writing.result()  # raises what the writing raised
        return not self._writing.done()

    @property
    def _newest(self) -> Path:
        return self._folder / f"{self._number:06d}"

    def whole(self) -> Path:
        return self._newest / ".metadata"

    def forget_older(self) -> None:
        """Shoal's retention has deleted the checkpoint before within the save; here it is not counted."""
        for old in self._folder.glob("*"):
            if old != self._newest:
                shutil.rmtree(old)


# ---- saving


def run(actions: Iterable[Callable[[], None]], more: Callable[[], bool] = lambda: True) -> tuple[list[float], float]:
    """Wall seconds of each action, from all to all, until nobody wants `more`; and CPU seconds of all processes."""
    took, processor = [], time.process_time()
    mark = time.perf_counter()
    for action in actions:
        action()
        wanted = torch.tensor([more()], dtype=torch.uint8)
        dist.all_reduce(wanted, dist.ReduceOp.MAX)
        took.append(time.perf_counter() - mark)
        mark = time.perf_counter()
        if not wanted:
            break
    used = torch.tensor([time.process_time() - processor])
    dist.all_reduce(used)
    return took, used.item()


def save(way: Way) -> Figures:
    """One round: plain steps, the step with the save and those beside its writing, plain steps."""
    before, used_before = run(repeat(way.step, PLAIN_STEPS))
    during, used = run(chain([way.saving_step], repeat(way.step)), more=lambda: way.busy)
    after, used_after = run(repeat(way.step, PLAIN_STEPS))
    stall = torch.tensor([way.stall])
    dist.all_reduce(stall, dist.ReduceOp.MAX)
    plain, whole = median(before + after), way.whole()
    return {
        "step": plain,
        "stall": stall.item(),
        "longest": max(during) - plain,
        "cost": sum(during) - plain * len(during),
        "processor": used - (used_before + used_after) / (2 * PLAIN_STEPS) * len(during),
        "write": whole.stat().st_mtime - way.begun,
        "bytes": sum(file.stat().st_blocks * 512 for file in whole.parent.iterdir()),
    }


def saves(engine: shoal.Engine, shoal_way: Elastic, given: argparse.Namespace) -> dict[str, list[Figures]]:
    fsdp, ddp = sharded(given.size, MICRO_BATCH), replicated(given.size, MICRO_BATCH)
    dcp = {
        "DCP save": Distributed(fsdp, given.folder / "dcp", fsdp.save),
        "DCP async_save": Distributed(fsdp, given.folder / "dcp-async", fsdp.async_save),
        "DCP async_save, nice": Distributed(fsdp, given.folder / "dcp-nice", fsdp.nice_async_save),
        "DDP, DCP async_save": Distributed(ddp, given.folder / "ddp-async", ddp.async_save),
    }
    ways: dict[str, Way] = {**dcp, "Shoal": shoal_way}
    found: dict[str, list[Figures]] = {name: [] for name in ways}
    for number in range(given.rounds + 1):
        for name, way in in_turn(ways.items(), number):
            figures = save(way)
            if number:  # the first one of a process finds its memory, and is not a round
                found[name].append(figures)
        if engine.rank == 0:
            for one in dcp.values():
                one.forget_older()
            print(f"round {number}: " + json.dumps({name: some[-1:] for name, some in found.items()}), flush=True)
        dist.barrier()
    return found


# ---- restoring


def timed(action: Callable[[], object]) -> Figures:
    """From all to all."""
    dist.barrier()
    began, processor = time.perf_counter(), time.process_time()
    action()
    dist.barrier()
    seconds = time.perf_counter() - began
    used = torch.tensor([time.process_time() - processor])
    dist.all_reduce(used)
    return {"seconds": seconds, "processor": used.item()}


def restores(engine: shoal.Engine, given: argparse.Namespace) -> dict[str, list[Figures]]:
    """Both ways end with the state in place, ready for the next step; the first of each fills a fresh process."""
    fsdp = sharded(given.size, MICRO_BATCH)
    newest = str(max((given.folder / "dcp").iterdir()))
    world = engine.context.world
    assert world is not None
    ways: dict[str, Callable[[], object]] = {
        "DCP load": lambda: fsdp.load(newest),
        "Shoal": lambda: engine.parts.loading.take_up(world),
    }
    found: dict[str, list[Figures]] = {name: [] for name in ways}
    for number in range(given.rounds + 1):
        for name, action in in_turn(ways.items(), number):
            found[name].append(timed(action))
    return {name: some[1:] for name, some in found.items()}


# ---- the script


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A worker of checkpoint.py.")
    parser.add_argument("--size", choices=list(model.SIZES), default="85M")
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--mirrors", type=int, default=1)
    parser.add_argument("--task", choices=["save", "restore"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    return parser.parse_args()


def main() -> None:
    given = options()
    place = os.environ["BENCH_STEPS"]
    checkpoint = {"path": str(given.folder / "shoal"), "keep": 1, "every_steps": EVER}
    section = {"lanes": given.lanes, "mirrors": given.mirrors, "checkpoint": checkpoint}
    engine = initialize(given.size, section, MICRO_BATCH)
    way = Elastic(engine, given.folder / "shoal")
    way.step()  # the world has begun
    group = f"file://{place}.group"
    dist.init_process_group("gloo", init_method=group, rank=engine.rank, world_size=engine.world_size)
    figures = saves(engine, way, given) if given.task == "save" else restores(engine, given)
    if engine.rank == 0:
        beside = Path(f"{place}.new")
        beside.write_text(json.dumps(figures))
        beside.replace(f"{place}.json")
    Event().wait()  # until the benchmark ends the cluster


if __name__ == "__main__":
    main()
