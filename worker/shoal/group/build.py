"""A meeting: where the members of a generation build their group, and the switch that calls the building off.

Made from a plan by the session, carried out by a `Transport` on a thread of its own. The training thread never waits
in a meeting, and nobody waits in one for a process that may be dead: `Stop.set` ends every wait at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal_protos.plan import Plan

from shoal.group.group import Group
from shoal.group.progress import Progress


@dataclass(frozen=True, slots=True)
class Meeting:
    """One process's view of the building of one group."""

    generation: int
    rank: int
    addresses: tuple[str, ...]
    """By rank: `HOST:PORT` of each member's meeting place; gloo listens on the same host."""
    builder: int
    """The rank at whose place the group is built."""
    progress: Progress = field(default_factory=Progress, compare=False)
    """Whom the building waits for; the group that comes of it goes on with it."""

    @classmethod
    def of(cls, plan: Plan, rank: int, progress: Progress) -> Meeting:
        addresses = tuple(member.address for member in plan.members)
        return cls(plan.generation, rank, addresses, plan.builder, progress)

    @property
    def size(self) -> int:
        return len(self.addresses)


class Stop:
    """The switch. Set once, from any thread; whoever waits somewhere gives it a way to end the wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ways: list[Callable[[], None]] = []
        self._is_set = False

    @property
    def is_set(self) -> bool:
        return self._is_set

    def calls_off(self, way: Callable[[], None]) -> None:
        """`way` is called when this is set; at once where it is set already. It must not block."""
        with self._lock:
            self._ways.append(way)
            is_set = self._is_set
        if is_set:
            way()

    def set(self) -> None:
        with self._lock:
            self._is_set = True
            ways = list(self._ways)
        for way in ways:
            way()


Transport = Callable[[Meeting, Stop], Group]
"""Builds the group of a meeting. Raises `WorldChanged` when stopped, or when somebody is out of reach."""
