"""How far a thread has come in a group, and for whom it waits there since when: what heartbeats tell (`Activity`).

One per group, from the beginning of its building. Written by the thread that is inside the group and by the one that
waits for it (wait_threads.py), read by the session's thread; without a lock, because each attribute is replaced whole.
Positions only grow, and at a position a member has posted all that its peers wait for at the same one: so who waits
for a peer that stands beyond, or that waits for it in turn, waits in vain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from shoal_protos.activity import LANES_BEGIN, MOST_NAMED, Activity, StepPhase

BEFORE_THE_FIRST = 0
"""The boundary of a group whose world has not begun."""
USER_STEPS = 1 << 20
"""Between two places where a member waits for others beside user code (`bucket` counts them), that may take so many
steps.
"""
AFTER_THE_LOOP = LANES_BEGIN >> 1
"""Such places of a boundary, in order: where evaluations are over in the loop's body, then after the loop, then (from
`LANES_BEGIN` on) the rounds of lanes.
"""


class GroupProgress:
    """What this process waits for in one group, and since when."""

    __slots__ = ("_moved", "_pieces", "_slowest", "_state", "generation")

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        now = time.monotonic()
        self._state: tuple[int, StepPhase, int, tuple[int, ...], float] = (
            BEFORE_THE_FIRST, StepPhase.BUILDING, 0, (), now,
        )  # fmt: skip
        self._moved, self._slowest, self._pieces = now, 0.0, 0

    # ---- on the thread that is inside the group

    def reach(self, phase: StepPhase, bucket: int = 0) -> None:
        """It stands at this position now, and waits for nobody."""
        self._state = (self._state[0], phase, bucket, (), time.monotonic())

    def begin_boundary(self, boundaries: int) -> None:
        """So many votes have passed in this world; the user's code is next."""
        self._state = (boundaries + 1, StepPhase.LANES, 0, (), time.monotonic())

    def step_on(self) -> None:
        """The user's code has come further: a micro-batch is done."""
        boundary, phase, bucket, _, _ = self._state
        self._state = (boundary, phase, bucket + 1, (), time.monotonic())

    def wait_for(self, *peers: int) -> None:
        """It waits for these ranks from now on."""
        boundary, phase, bucket, _, _ = self._state
        self._pieces = 0
        self._state = (boundary, phase, bucket, peers, time.monotonic())

    def keep_waiting_for(self, peers: Sequence[int]) -> None:
        """The others have come: it goes on waiting for these."""
        boundary, phase, bucket, _, since = self._state
        self._state = (boundary, phase, bucket, tuple(peers), since)

    def go_on(self) -> None:
        """The wait is over."""
        boundary, phase, bucket, _, _ = self._state
        self._state = (boundary, phase, bucket, (), time.monotonic())

    # ---- on the thread that waits for it

    def on_piece(self) -> None:
        """A message, or a piece of one, is complete: the wait begins anew. The first piece may have waited for a peer
        that was busy, so only the later ones tell how slow the connection is.
        """
        now = time.monotonic()
        if self._pieces:
            self._slowest = max(self._slowest, now - self._moved)
        self._pieces += 1
        self._moved = now

    # ---- on the session's thread

    def activity(self, name_of: Callable[[int], str]) -> Activity:
        """What a heartbeat tells; `name_of` gives the id of a rank."""
        boundary, phase, bucket, peers, since = self._state
        seconds = max(0.0, time.monotonic() - max(since, self._moved))
        named = tuple(map(name_of, peers[:MOST_NAMED]))
        return Activity(self.generation, boundary, phase, bucket, named, seconds, self._slowest)
