"""What evaluations right after the last step have come to, and whom it is told: each of them once, in order.

All members get the same numbers: by the exchange itself, or, where the world broke in it, from a survivor that has
them, before the new world opens. Called by evaluation.py and, in a recovery, by boundary.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch

from shoal.exchange.packing import FramedSend, receive_framed
from shoal.exchange.traffic import EVALUATED
from shoal.exchange.world import World

Numbers = dict[str, float]
"""Means over the lanes that arrived, by name."""
Listener = Callable[[Numbers], None]


class Measured:
    """`numbers`: those of each evaluation since the last step."""

    def __init__(self) -> None:
        self.numbers: list[Numbers] = []
        self._delivered = self._shown = 0
        """How many of them listeners have heard of here, and observers."""
        self._everywhere: list[Listener] = []
        self._on_first: list[Listener] = []

    def add_listener(self, listener: Listener) -> None:
        """Called on every member, standbys too."""
        self._everywhere.append(listener)

    def add_observer(self, observer: Listener) -> None:
        """Called on rank 0, and on the next one again where that has died: it knows what was written."""
        self._on_first.append(observer)

    def begin_step(self) -> None:
        """A step is committed, or training goes on elsewhere: what came before is over."""
        self.numbers, self._delivered, self._shown = [], 0, 0

    def is_news(self, is_first: bool) -> bool:
        """Whether any listener here has not heard all."""
        reached = min(self._delivered, self._shown) if is_first else self._delivered
        return reached < len(self.numbers)

    def tell(self, is_first: bool) -> None:
        """`is_first`: whether this worker is rank 0."""
        while is_first and self._shown < len(self.numbers):
            self._shown += 1
            _call(self._on_first, self.numbers[self._shown - 1])
        while self._delivered < len(self.numbers):
            self._delivered += 1
            _call(self._everywhere, self.numbers[self._delivered - 1])

    def agree(self, world: World) -> None:
        """In a recovery, at its step: who lacks numbers gets them from one that has them all. What was told is known of
        oneself, or with the states that a member has been given. Raises `WorldChanged`.
        """
        recovery = world.plan.recovery
        assert recovery is not None
        counts = recovery.counted[world.rank]
        if not counts:
            self.begin_step()
        mine = torch.tensor([len(self.numbers), self._delivered], dtype=torch.int64, device="cpu")
        rows = world.group.all_gather(mine).tolist()
        most = max(known for known, _ in rows)
        giver = next(rank for rank, (known, _) in enumerate(rows) if known == most)
        if world.rank == giver:
            content = json.dumps(self.numbers).encode()
            lacking = [rank for rank, (known, _) in enumerate(rows) if known < most]
            for send in [FramedSend(world.group, rank, EVALUATED, content) for rank in lacking]:
                send.wait()
        elif rows[world.rank][0] < most:
            self.numbers = json.loads(receive_framed(world.group, giver, EVALUATED))
        if not counts:
            self._delivered = rows[recovery.counted.index(True)][1]


def _call(listeners: Sequence[Listener], numbers: Numbers) -> None:
    """An evaluation without numbers is nobody's news."""
    for listener in listeners if numbers else ():
        listener(numbers)
