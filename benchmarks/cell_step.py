"""A step of two processes in plain torch over gloo, and in a cell: by tensor, context, expert or pipeline parallelism.

    python benchmarks/cell_step.py [--by tensor|context|expert|pipeline] [--size 10M] [--rounds 5] [--steps 12]

By tensor: `parallelize_module`. By context: an all-to-all of heads for tokens around attention, and in plain torch
`DistributedDataParallel` for the gradients. It needs an even number of heads: sizes 1M, 40M and 85M. By expert: each
perceptron is four experts, of which a token goes to two by `MoE`; in plain torch its all-to-all is gloo's, and DDP has
the rest of the model. By pipeline: torch's `Schedule1F1B` with four micro-batches; the head has a weight of its own.

The same model, plan, micro-batch, samples and AdamW. Each round starts both anew, one after the other; a step's seconds
are medians of a round, CPU seconds of both processes together. The medians of the rounds' ratios count: at most 1.10.
There is one cell and no mirror: nothing is exchanged but what the two processes exchange in plain torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, cast

import model
import torch
import torch.distributed as dist
from cluster import Cluster, Job, end_cleanly
from steps import until
from tables import Figure, note, show, spread, verdict
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PROCESSES = 2
BY = ("tensor", "context", "expert", "pipeline")
MICRO_BATCHES = 4
"""Of a pipeline's schedule."""
EXPERTS = 4
"""Of a layer."""
STEPS = 1_000_000
"""More than any run makes."""
WARM_STEPS = 3
TARGET = 1.10
PATIENCE_SECONDS = 600.0

Took = tuple[float, float]
"""Wall and CPU seconds of a step."""


def divided(size: str, mesh: Any) -> nn.Module:
    """The model with every perceptron divided."""
    gpt = model.build(size)
    for block in gpt.blocks:
        plan = {"widen": ColwiseParallel(), "narrow": RowwiseParallel()}
        parallelize_module(block, mesh, plan, src_data_rank=None)  # type: ignore[arg-type]
    return gpt


