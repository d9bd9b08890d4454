"""Answering for the units that others gather: an owner sends its shards when it is asked, beside what it does itself.

A request names a world, its last vote and a unit, or asks where the asker can see all of them (seen_units.py). Between
two votes no shard changes, because whoever asks has not voted; so what is asked for before this member has come so far
waits until it has. Requests come on threads of the group (`Group.serve`); nothing here ever waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.blocks.shared_weights import NO_KEY, Key
from shoal.exchange.traffic import ASKED, GATHERED_UNIT
from shoal.group.group import Group, Work, WorldChanged
from shoal.logs import get_logger

Answers = Callable[[int, int], Sequence[Tensor]]
"""By peer and unit, the messages, each (elements,)."""

WHERE = -1
"""In the place of a unit: where the one who is asked keeps all that it has, when it has come so far."""

log = get_logger("shoal")


def ask(group: Group, owner: int, key: Key, unit: int) -> tuple[Work, Tensor]:  # the message: (numbers,) int64
    """Posts a request."""
    message = torch.tensor([*key, unit], dtype=torch.int64, device="cpu")
    return group.send(message, owner, ASKED), message


class UnitServer:
    """One member's answers in one group."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._lock = threading.Lock()
        self._key: Key = NO_KEY
        self._answers: Answers = _nothing
        self._early: list[tuple[Key, int, int]] = []
        """Requests of members that are ahead of this one: key, peer, unit."""
        self._sent: list[tuple[Work, Tensor]] = []
        group.serve(ASKED, 3, self.on_request)

    def open(self, key: Key, answers: Answers) -> None:
        """This member stands there: `answers` until the next time. What it was asked for meanwhile is sent."""
        with self._lock:
            sent, self._sent = self._sent, []
            self._key, self._answers = key, answers
            early, self._early = self._early, []
            for of, peer, unit in early:
                self._take(of, peer, unit)
        self.group.wait([work for work, _ in sent])  # who was asked in the vote before has been heard since

    def on_request(
        self,
        peer: int,
        message: Tensor,  # (numbers,) int64
    ) -> None:
        """On a thread of the group. Raises `WorldChanged` where it is closed."""
        generation, boundaries, unit = message.tolist()
        with self._lock:
            self._take((generation, boundaries), peer, unit)

    def _take(self, key: Key, peer: int, unit: int) -> None:
        if key > self._key:
            self._early.append((key, peer, unit))
        elif key == self._key:
            self._sent += [(self.group.send(one, peer, GATHERED_UNIT), one) for one in self._answers(peer, unit)]
        else:
            log.error("late_request", rank=peer, asked=key, stands_at=self._key, unit=unit)
            raise WorldChanged(f"rank {peer} asks for unit {unit} as of {key}, which is over")


def _nothing(peer: int, unit: int) -> Sequence[Tensor]:  # each (elements,)
    raise AssertionError(f"rank {peer} is answered for unit {unit} before the world has begun")
