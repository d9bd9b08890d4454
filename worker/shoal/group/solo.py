"""The group of a world of one: nobody to send to, a gather of one row.

It keeps the promises of `Group` (an aborted one raises), so that the engine need not know that it is alone. Works where
there is no gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shoal.group.group import Waiting, Work, WorldChanged
from shoal.group.group_progress import GroupProgress


class _Over:
    """Nothing to wait for."""

    is_over = True

    def wait(self) -> None:
        """Returns at once."""


class SoloGroup:
    """A `Group` of size one."""

    rank = 0
    size = 1
    broken_peers: tuple[int, ...] = ()

    def __init__(self, progress: GroupProgress | None = None) -> None:
        self.progress = progress or GroupProgress()
        self._over = ""

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        raise AssertionError(f"{tensor.nbytes} bytes with tag {tag} are sent to rank {to} in a world of one")

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        raise AssertionError(f"{tensor.nbytes} bytes with tag {tag} are awaited from rank {source} in a world of one")

    def wait(self, works: Sequence[Work]) -> None:
        assert not works, "there is nobody to wait for in a world of one"

    def begin_wait(self, works: Sequence[Work]) -> Waiting:
        self.wait(works)
        return _Over()

    def serve(self, tag: int, elements: int, on_request: Callable[[int, Tensor], None]) -> None:
        """Nobody asks."""

    def all_gather(self, row: Tensor) -> Tensor:
        if self._over:
            raise WorldChanged(f"the group was {self._over}")
        return row.reshape(1, -1).clone()

    def abort(self) -> None:
        self._over = self._over or "aborted"

    def close(self) -> None:
        self._over = self._over or "closed"