class HeadsForTokens(torch.autograd.Function):
    """Part i of the first dimension goes to process i; gradients take the same way back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        found = torch.empty_like(parts)
        dist.all_to_all_single(found, parts, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return HeadsForTokens.apply(gradient.contiguous(), ctx.group), None


class PartBlock(model.Block):
    """Of some of the tokens."""

    group: Any

    def forward(self, x: Tensor) -> Tensor:  # (B, T here, C) → (B, T here, C)
        batch, length, channels = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, PROCESSES, -1, model.HEAD_CHANNELS)
        traded = HeadsForTokens.apply(heads.permute(3, 2, 0, 4, 1, 5).contiguous(), self.group)
        query, key, value = traded.permute(1, 2, 3, 0, 4, 5).flatten(3, 4).unbind(0)  # all tokens, some of the heads
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        back = HeadsForTokens.apply(mixed.unflatten(2, (PROCESSES, -1)).permute(2, 0, 1, 3, 4).contiguous(), self.group)
        x = x + self.attended(back.permute(1, 3, 0, 2, 4).reshape(batch, length, channels))
        return x + self.narrow(nn.functional.gelu(self.widen(self.mlp_norm(x))))


class PartGPT(model.GPT):
    group: Any

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # (B, T), (B, T) → the mean loss of the tokens here
        at = torch.arange(inputs.shape[1])
        inputs, targets, at = (one.chunk(PROCESSES, -1)[self.group.rank()] for one in (inputs, targets, at))
        x = self.bytes(inputs) + self.places(at)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def of_part(size: str, group: Any) -> nn.Module:
    """The model, for a part of each sequence."""
    gpt = model.build(size)
    for module, kind in ((gpt, PartGPT), *((block, PartBlock) for block in gpt.blocks)):
        module.__class__, module.group = kind, group
    return gpt


class Routed(nn.Module):
    """Experts in the place of a perceptron."""

    def __init__(self, expert: nn.Module, channels: int, group: Any) -> None:
        from shoal.deepspeed.moe.layer import MoE

        super().__init__()
        self.moe = MoE(channels, expert, EXPERTS, PROCESSES, group=group, k=2, capacity_factor=1.25)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) → (B, T, C)
        output: Tensor = self.moe(x)[0]
        return output


def of_experts(size: str, group: Any) -> nn.Module:
    """The model, with experts that the processes divide."""
    gpt = model.build(size)
    for block in gpt.blocks:
        widen, narrow = cast(nn.Linear, block.widen), cast(nn.Linear, block.narrow)
        block.widen = Routed(nn.Sequential(widen, nn.GELU(), narrow), narrow.out_features, group)
        block.narrow = nn.Identity()
    return gpt


class Half(nn.Module):
    """The first stage of a pipeline, or the last one."""

    def __init__(self, size: str, number: int) -> None:
        super().__init__()
        gpt = model.build(size)
        cut = len(gpt.blocks) // 2
        self.blocks = gpt.blocks[cut:] if number else gpt.blocks[:cut]
        if number:
            vocabulary, channels = gpt.head.weight.shape
            self.norm, self.head = gpt.norm, nn.Linear(channels, vocabulary, bias=False)
        else:
            self.bytes, self.places = gpt.bytes, gpt.places

    def forward(self, x: Tensor) -> Tensor:  # (B, T) → (B, T, C) → (B, T, VOCABULARY)
        if hasattr(self, "bytes"):
            x = self.bytes(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def loss_of(
    logits: Tensor,  # (B, T, VOCABULARY)
    targets: Tensor,  # (B, T)
) -> Tensor:  # ()
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def scheduled(half: nn.Module, number: int, group: Any, **options: Any) -> Callable[[Any, Any], None]:
    """A step of the schedule for a batch, given what calls it."""
    stage = PipelineStage(half, number, PROCESSES, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, **options)

    def run(call: Any, batch: Any) -> None:
        inputs = () if number else (batch["inputs"],)
        call(schedule.step, *inputs, target=batch["targets"] if number else None)

    return run


def adamw(gpt: nn.Module) -> torch.optim.AdamW:
    """As all benchmarks have it; a fused one takes no DTensors together with others."""
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for parameter in gpt.parameters():
        parts[isinstance(parameter, DTensor)].append(parameter)
    return torch.optim.AdamW([{"params": part} for part in parts if part], lr=1e-4, fused=True)


def measured(step: Callable[[], None], steps: int) -> Took:
    for _ in range(WARM_STEPS):
        step()
    took: list[Took] = []
    for _ in range(steps):
        wall, processor = time.perf_counter(), time.process_time()
        step()
        took.append((time.perf_counter() - wall, time.process_time() - processor))
    return median(one[0] for one in took), median(one[1] for one in took)


def plain(given: argparse.Namespace) -> None:
    """One process of plain torch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{given.place}/store", rank=given.rank, world_size=PROCESSES)
    gpt: nn.Module
    if given.by == "context":
        gpt = nn.parallel.DistributedDataParallel(of_part(given.size, dist.group.WORLD))
    elif given.by == "expert":
        gpt = of_experts(given.size, dist.group.WORLD)
        apart = [name for name, _ in gpt.named_parameters() if "deepspeed_experts" in name]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(gpt, apart)
        gpt = nn.parallel.DistributedDataParallel(gpt)
    elif given.by == "pipeline":
        gpt = Half(given.size, given.rank)
        run = scheduled(gpt, given.rank, dist.group.WORLD, loss_fn=loss_of)
    else:
        gpt = divided(given.size, dist.device_mesh.init_device_mesh("cpu", (PROCESSES,)))
    optimizer, windows = adamw(gpt), model.Windows()
    samples = model.MICRO_BATCH * (MICRO_BATCHES if given.by == "pipeline" else 1)
    batches = _batches(windows, samples, *((given.rank, PROCESSES) if given.by == "expert" else ()))

    def step() -> None:
        optimizer.zero_grad()
        if given.by == "pipeline":
            run(lambda call, *inputs, **named: call(*inputs, **named), next(batches))
        else:
            gpt(**next(batches)).backward()
        optimizer.step()

    _tell(given.place, given.rank, measured(step, given.steps))
    dist.barrier()


def _batches(windows: model.Windows, samples: int, place: int = 0, places: int = 1) -> Iterator[Any]:
    """Of one of several places that train samples of their own, in turn."""
    at = place * samples
    while True:
        numbers = [(at + one) % len(windows) for one in range(samples)]
        yield torch.utils.data.default_collate([windows[number] for number in numbers])
        at += places * samples


