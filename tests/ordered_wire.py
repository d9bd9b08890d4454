"""A wire without tags over gloo, for `OrderedGroup`: as strict as NCCL. What is carried blocks all behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from late_device import LateDevice
from over_gloo import over_gloos
from shoal.group.device_group import StagedGroup
from shoal.group.gloo import GlooGroup
from shoal.group.group import Group, Work
from shoal.group.learnt_order import Bulk
from shoal.group.ordered import CarriedMessage, OrderedGroup, Trust

ONE_TAG = 0
BULK = Bulk(frozenset({0, 1, 2, 5, 8}), answers=8)
"""Of the messages that tests send, those that go by the wire."""


class GlooWire:
    """A `Wire` over a group of its own. Messages of one batch are on their way together; the next batch comes after."""

    def __init__(self, below: Group) -> None:
        self._below = below
        self.carried = 0

    def carry(self, messages: Sequence[CarriedMessage]) -> Callable[[], None]:
        works: list[Work] = []
        for message in messages:
            act = self._below.send if message.post.sends else self._below.receive
            works.append(act(message.tensor, message.post.peer, ONE_TAG))
        self.carried += len(works)
        return lambda: self._below.wait(works)

    def abort(self) -> None:
        self._below.abort()

    def close(self) -> None:
        self._below.close()


def ordered_over_gloo(size: int, act: Callable[[Group], object]) -> None:
    """Each member of an ordered group of so many, in a thread of its own, with a device that is late."""

    def member(groups: Sequence[Group]) -> None:
        host, other = groups
        assert isinstance(host, GlooGroup)
        device = LateDevice(host.rank)
        staged = StagedGroup(host, device, posts_beside=True)
        group = OrderedGroup(staged, host, GlooWire(other), device, BULK, Trust())
        try:
            act(group)
            group.all_gather(torch.zeros(1, dtype=torch.uint8))  # nobody leaves before all are done
        finally:
            group.close()

    over_gloos(size, 2, member)
