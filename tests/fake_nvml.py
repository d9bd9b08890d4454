"""An NVML for tests: the functions of `nvidia-ml-py` that Shoal calls, over the figures of `gpu_figures.csv`.

The file has what `nvidia-smi` would show of an H100 (81,559 MiB) that begins to train, pauses for an evaluation, and
gets too hot. Constants, errors and their texts are the package's own. `unsupported` names functions that refuse.
"""

from __future__ import annotations

import csv
import threading
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

MIB = 1 << 20
TOTAL_MIB = 81_559
NAME = "NVIDIA H100 80GB HBM3"
UUID = "b5a7c1de-0000-4000-8000-0123456789ab"
FIGURES = [
    {name: int(value, 0) for name, value in row.items()}
    for row in csv.DictReader((Path(__file__).parent / "gpu_figures.csv").read_text().splitlines())
]


class FakeNvml:
    """In place of the module `pynvml`: one GPU, or a part of one (`mig`)."""

    def __init__(self, index: int = 3, unsupported: Collection[str] = (), mig: bool = False, ahead: int = 0) -> None:
        self.index, self.unsupported, self.mig = index, unsupported, mig
        self.looks = ahead
        """How often its use was asked: each time it shows the next line of the figures."""
        self.threads: set[str] = set()
        """That asked."""
        self.answers = threading.Event()
        """While it is not set, no question is answered."""
        self.answers.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        self._ask("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != f"{'MIG' if self.mig else 'GPU'}-{UUID}":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "part" if self.mig else "board"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        assert handle == "part"
        return "board"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return NAME

    def nvmlDeviceGetIndex(self, handle: str) -> int:
        self._of_a_board(handle)
        return self.index

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._ask("nvmlDeviceGetUtilizationRates")
        if handle == "part":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self.looks += 1
        return SimpleNamespace(gpu=self._now["use"], memory=0)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self._ask("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(used=self._now["memory_mib"] * MIB, total=TOTAL_MIB * MIB, free=0)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        self._of_a_board(handle)
        self._ask("nvmlDeviceGetTemperature")
        return self._now["celsius"]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        self._of_a_board(handle)
        self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        return self._now["reasons"]

    @property
    def _now(self) -> dict[str, int]:
        return FIGURES[max(0, self.looks - 1) % len(FIGURES)]

    def _ask(self, function: str) -> None:
        self.threads.add(threading.current_thread().name)
        assert self.answers.wait(60)
        if function in self.unsupported:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _of_a_board(self, handle: str) -> None:
        if handle == "part":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
