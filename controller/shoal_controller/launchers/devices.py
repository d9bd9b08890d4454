"""Which CUDA device a worker of the local launcher is given: one of those that fewest workers have. Pure."""

from __future__ import annotations

from collections.abc import Sequence

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def device_variable(devices: Sequence[str], taken: Sequence[str]) -> dict[str, str]:
    """The variable by which a process sees its device alone; none where there are no devices.

    `taken`: of each worker that lives, the device that it was given. With more workers than devices some share one.
    """
    if not devices:
        return {}
    return {VISIBLE_DEVICES: min(devices, key=lambda device: (taken.count(device), devices.index(device)))}
