"""Bytes of tensors at the peak of what stage 3 does, by the allocator's own count: `test_peak_memory.py` starts it.

A process of its own, because the counter (benchmarks/tensor_bytes.c) is preloaded. A world of one, so that all there is
belongs to one worker; fills are made between two sets of held blocks. Prints JSON.
"""

from __future__ import annotations

import gc
import json
import mmap
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import crew
import torch
from crew import Crew, Strikes, Task, Worker, engine_of, train
from fills import fill_staged
from late_device import LateDevice
from shoal.blocks.flat import adopt, lay_out_model, trainable
from shoal.blocks.held import HeldBlocks
from shoal.blocks.shared_weights import SharedWeights
from shoal.blocks.values import WholeValues
from shoal.core.layout import Stretch
from shoal.offload.state_place import StatePlace, held_blocks
from shoal.process.device import HOST, Device
from shoal.process.host_memory import host_memory
from shoal.session.link_choice import AloneLink
from shoal.training.engine import Engine
from shoal_protos.runs import NO_BLOCKS, Runs, every
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from tensor_bytes import TensorBytes, in_torchs_memory, seen_bytes

WIDTH, LAYERS = 512, 6
UNIT = 4 * WIDTH * WIDTH
"""Bytes of the parameters of a layer, the largest unit."""
WARM = 2
"""Steps after which all memory is in use."""
PATIENCE_SECONDS = 300.0
"""Four workers of millions of parameters, on a busy machine."""


class Layers(nn.Module):
    """Units of a mebibyte each, if nothing else is asked for."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # (batch, length) both
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = torch.relu(layer(hidden))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


class CountedDevice(LateDevice):
    """Its host memory is not torch's: what the allocator counts lies on the device."""

    def pinned(self, elements: int, dtype: torch.dtype) -> Tensor:
        memory = torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize), dtype=dtype)
        self._pinned[self._key(memory)] = memory
        return memory


class Peaks:
    """Bytes above what was there when `begin` was called."""

    def __init__(self) -> None:
        self.counter, self.found = TensorBytes(), dict[str, int]()
        self._before = 0
        self.seen: Callable[[], int] = lambda: 0
        """Bytes that the allocator knows nothing of: they are taken as they come and given back as they go, so the most
        of both is at most both's most."""
        self._seen_most = 0

    def begin(self) -> None:
        gc.collect()  # what earlier parts have left would else go in the midst of this one
        self.counter.forget_most()
        self._seen_most = self.seen()
        self._before = self.counter.now + self._seen_most

    def look(self) -> None:
        """Between two parts of what is counted."""
        self._seen_most = max(self._seen_most, self.seen())

    def end(self, name: str) -> None:
        self.look()
        self.found[name] = self.counter.most + self._seen_most - self._before
        self.found[f"{name}, left"] = self.counter.now + self.seen() - self._before

    def of(self, name: str, call: Callable[[], object]) -> None:
        self.begin()
        call()
        self.end(name)


def in_training(peaks: Peaks, place: Path, stream: bool, device: Device = HOST, ending: str = "") -> None:
    """A plain step, and one that saves; after the loop a fingerprint and an export. `ending`: how their names end."""
    began = [False]

    def at_save(point: str, _: int) -> None:
        if point == "save":
            began[0] = True
            peaks.begin()

    def make(engine: Engine, batch: Any) -> None:
        engine.backward(engine.module(**batch))
        engine.step()

    def body(engine: Engine, batch: Any) -> None:
        name = ("streamed save" if stream else "save") + ending
        if engine.global_step == 2 and not stream:
            peaks.of(f"step{ending}", lambda: make(engine, batch))
        elif engine.global_step == 3:
            engine.save_checkpoint()
            make(engine, batch)
            assert began[0]
            peaks.end(name)
        else:
            make(engine, batch)

    saves = {"path": str(place / (("streamed" if stream else "saves") + ending)), "stream": stream}
    options = {"max_steps": 5, "lanes": 1, "stage": 3, "mirrors": 0, "shoal": {"checkpoint": saves}}
    task = Task(options, model=Layers, optimizer=adamw, scheduler=lambda _: None, body=body, device=lambda: device)
    engine = engine_of(task, AloneLink(), Strikes([], at_save))
    peaks.seen = lambda: seen_bytes(engine.context.state.memory)
    train(engine, task, lambda: None)
    if not stream:
        peaks.of(f"fingerprint{ending}", engine.fingerprint)
        peaks.of(f"export{ending}", lambda: engine.export(place / "model.safetensors"))
    engine.parts.saving.close()


def held_of(model: nn.Module) -> HeldBlocks:
    layout, parameters = lay_out_model(trainable(model, adamw(model)))
    flats = WholeValues(layout, adopt(layout, parameters))
    return held_blocks(StatePlace(), layout, adamw(model), flats, {}, keeps_weights=True)


