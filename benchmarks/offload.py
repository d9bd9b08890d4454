"""Optimizer state in a file against the disk that it is on: `python benchmarks/offload.py FOLDER --millions 85`.

AdamW with master weights, 12 bytes per parameter. In turn: the disk alone (all of the file read, then all of it
written, in pieces of 12 MiB), the update with 1, 2, 3 and 4 buffers, and the update in memory. An update reads and
writes as many bytes as the disk alone, so its share of the disk's speed is the disk's time by the update's. Wanted with
three buffers: 0.8. Memory is that of the buffers, and the peak of an update above what the process has before it.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from shoal.blocks.flat import adopt, empty_flats, lay_out_model, trainable
from shoal.blocks.held import HeldBlocks
from shoal.blocks.segments import Segments
from shoal.blocks.state_home import InMemory
from shoal.blocks.update_place import BesideParameters
from shoal.blocks.values import WholeValues
from shoal.core.layout import Layout, Stretch
from shoal.offload.state_file import IN_MEMORY, StateFile, folder_type
from shoal.offload.state_pieces import PieceStore
from shoal.offload.state_place import InFile
from shoal.offload.transfers import Transfers
from shoal_protos.runs import every
from tables import show, spread, verdict
from torch import Tensor, nn

BUFFERS = (1, 2, 3, 4)
WANTED = 0.8
BUFFERS_WANTED = 3
PIECE_BYTES = 12 << 20
MIB = 1 << 20
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Zeros:
    """First values of master weights."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def of(self, stretch: Stretch) -> Tensor:
        return torch.zeros(stretch.blocks * self._layout.block_elements)


class Setup:
    """The same blocks held in a file and in memory."""

    def __init__(self, folder: str, millions: int) -> None:
        model = nn.ParameterList(nn.Parameter(torch.zeros(1 << 20, dtype=torch.bfloat16)) for _ in range(millions))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self.layout, parameters = lay_out_model(trainable(model, optimizer, half=torch.bfloat16))
        weights = WholeValues(self.layout, adopt(self.layout, parameters))
        self.gradients = WholeValues(self.layout, [flat.float().normal_() for flat in empty_flats(self.layout)])
        self.file = StateFile(folder)
        place = BesideParameters(self.layout, optimizer)
        in_memory, in_file = (Segments(self.layout, optimizer, weights, place) for _ in range(2))
        self.store = PieceStore(self.layout, self.file)
        self.kept, self.filed = HeldBlocks(InMemory(in_memory), {}), HeldBlocks(InFile(in_file, self.store), {})
        self.transfers = {count: Transfers(self.file, count) for count in BUFFERS}
        for held in (self.filed, self.kept):
            held.hold(every(self.layout.blocks), Zeros(self.layout))
        for count in (*BUFFERS, 0):
            self.update(count)

    def raw(self) -> None:
        """All of the file in, then out again."""
        memory = memoryview(mmap.mmap(-1, PIECE_BYTES))
        for transfer in (self.file.read, self.file.write):
            for at in range(0, self.file.reserved_bytes, PIECE_BYTES):
                transfer(at, memory[: min(PIECE_BYTES, self.file.reserved_bytes - at)])

    def update(self, buffers: int) -> None:
        """With so many buffers; 0: in memory."""
        if not buffers:
            self.kept.apply(self.gradients, 1.0)
            return
        self.store.transfers = self.transfers[buffers]
        self.filed.apply(self.gradients, 1.0)


def memory_of(kind: str) -> int:
    """Bytes of this process, as the system counts them."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) << 10


def timed(act: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and MiB of the peak above what there was before."""
    CLEAR.write_text("5")
    before, began = memory_of("VmRSS"), time.perf_counter()
    act()
    return time.perf_counter() - began, (memory_of("VmHWM") - before) / MIB


def rows(setup: Setup, rounds: int) -> list[list[str]]:
    """In turn, so that a disk that is busy with something else is so for all."""
    raw, memory = list[float](), list[float]()
    took: dict[int, list[float]] = {count: [] for count in BUFFERS}
    peaks: dict[int, list[float]] = {count: [] for count in BUFFERS}
    for _ in range(rounds):
        raw.append(timed(setup.raw)[0])
        for count in BUFFERS:
            seconds, peak = timed(lambda count=count: setup.update(count))  # type: ignore[misc]
            took[count].append(seconds)
            peaks[count].append(peak)
        memory.append(timed(lambda: setup.update(0))[0])
    moved = 2 * setup.store.file_bytes()
    head = [["disk alone", spread(raw), rate(moved, raw), "1", "", ""], ["in memory", spread(memory), "", "", "", ""]]
    for count in BUFFERS:
        found = share(raw, took[count])
        memory_mib = setup.transfers[count].bytes / MIB + max(peaks[count])
        head.append(
            [
                f"{count} buffer{'s'[: count != 1]}", spread(took[count]), rate(moved, took[count]), f"{found:.2f}",
                verdict(WANTED / found, 1.0) if count == BUFFERS_WANTED else "", f"{memory_mib:.1f}",
            ]
        )  # fmt: skip
    return head


def rate(moved: int, seconds: Sequence[float]) -> str:
    return f"{moved / median(seconds) / 1e9:.2f}"


def share(raw: Sequence[float], seconds: Sequence[float]) -> float:
    """Of the disk's speed: the median of what neighbours in time give."""
    return median(alone / one for alone, one in zip(raw, seconds, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Optimizer state in a file against its disk.")
    parser.add_argument("folder", help="on the disk that is measured")
    parser.add_argument("--millions", type=int, default=85, help="parameters, in units of 2^20")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    kind = folder_type(given.folder)
    if kind in IN_MEMORY:
        sys.exit(f"{given.folder} is on {kind}, which is memory; name a folder on a disk.")
    torch.set_num_threads(1)
    setup = Setup(given.folder, given.millions)
    size = setup.store.file_bytes()
    how = "direct" if setup.file.is_direct else "buffered"
    head = ["", "read and written, s", "GB/s", "of the disk", f"{WANTED} ÷ that", "memory, MiB"]
    title = f"Update of {given.millions} × 2^20 parameters, {size / 1e9:.2f} GB of state, {kind}, {how}"
    show(title, head, rows(setup, given.rounds))


if __name__ == "__main__":
    main()