def initialize(
    size: str, lanes: int, mirrors: int, micro_batch: int = model.MICRO_BATCH, by: str = "tensor"
) -> tuple[Any, Callable[[Any], None]]:
    """The engine of one process of a cell, and what trains a lane of it, given its batch."""
    import shoal

    settled = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "zero_optimization": {"stage": 1},
        "shoal": {
            "cell": {by: PROCESSES}, "lanes": lanes, "mirrors": mirrors, "max_steps": STEPS, "torch_threads": 1,
            "micro_batches_per_lane": MICRO_BATCHES if by == "pipeline" else 1,
        },
    }  # fmt: skip
    cell = shoal.cell(settled)
    gpt: nn.Module
    if by == "pipeline":
        gpt = cell.stages(lambda number: Half(size, number))
    elif by == "tensor":
        gpt = divided(size, cell.mesh["tensor"])
    else:
        gpt = (of_part if by == "context" else of_experts)(size, cell.group(by))
    optimizer = adamw if by == "pipeline" else adamw(gpt)  # a stage's, of each of them
    engine = shoal.initialize(model=gpt, config=settled, dataset=model.Windows(), optimizer=optimizer)
    if by != "pipeline":
        return engine, lambda batch: engine.backward(engine.module(**batch))
    number, options = cell.index(by), {"loss_fn": engine.loss_fn(loss_of), "scale_grads": False}
    run = scheduled(cast(nn.ModuleDict, engine.module)[str(number)], number, cell.group(by), **options)
    return engine, lambda batch: run(engine.run, batch)


def in_cell(given: argparse.Namespace) -> None:
    """One process of a cell."""
    engine, train = initialize(given.size, lanes=1, mirrors=0, by=given.by)
    batches = iter(engine)

    def step() -> None:
        before = engine.global_step
        while engine.global_step == before:
            train(next(batches))
            engine.step()

    step()  # the world has begun
    _tell(given.place, dist.get_rank(), measured(step, given.steps))
    while True:
        step()


def _tell(place: str, rank: int, took: Took) -> None:
    file = Path(place) / f"{rank}.new"
    file.write_text(json.dumps(took))
    file.rename(file.with_suffix(".json"))


def _both(place: str) -> Took | None:
    """None until both have told."""
    files = [Path(place) / f"{rank}.json" for rank in range(PROCESSES)]
    if not all(file.exists() for file in files):
        return None
    took = [json.loads(file.read_text()) for file in files]
    return max(one[0] for one in took), sum(one[1] for one in took)


def round_of(way: str, by: str, size: str, steps: int) -> Took:
    """Seconds of a step, in processes of its own."""
    with tempfile.TemporaryDirectory() as place:
        given = ("--way", way, "--by", by, "--place", place, "--steps", str(steps))
        if way == "cell":
            job = Job(size=size, workers=PROCESSES, lanes=1, script="cell_step.py", arguments=given)
            with Cluster(job):
                return until("the figures of both processes", lambda: _both(place), PATIENCE_SECONDS)
        command = [sys.executable, __file__, "--size", size, *given]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(PROCESSES)]
        try:
            return until("the figures of both processes", lambda: _both(place), PATIENCE_SECONDS)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by", choices=BY, default=BY[0])
    parser.add_argument("--size", choices=list(model.SIZES), default="10M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--way", choices=["plain", "cell"], help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    given, _ = parser.parse_known_args()
    if given.way:
        (plain if given.way == "plain" else in_cell)(given)
        return
    end_cleanly()
    took: dict[str, list[Took]] = {"plain": [], "cell": []}
    for _ in range(given.rounds):
        for way, rounds in took.items():
            rounds.append(round_of(way, given.by, given.size, given.steps))
    rows = [
        [way, spread([one[0] for one in rounds]), spread([one[1] for one in rounds])] for way, rounds in took.items()
    ]
    show(f"A step of {given.size} by {given.by} parallelism, two processes", ["", "step, s", "CPU s of both"], rows)
    pairs = list(zip(took["cell"], took["plain"], strict=True))
    for at, name in enumerate(("a step of a cell, of plain torch's", "the same, CPU")):
        ratios = [mine[at] / theirs[at] for mine, theirs in pairs]
        print(f"{name}: {median(ratios):.3f} ({verdict(median(ratios), TARGET)})")
        note(Figure(name, f"{given.size}, {given.by} {PROCESSES}", ratios, TARGET))


if __name__ == "__main__":
    main()
