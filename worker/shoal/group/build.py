"""What building a group takes: where the members of a generation meet, and the switch that cancels it.

Made from a plan by the session, carried out by a `Transport` on a thread of its own. The training thread never
waits there, and nobody waits there for a process that may be dead: `Cancellation.cancel` ends every wait at once.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal_protos.plan import Plan

from shoal.group.group import Group
from shoal.group.group_progress import GroupProgress


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One process's view of the building of one group."""

    generation: int
    rank: int
    addresses: tuple[str, ...]
    """`HOST:PORT` of each member's rendezvous server, by rank; gloo listens on the same host."""
    builder: int
    """The rank at whose server the group is built."""
    incarnations: tuple[str, ...] = ()
    """Incarnations by rank: whoever else answers at a member's address is not that member."""
    announces: bytes = b""
    """What this process says to all others where they meet: which device it has for itself (of_device.py)."""
    progress: GroupProgress = field(default_factory=GroupProgress, compare=False)
    """Whom the building waits for; the group that comes of it goes on with it."""

    @classmethod
    def of(cls, plan: Plan, rank: int, progress: GroupProgress) -> GroupSpec:
        addresses = tuple(member.address for member in plan.members)
        incarnations = tuple(member.incarnation for member in plan.members)
        return cls(plan.generation, rank, addresses, plan.builder, incarnations, progress=progress)

    @property
    def size(self) -> int:
        return len(self.addresses)

    @property
    def room(self) -> str:
        """Its name on the builder's server. Who does not know all members cannot guess it, and so cannot enter it, with
        another size for instance, before they do.
        """
        members = "/".join(self.incarnations).encode()
        return f"g{self.generation}-{hashlib.blake2b(members, digest_size=16).hexdigest()}"

    def incarnation(self, rank: int) -> str:
        """Empty where servers say nothing of themselves."""
        return self.incarnations[rank] if self.incarnations else ""


class Cancellation:
    """The switch. Set once, from any thread; whoever waits somewhere registers what ends the wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """`callback` is called when this is set; at once where it is set already. It must not block."""
        with self._lock:
            self._callbacks.append(callback)
            is_cancelled = self._is_cancelled
        if is_cancelled:
            callback()

    def cancel(self) -> None:
        """End every wait of the building, and all later ones at once. Idempotent."""
        with self._lock:
            self._is_cancelled = True
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback()


Transport = Callable[[GroupSpec, Cancellation], Group]
"""Builds the group of a spec. Raises `WorldChanged` when cancelled, or when somebody is out of reach."""
