"""CUDA devices of this machine, as CUDA_VISIBLE_DEVICES names them, without a library of NVIDIA's.

Asked by the settings of a controller, whose launcher gives each worker one, and by `shoal worker --processes`.
"""

from __future__ import annotations

from pathlib import Path

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def cuda_devices(visible: str | None) -> tuple[str, ...]:
    """Those that may be used. `visible`: what the variable says; None: it is not set."""
    if visible is not None:
        named = (device.strip() for device in visible.split(","))
        return tuple(device for device in named if device not in ("", "-1"))
    return tuple(map(str, range(len(list(Path("/dev").glob("nvidia[0-9]*"))))))
