"""Groups in memory, for engines that share one process.

A message lands in its tensor the moment that both ends are posted, as over a network, and not when it is waited for: so
whatever is posted too early tears what it lands in. Guarded by the lock of `changed`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from shoal.group.build import gather
from shoal.group.device_group import StagedGroup
from shoal.group.group import AnyOrder, Group, GroupProgress, MessageOrder, WorldChanged
from shoal.process.device import Device
from torch import Tensor

Way = tuple[int, int, int]
"""From, to, tag."""
Wait = Callable[[Callable[[], bool]], None]
"""Gives the lock away until it is true."""


class Wire:
    """What is on its way between the members of one group; `posts` has every post in order."""

    def __init__(self, size: int, changed: threading.Condition) -> None:
        self.size, self.changed = size, changed
        self.gone: set[int] = set()
        """Whose connections are cut: nothing lands any more, in them or of them."""
        self.closed: set[int] = set()
        """Who is through: what they have sent still lands, as over gloo, where a send ends after a receive."""
        self.arrived: dict[Way, deque[Tensor]] = defaultdict(deque)
        self.awaited: dict[Way, deque[Posted]] = defaultdict(deque)
        self.served: dict[tuple[int, int], Callable[[int, Tensor], None]] = {}
        """By rank and tag, who is called with messages."""
        self.posts: list[tuple[str, Way]] = []
        self.bytes = 0
        """Of all messages that were sent."""

    def leave(self, rank: int) -> None:
        """This member's connections are cut."""
        self.gone.add(rank)
        self.changed.notify_all()

    def close(self, rank: int) -> None:
        """This member neither sends nor takes anything any more."""
        self.closed.add(rank)
        self.changed.notify_all()

    def is_over(self, rank: int) -> bool:
        """Whether nothing lands in that member any more."""
        return rank in self.gone or rank in self.closed

    def carries(self, way: Way) -> bool:
        """Whether a message that was sent on this way may land."""
        return way[0] not in self.gone and not self.is_over(way[1])

    def match(self, way: Way) -> None:
        """Messages land, in order."""
        arrived, awaited = self.arrived[way], self.awaited[way]
        while arrived and awaited and self.carries(way):
            awaited.popleft().land(arrived.popleft())
        on_request = self.served.get(way[1:])
        while on_request is not None and arrived and self.carries(way):
            with contextlib.suppress(WorldChanged):
                on_request(way[0], arrived.popleft().view(torch.int64))
        self.changed.notify_all()


class Posted:
    """A `Work`."""

    def __init__(self, group: MemoryGroup, peer: int, tensor: Tensor | None) -> None:
        self._group, self._peer, self._tensor = group, peer, tensor
        self.done = tensor is None
        group.unwaited.add(self)

    def land(self, message: Tensor) -> None:
        assert self._tensor is not None
        assert message.nbytes == self._tensor.nbytes, f"{message.nbytes} bytes land in {self._tensor.nbytes}"
        self._tensor.data.reshape(-1).view(torch.uint8).copy_(message)  # as from the wire: no version counter sees it
        self.done = True

    def wait(self) -> None:
        self._group.await_(self._peer, lambda: self.done)
        self._group.unwaited.discard(self)


class Together:
    """Works that are waited for in one go."""

    def __init__(self, works: Sequence[Posted]) -> None:
        self._works = works

    @property
    def is_over(self) -> bool:
        return all(work.done for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class MemoryGroup:
    """A `Group`: one member's end of a wire."""

    order: MessageOrder = AnyOrder()

    def __init__(self, wire: Wire, rank: int, wait: Wait) -> None:
        self.wire, self.rank, self.size, self.progress = wire, rank, wire.size, GroupProgress()
        self._wait = wait
        self._broken: set[int] = set()
        self.unwaited: set[Posted] = set()
        """What was posted and not waited for."""

    @property
    def broken_peers(self) -> tuple[int, ...]:
        return tuple(sorted(self._broken))

    def send(self, tensor: Tensor, to: int, tag: int) -> Posted:
        way = self._post("send", (self.rank, to, tag))
        self.wire.arrived[way].append(tensor.detach().reshape(-1).view(torch.uint8).clone())
        self.wire.bytes += tensor.nbytes
        self.wire.match(way)
        return Posted(self, to, None)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Posted:
        assert tensor.is_contiguous()
        way, posted = self._post("receive", (source, self.rank, tag)), Posted(self, source, tensor.detach())
        self.wire.awaited[way].append(posted)
        self.wire.match(way)
        return posted

    def wait(self, works: Sequence[Posted]) -> None:
        self.begin_wait(works).wait()

    def begin_wait(self, works: Sequence[Posted]) -> Together:
        return Together(works)

    def all_gather(self, row: Tensor) -> Tensor:
        return gather(self, row)

    def serve(self, tag: int, elements: int, on_request: Callable[[int, Tensor], None]) -> None:
        """`on_request` is called on the thread of whoever asks."""
        self.wire.served[self.rank, tag] = on_request
        for peer in range(self.size):
            self.wire.match((peer, self.rank, tag))

    def abort(self) -> None:
        self.wire.leave(self.rank)

    def close(self) -> None:
        self.wire.close(self.rank)

    def _post(self, kind: str, way: Way) -> Way:
        self.wire.posts.append((kind, way))
        if self.wire.is_over(self.rank):
            raise WorldChanged("the group is closed")
        return way

    def await_(self, peer: int, done: Callable[[], bool]) -> None:
        is_over = self.wire.is_over
        with self.progress.waiting():
            self._wait(lambda: done() or is_over(self.rank) or is_over(peer))
        if done():
            return
        if is_over(self.rank):
            raise WorldChanged("the group was aborted")
        self._broken.add(peer)
        raise WorldChanged(f"the connection to rank {peer} broke")


def group_on(device: Device, group: MemoryGroup) -> Group:
    """For tensors of a device."""
    return group if device.on_host else StagedGroup(group, device)


def wire_of(group: Group) -> Wire:
    """What is on its way in it."""
    below: Any = group
    while not isinstance(below, MemoryGroup):
        below = below.below
    return below.wire
