"""Parameters that the CPU has updated go where others read them: up to the device, or to their place on the host.

Called by the held blocks that update on the CPU a model that is on a device, host_blocks.py and filed_device_blocks.py;
knows neither blocks in files nor when a copy is waited for.
"""

from __future__ import annotations

from torch import Tensor

from shoal.blocks.optimizer_step import Segment
from shoal.process.device import Device, DeviceCopy


def bring_up(
    device: Device,
    segment: Segment,  # updated; its parameter is (elements,) on the host
    place: Tensor,  # (elements,) of the bucket's dtype, on the device or on the host
) -> DeviceCopy | None:
    """Begins to copy them to their place, master weights rounded; whatever reads the place on the device comes after.

    None: they are there already, as where the place is on the host. The copy reads the segment's parameter where that
    has no master weights, which may change only when it is done.
    """
    rounded = segment.parameter
    if not device.holds(place):
        if segment.has_master:
            place.copy_(rounded)
        return None
    if segment.has_master:
        rounded = device.pinned(place.numel(), place.dtype)
        rounded.copy_(segment.parameter)
    copy = device.to_device(rounded, place, device.promise(place))
    copy.join()
    if segment.has_master:
        device.give_back(rounded)
    return copy
