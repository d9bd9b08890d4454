"""Which committed steps have had their callbacks, as far as this member knows.

Rank 0 calls them, and tells the others when it is through with a step's. So if it dies, whoever is rank 0 next calls
those of a step that was not said to be over, and no others. The others hear it beside their own work, and everybody has
heard it before the next vote. Called by boundary.py; where rank 0 has no callbacks, nothing travels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.exchange.traffic import CALLED
from shoal.group.group import Group, Waiting, Work, WorldChanged


class CalledSteps:
    """`last`: the last step whose callbacks were called, or before which this worker was not there."""

    def __init__(self) -> None:
        self.last = 0
        self._group: Group | None = None
        self._message = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._comes: Waiting | None = None
        """Of all but rank 0: what it says of the step at hand."""
        self._sent: list[tuple[Work, Tensor]] = []
        """Of rank 0."""

    def expect(self, group: Group) -> None:
        """Not rank 0: it will tell when it is through with the step at hand. Raises `WorldChanged`."""
        self._group, self._message = group, torch.zeros_like(self._message)
        self._comes = group.begin_wait([group.receive(self._message, 0, CALLED)])

    def tell(self, group: Group, step: int) -> None:
        """Rank 0 is through with this step's. Raises `WorldChanged`."""
        self._group = group
        for rank in range(1, group.size):
            message = torch.tensor([step], dtype=torch.int64, device="cpu")
            self._sent.append((group.send(message, rank, CALLED), message))

    def settle(self) -> None:
        """Everybody has heard of the step at hand. Raises `WorldChanged`."""
        if self._comes is not None:
            self._take(self._comes)
        elif self._sent:
            assert self._group is not None
            sent: Sequence[tuple[Work, Tensor]] = self._sent
            self._sent = []
            self._group.wait([work for work, _ in sent])

    def look(self) -> None:
        """The world is over: what has come counts, and nothing else will."""
        if self._comes is not None and self._comes.is_over:
            with contextlib.suppress(WorldChanged):
                self._take(self._comes)
        self._comes, self._sent, self._group = None, [], None

    def _take(self, comes: Waiting) -> None:
        self._comes = None
        comes.wait()
        self.last = max(self.last, int(self._message))
