"""Fills between holders of one process: `fill(source, target, runs)` is one slice, by the product's own messages."""

from __future__ import annotations

import threading
from collections.abc import Callable

from memory_group import MemoryGroup, Wire
from shoal.blocks.held import HeldBlocks
from shoal.exchange.fill_slices import receive_slice, send_slice
from shoal.group.device_group import StagedGroup
from shoal.group.group import Group
from shoal.process.device import Device
from shoal_protos.plan import Fill
from shoal_protos.runs import Runs


def pair() -> tuple[MemoryGroup, MemoryGroup]:
    """Both ends of a wire; whatever is waited for is there already."""
    wire = Wire(2, threading.Condition(threading.RLock()))
    with wire.changed:
        return MemoryGroup(wire, 0, _at_once), MemoryGroup(wire, 1, _at_once)


def _at_once(done: Callable[[], bool]) -> None:
    assert done(), "what is waited for was not sent"


def fill(source: HeldBlocks, target: HeldBlocks, runs: Runs, expected: Runs | None = None) -> int:
    """Sends and takes in; returns the bytes. `expected`: all that the world fills; None: it was said before."""
    if expected is not None:
        target.expect(expected)
    here, there = pair()
    with here.wire.changed:
        return _slice(here, there, source, target, runs)


def fill_staged(device: Device, source: HeldBlocks, target: HeldBlocks, runs: Runs) -> int:
    """The same between two that lie on a device."""
    ends = pair()
    with ends[0].wire.changed:
        here, there = (StagedGroup(end, device) for end in ends)
        return _slice(here, there, source, target, runs)


def _slice(here: Group, there: Group, source: HeldBlocks, target: HeldBlocks, runs: Runs) -> int:
    slices = (Fill(0, 1, runs),)
    sends = send_slice(here, source, slices)
    for send in sends:
        send.wait()
    return receive_slice(there, target, slices)
