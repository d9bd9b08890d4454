"""What a worker's GPU is at, as its heartbeats tell it. For people: no decision and no bit depends on it.

A worker computes on one device, so it has one GPU at most. Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag


class Throttle(IntFlag):
    """Why a GPU's clocks are held down, several at once perhaps. Its own idleness is no reason here."""

    POWER_CAP = 1
    """Its power limit, as is usual at full load."""
    HEAT = 2
    POWER_BRAKE = 4
    """The machine's power supply asks for it."""
    SLOWDOWN = 8
    """The board has halved its clocks at least: for heat, power or current."""

    @property
    def names(self) -> tuple[str, ...]:
        """Each reason that applies: `power_cap`, `heat`, `power_brake`, `slowdown`."""
        return tuple(str(one.name).lower() for one in Throttle if one in self)


ALL_THROTTLES = Throttle(sum(Throttle))


@dataclass(frozen=True, slots=True)
class Gpu:
    """The figures of one GPU; None: it does not tell that one."""

    name: str = ""
    """Its model, `NVIDIA H100 80GB HBM3`; empty until it has been asked."""
    index: int = 0
    """Its number on its host, as `nvidia-smi` shows it."""
    use_ratio: float | None = None
    """Share of the last moment, a second at most, in which a kernel ran on it: 0 to 1."""
    memory_bytes: int | None = None
    """In use, by all processes."""
    memory_total_bytes: int | None = None
    celsius: float | None = None
    """Temperature of the chip."""
    throttled: Throttle | None = None
    why: str = ""
    """Why figures are missing, in a sentence; empty where none is."""


MOST_GPUS = 1 << 10
"""Numbers of GPUs on a host: each is a value of a metric's label."""
HIGHEST: Mapping[str, float] = {
    "use_ratio": 1.0,
    "memory_bytes": 1 << 50,
    "memory_total_bytes": 1 << 50,
    "celsius": 1000.0,
    "throttled": ALL_THROTTLES,
}
"""The highest value of each figure of `Gpu`; the lowest is 0."""


def is_possible(figure: str, value: float) -> bool:
    """Return whether a figure can have this value: what cannot be is not shown, and nothing else comes of it."""
    return 0 <= value <= HIGHEST[figure]  # false also where it is not a number