def in_fills(peaks: Peaks, is_seen: bool = False) -> None:
    """One worker takes all blocks slice by slice; the numbers that blocks share differ in none. Then half of them go,
    out of the middle of every bucket. `is_seen`: others see its parameters.
    """
    source, target, ending = held_of(Layers()), held_of(Layers()), " seen" if is_seen else ""
    if is_seen:
        shared = SharedWeights(target.layout)
        target.shared = shared
        peaks.seen = lambda: shared.taken_bytes
    layout, blocks = source.layout, source.layout.blocks
    source.hold(every(blocks))
    gradients = WholeValues(layout, [torch.ones(bucket.elements) for bucket in layout.buckets])
    source.apply(gradients, 1.0)
    peaks.begin()
    target.expect(every(blocks))
    for first in range(0, blocks, 7):
        states = source.home.states(Runs(((first, min(first + 7, blocks)),)), with_weights=True)
        target.take({where: received(target, where, state) for where, state in states.items()})
        peaks.look()
    target.join()
    peaks.end(f"fill{ending}")
    apart = held_of(Layers())  # as after many changes
    if is_seen:
        apart_shared = SharedWeights(layout)
        apart.shared = apart_shared
        peaks.seen = lambda: shared.taken_bytes + apart_shared.taken_bytes
    for number in range(blocks):
        states = source.home.states(Runs(((number, number + 1),)), with_weights=True)
        apart.take({where: {k: copied(v) for k, v in state.items()} for where, state in states.items()})
    peaks.of(f"join{ending}", apart.join)
    kept = Runs((at, at + blocks // 8) for at in range(0, blocks // 8 * 8, blocks // 4))
    peaks.of(f"free{ending}", lambda: target.keep_only(kept))
    peaks.of(f"free all{ending}", lambda: target.keep_only(NO_BLOCKS))


def in_fills_on_a_device(peaks: Peaks) -> None:
    """By the product's own messages, which are staged in the host's memory; slices are of 7 blocks, of all buckets."""
    device, source, target = CountedDevice(), held_of(Layers()), held_of(Layers())
    layout, blocks = source.layout, source.layout.blocks
    source.hold(every(blocks))
    source.apply(WholeValues(layout, [torch.ones(bucket.elements) for bucket in layout.buckets]), 1.0)
    device.settle()
    peaks.begin()
    target.expect(every(blocks))
    for first in range(0, blocks, 7):
        fill_staged(device, source, target, Runs(((first, min(first + 7, blocks)),)))
    target.join()
    peaks.end("fill on a device")


def in_a_crew(peaks: Peaks, more: dict[str, Any], name: str) -> None:
    """Of all workers of a world of four: their devices' bytes at the most, from the third step on."""

    def look(worker: Worker, _: str, __: int) -> None:
        if worker.engine.context.state.step >= WARM:
            peaks.found[name] = max(peaks.found.get(name, 0), peaks.counter.most)
        peaks.counter.forget_most()

    options = {"max_steps": WARM + 1, "lanes": 4, "stage": 3, **more}
    model = partial(Layers, 768, 10)  # messages of a usual size are not packed
    task = Task(options, model=model, optimizer=adamw, scheduler=lambda _: None, device=CountedDevice)
    crew.PATIENCE_SECONDS = PATIENCE_SECONDS
    gc.collect()
    with Crew("abcd", task) as four:
        four.watchers.append(look)
        four.finish()


def received(target: HeldBlocks, where: Stretch, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As a fill leaves it."""
    found = {}
    for key, value in state.items():
        found[key] = target.memory_for(where, key, value.dtype).copy_(value) if value.dim() else value.clone()
    return found


def copied(value: Tensor) -> Tensor:
    return host_memory(value.numel(), value.dtype).copy_(value) if value.dim() else value.clone()


def main() -> None:
    in_torchs_memory()
    torch.set_num_threads(1)
    peaks = Peaks()
    if "crew" in sys.argv:
        for more, name in (({"mirrors": 0}, "alone"), ({"shoal": {"mirrors_on": "host"}}, "mirrors on the host")):
            in_a_crew(peaks, more, name)
        print(json.dumps(peaks.found))
        return
    in_training(peaks, Path(sys.argv[1]), stream=False)
    in_training(peaks, Path(sys.argv[1]), stream=True)
    for stream in (False, True):
        in_training(peaks, Path(sys.argv[1]), stream, CountedDevice(), " on a device")
    peaks.seen = lambda: 0
    in_fills(peaks)
    in_fills(peaks, is_seen=True)
    peaks.seen = lambda: 0
    in_fills_on_a_device(peaks)
    parameters = sum(one.nbytes for one in Layers().parameters())
    print(json.dumps({"parameters": parameters, "unit": UNIT, **peaks.found}))


if __name__ == "__main__":
    main()
