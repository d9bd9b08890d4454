"""Which group exchanges tensors of a device: by NCCL where every member has a device of its own, else staged over gloo.

All members come to the same answer, because each has said at the rendezvous which device it has, or nothing. On the
host a group is just what the transport builds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from shoal.device import Accelerator, Device
from shoal.group.build import Cancellation, GroupSpec, Transport
from shoal.group.gloo import GlooGroup
from shoal.group.group import Group, WorldChanged
from shoal.group.nccl import build_nccl, own_device
from shoal.group.ordered import OrderedGroup, Wire
from shoal.group.staged import StagedGroup
from shoal.logs import get_logger

log = get_logger("shoal")

Connect = Callable[[GlooGroup, Device, Cancellation], Wire]


def groups_of(
    transport: Transport,
    device: Device,
    bulk: Collection[int],
    own: Callable[[torch.device], bytes] = own_device,
    connect: Connect | None = None,
) -> Transport:
    """Builds groups for tensors of `device`. `bulk`: tags of messages between devices; `own`: what tells this device
    from others, empty where there is to be no wire; `connect`: makes one. Other arguments than the defaults are for
    devices that NCCL does not know.
    """
    if device.on_host:
        return transport

    def build(spec: GroupSpec, cancellation: Cancellation) -> Group:
        host = transport(replace(spec, announces=own(device.kind)), cancellation)
        if host.size == 1:
            return host
        staged = StagedGroup(host, device, posts_beside=True)
        if not isinstance(host, GlooGroup) or not all_have_their_own(host.announced):
            return staged
        try:
            wire = (connect or _by_nccl)(host, device, cancellation)
        except WorldChanged:
            staged.close()
            raise
        group = OrderedGroup(staged, host, wire, device, bulk)
        log.info("exchange", over="NCCL", generation=spec.generation, workers=spec.size)
        if cancellation.is_cancelled:
            group.abort()
            group.close()
            raise WorldChanged(f"the building of the group of generation {spec.generation} was cancelled")
        return group

    return build


def all_have_their_own(announced: Sequence[bytes]) -> bool:
    """Whether each member has said which device it has, and no two the same."""
    return all(announced) and len(set(announced)) == len(announced)


def _by_nccl(host: GlooGroup, device: Device, cancellation: Cancellation) -> Wire:
    assert isinstance(device, Accelerator), f"{device.kind} is said to be a device for NCCL"
    return build_nccl(host, device, cancellation)
