"""What the GPU that this worker computes on is at, asked of NVML (the package `nvidia-ml-py`) every few seconds.

The session has a `GpuWatch` where the model lies on an NVIDIA GPU, and puts its newest figures into heartbeats. It asks
on a thread of its own, because a driver in trouble answers late or never: neither training nor a heartbeat waits for
it. What the GPU does not tell is a sentence, in its figures and once in the log. Nothing else of Shoal imports the
package.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal_protos.gpu import HIGHEST, MOST_GPUS, Gpu, Throttle, is_possible
from shoal_protos.training_log import get_logger

from shoal.process.device import Device, gpu_uuid

EVERY_SECONDS = 5.0
OLD_SECONDS = 30.0
"""Without an answer for so long, its figures are not known."""
END_SECONDS = 2.0
"""A driver that does not answer is not waited for: the thread ends with its process."""
NEEDS = {
    "LibraryNotFound": "give the container the driver's tools: NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    "DriverNotLoaded": "load the driver on this machine",
}
"""What to do where NVML cannot be asked at all, by its error's name."""

log = get_logger("shoal")


def _import_nvml() -> Any:
    import pynvml

    return pynvml


def _throttled(nvml: Any, handle: Any) -> dict[str, Any]:
    reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    heat = nvml.nvmlClocksEventReasonSwThermalSlowdown | nvml.nvmlClocksEventReasonHwThermalSlowdown
    found = {
        Throttle.POWER_CAP: nvml.nvmlClocksEventReasonSwPowerCap,
        Throttle.HEAT: heat,
        Throttle.POWER_BRAKE: nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
        Throttle.SLOWDOWN: nvml.nvmlClocksEventReasonHwSlowdown,
    }
    return {"throttled": Throttle(sum(throttle for throttle, bits in found.items() if reasons & bits))}


def _memory(nvml: Any, handle: Any) -> dict[str, Any]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_bytes": memory.used, "memory_total_bytes": memory.total}


def _temperature(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"celsius": float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))}


def _use(nvml: Any, handle: Any) -> dict[str, Any]:
    return {"use_ratio": float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100}


QUERIES: Mapping[str, Callable[[Any, Any], dict[str, Any]]] = {
    "use": _use, "memory": _memory, "temperature": _temperature, "throttling": _throttled,
}  # fmt: skip
"""Each returns figures of `Gpu` by their names."""
OF_THE_BOARD = ("temperature", "throttling")
"""What the parts of a GPU (MIG) have in common."""


def _check(answer: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a figure that cannot be, without its value: a value that changes fills no log."""
    for figure, value in answer.items():
        if not is_possible(figure, value):
            raise ValueError(f"the driver's answer is not within 0 to {HIGHEST[figure]:g}")


@dataclass(frozen=True, slots=True)
class _Found:
    """A GPU that has been found, or a part of one."""

    nvml: Any
    part: Any
    """Its handle."""
    board: Any
    """That of the whole GPU."""
    name: str
    index: int

    @classmethod
    def of(cls, nvml: Any, uuid: str) -> _Found:
        """Raises `NVMLError`."""
        nvml.nvmlInit()
        try:
            part = board = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError_NotFound:
            part = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
            board = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
        name = nvml.nvmlDeviceGetName(part)
        text = name.decode(errors="replace") if isinstance(name, bytes) else name  # bytes: an older package
        return cls(nvml, part, board, text, nvml.nvmlDeviceGetIndex(board) % MOST_GPUS)

    def figures(self) -> Gpu:
        """All that it tells, and why the rest is missing."""
        found: dict[str, Any] = {}
        missing: list[str] = []
        for name, ask in QUERIES.items():
            try:
                answer = ask(self.nvml, self.board if name in OF_THE_BOARD else self.part)
                _check(answer)
                found |= answer
            except Exception as error:  # an older package lacks functions, and a driver may answer anything
                missing.append(f"{name} ({error})")
        why = f"GPU {self.index} ({self.name}) does not tell its {', '.join(missing)}" if missing else ""
        return Gpu(self.name, self.index, why=why, **found)


class GpuWatch:
    """Asks from `start` to `close`. `uuid`: of the GPU; `nvml`: imports the package's module."""

    def __init__(self, uuid: str, nvml: Callable[[], Any] = _import_nvml, every_seconds: float = EVERY_SECONDS) -> None:
        self._uuid, self._nvml, self._every = uuid, nvml, every_seconds
        self._newest: Gpu | None = None
        self._answered = time.monotonic()
        self._logged: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-gpu", daemon=True)

    @classmethod
    def of(cls, device: Device) -> GpuWatch | None:
        """Return the watch of a device, not started; None where it is no NVIDIA GPU."""
        uuid = gpu_uuid(device.kind)
        return cls(uuid) if uuid else None

    @property
    def newest(self) -> Gpu | None:
        """Its newest figures; None: it has not been asked yet. Any thread may ask; it never waits."""
        known, silent = self._newest, time.monotonic() - self._answered
        if silent <= OLD_SECONDS or not self._thread.is_alive():
            return known
        why = f"NVML has not answered for {silent:.0f} s; look for the driver's errors (Xid) in the kernel's log"
        return Gpu(known.name, known.index, why=why) if known is not None else Gpu(why=why)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(END_SECONDS)

    def _run(self) -> None:
        try:
            gpu = _Found.of(self._nvml(), self._uuid)
            while not self._over.is_set():
                self._see(gpu.figures())
                self._over.wait(self._every)
        except Exception as error:  # an import may raise anything, and training goes on without figures
            self._see(Gpu(why=_why_none(error)))

    def _see(self, figures: Gpu) -> None:
        self._answered, self._newest = time.monotonic(), figures
        if figures.why and figures.why not in self._logged:
            self._logged.add(figures.why)
            log.warning("gpu_figures_missing", why=figures.why, means="training goes on; they are not shown")


def _why_none(error: Exception) -> str:
    """Return why no figure is known, and what to do."""
    if isinstance(error, ModuleNotFoundError) and error.name == "pynvml":
        return "no figures of the GPU: nvidia-ml-py is not installed; install shoal[gpu]"
    todo = NEEDS.get(type(error).__name__.removeprefix("NVMLError_"), "mend it, or ignore it: nothing else needs them")
    return f"no figures of the GPU: NVML cannot be asked ({error}); {todo}"
