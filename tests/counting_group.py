"""A group of one member that counts what is on its way: its peers send zeros, and take everything."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.group.group import SoloGroup, Waiting, Work
from torch import Tensor


class Counted:
    """A work that counts its bytes until it is waited for."""

    def __init__(self, group: CountingGroup, tensor: Tensor) -> None:
        self._group, self._bytes = group, tensor.nbytes
        group.in_flight += tensor.nbytes
        group.most = max(group.most, group.in_flight)

    def wait(self) -> None:
        self._group.in_flight -= self._bytes
        self._group.waits += 1


class CountingGroup(SoloGroup):
    """Peers that send zeros, and take everything; remembers the most that was on its way to this member."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.in_flight, self.most, self.sends, self.waits = size, 0, 0, 0, 0
        self.begun = 0
        self.peers_are_quick = False

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        self.sends += 1
        return Counted(self, tensor[:0])

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        return Counted(self, tensor.zero_())

    def wait(self, works: Sequence[Work]) -> None:
        for work in works:
            work.wait()

    def begin_wait(self, works: Sequence[Work]) -> Waiting:
        self.begun += 1
        return Awaited(self, works)


class Awaited:
    """Waited for when the training thread waits. All is here at once, where the group's peers have been quick."""

    def __init__(self, group: CountingGroup, works: Sequence[Work]) -> None:
        self._group, self._works = group, works

    @property
    def is_over(self) -> bool:
        return self._group.peers_are_quick

    def wait(self) -> None:
        self._group.wait(self._works)
