"""Exports and reshapes of a checkpoint of cells: `python benchmarks/cell_state.py [--size 85M] [--rounds 7]`.

One process trains a step of the model as two stages whose matrices say how they are cut, and saves. `shoal reshape`
makes of it a checkpoint of cells of four, tensor 2 × pipeline 2. Then both are exported in turns, each in a process of
its own: seconds and CPU seconds of the export itself, without imports. The medians of the rounds' ratios count: at most
1.5. And both ways are reshaped: at most 1.5 of the largest tensor in memory above what there was when the old
checkpoint was open, by the kernel's count, looked at every 2 ms. Files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import model
import torch
from cell_step import Half, adamw, loss_of
from tables import Figure, note, show, spread, verdict

TARGET = 1.5
STAGES = 2
CUT = {"query_key_value.weight": 0, "widen.weight": 0, "widen.bias": 0, "attended.weight": 1, "narrow.weight": 1}
"""Along which dimension, by the end of a name."""


def make(size: str, place: str) -> None:
    """A checkpoint of one process."""
    import shoal

    lane = {"cell": {}, "lanes": 1, "max_steps": 1, "checkpoint": {"path": place, "every_steps": 1}}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "shoal": lane}
    cell = shoal.cell(config)

    def build(number: int) -> torch.nn.Module:
        half = Half(size, number)
        for name, parameter in half.named_parameters():
            for ending, dim in CUT.items():
                if name.endswith(ending):
                    shoal.sharded(parameter, dim=dim)
        return half

    stages = cell.stages(build, STAGES)
    engine = shoal.initialize(model=stages, config=config, dataset=model.Windows(), optimizer=adamw)
    for batch in engine:
        engine.backward(loss_of(stages["1"](stages["0"](batch["inputs"])), batch["targets"]))
        engine.step()


def exported(place: str, file: str) -> dict[str, float]:
    """Seconds, and CPU seconds."""
    from shoal.checkpoint.catalogue import resolve
    from shoal.checkpoint.export import export

    found = resolve(None, place, print)
    assert found is not None
    reader = found.reader()
    wall, processor = time.perf_counter(), time.process_time()
    export(reader, Path(file), None)
    return {"seconds": time.perf_counter() - wall, "processor": time.process_time() - processor}


def reshaped(place: str, new: str, tensor: int, pipeline: int) -> dict[str, float]:
    """Bytes above rest, and the largest tensor's."""
    from shoal.checkpoint.catalogue import resolve
    from shoal.checkpoint.reshaping import reshape
    from shoal.checkpoint.storage import open_storage
    from shoal_protos.shape import Shape

    found = resolve(None, place, print)
    assert found is not None
    largest = max(torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in found.manifest.blocks.wholes())
    found_bytes, over = [_own_bytes()], threading.Event()

    def look() -> None:
        while not over.wait(0.002):
            found_bytes.append(_own_bytes())

    looking = threading.Thread(target=look)
    looking.start()
    reshape(found, open_storage(new), Shape(tensor, pipeline))
    over.set()
    looking.join()
    return {"above": max(found_bytes) - found_bytes[0], "largest": largest}


def _own_bytes() -> int:
    """Of the process, without files that it has mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def _in_a_process(*arguments: object) -> dict[str, float]:
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=list(model.SIZES), default="85M")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--place", help="where checkpoints are written (default: the temporary folder)")
    parser.add_argument("--way", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.way:
        way, *more = given.way
        if way == "make":
            make(given.size, *more)
            print("{}")
        else:
            found = exported(*more) if way == "export" else reshaped(*more[:2], *map(int, more[2:]))
            print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory(dir=given.place) as folder:
        measure(given.size, given.rounds, folder)


def measure(size: str, rounds: int, folder: str) -> None:
    """All of it, in processes of their own."""
    _in_a_process("--size", size, "--way", "make", f"{folder}/one")
    tall = _in_a_process("--way", "reshape", f"{folder}/one", f"{folder}/four", 2, STAGES)
    back = _in_a_process("--way", "reshape", f"{folder}/four", f"{folder}/back", 1, 1)
    exports: dict[str, list[dict[str, float]]] = {"one": [], "four": []}
    for _ in range(rounds):
        for name, found in exports.items():
            found.append(_in_a_process("--way", "export", f"{folder}/{name}", f"{folder}/{name}.safetensors"))
    rows = [[name, *(spread([one[key] for one in found]) for key in found[0])] for name, found in exports.items()]
    show(f"An export of {size} parameters", ["checkpoint of", "s", "CPU s"], rows)
    for key, title in (("seconds", "an export of cells of four, of one process's"), ("processor", "the same, CPU")):
        ratios = [mine[key] / other[key] for mine, other in zip(exports["four"], exports["one"], strict=True)]
        print(f"{title}: {median(ratios):.3f} ({verdict(median(ratios), TARGET)})")
        note(Figure(title, f"{size}, tensor 2, pipeline 2", ratios, TARGET))
    for reshaped, way in ((tall, "1 → 4 processes"), (back, "4 → 1")):
        ratio = reshaped["above"] / reshaped["largest"]
        megabytes = f"{reshaped['above'] / 1e6:.1f} MB of {reshaped['largest'] / 1e6:.1f}"
        print(f"a reshape: memory above rest, of the largest tensor's, {way}: {ratio:.2f}, {megabytes} "
              f"({verdict(ratio, TARGET)})")  # fmt: skip
        note(Figure("a reshape: memory above rest, of the largest tensor's", f"{size}, {way}", [ratio], TARGET))


if __name__ == "__main__":
    main()
