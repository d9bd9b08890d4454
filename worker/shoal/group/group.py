"""The process group of one generation: sends, receives, one small all-gather, and `abort()`.

The engine waits plainly and reads as if nothing could fail; `abort()`, called from the session's thread, makes every
operation of the group fail at once on the training thread. Knows nothing of plans. `gloo.py` is a group over gloo,
`solo.py` the group of a world of one; for tensors of a device there are `staged.py` and `ordered.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from shoal.group.group_progress import GroupProgress

RESERVED_TAGS = 1 << 20
"""Tags from here on belong to the group itself."""
GATHER_TAG = RESERVED_TAGS + 1
"""Tag of the rows of an all-gather."""


class WorldChanged(BaseException):
    """An operation of the group failed, or the session told the training thread to stop: take part in the change.

    No `Exception`: it passes through the forwards of users, who catch those (as `asyncio.CancelledError` became one).
    """


class Work(Protocol):
    """A posted send or receive. Its tensor must live until `wait` has returned or the group is closed."""

    def wait(self) -> None:
        """Blocks until done. Raises `WorldChanged` when the group is broken or aborted."""


class Waiting(Protocol):
    """Works that are waited for in the background, from `Group.begin_wait` on."""

    @property
    def is_over(self) -> bool:
        """Whether `wait` would not block: all are done, or the group is broken."""

    def wait(self) -> None:
        """Blocks until all of them are done. Raises `WorldChanged` as their own `wait` does."""


class Group(Protocol):
    """One member's end of the group. Tags are small non-negative numbers; messages of one tag keep their order."""

    rank: int
    size: int
    progress: GroupProgress
    """Where the thread that is inside it stands; who steps on says so."""

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        """Posts a send of a contiguous CPU tensor."""

    def receive(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Posts a receive into a contiguous CPU tensor."""

    def wait(self, works: Sequence[Work]) -> None:
        """Blocks until all of them are done, in any order. Raises `WorldChanged` as their own `wait` does."""

    def begin_wait(self, works: Sequence[Work]) -> Waiting:
        """Waits for them beside what the training thread does, which may look whether they are done. Raises
        `WorldChanged` for works of a closed group.
        """

    def serve(self, tag: int, elements: int, on_request: Callable[[int, Tensor], None]) -> None:
        """Calls `on_request(peer, message)`, a message being `(elements,)` int64, for each that comes with this tag:
        beside the training thread, until the group is closed, and never twice at once for one peer.
        """

    def all_gather(self, row: Tensor) -> Tensor:
        """Every member's row, by rank: `(n,)` uint8 → `(size, n)` uint8. Blocks; raises `WorldChanged`."""

    def abort(self) -> None:
        """Abort from any thread: every operation blocked in this group raises at once, here and at the peers.
        Idempotent.
        """

    def close(self) -> None:
        """Frees sockets and threads (aborts first where operations may be in flight); buffers are free afterwards."""

    @property
    def broken_peers(self) -> tuple[int, ...]:
        """Ranks whose connection was seen to break by this process (not by its own abort)."""
