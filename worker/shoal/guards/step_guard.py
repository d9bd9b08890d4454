"""What all guards of a worker share: the moments of a step that they are told of, and checksums that they compare.

A step is other bits without a word where a script writes parameters or gradients, or sets modes and rates at the wrong
place; a guard refuses that in a sentence. The loop and the step tell every guard of `TrainingState.guards`, in that
order, and know none of them by name; guards do not know each other. What one guard alone hears (a hand-out that has
come, another member's modes) its owner says to it. Refusals that belong to no moment of a step are functions of this
room, called where a script calls.

`Comparisons` compares checksums of one memory at two moments, that are to be the same. To ask a device for a number is
to wait for all that it was given, and what it is given next comes late. So a device's checksums stay there, and whether
they differ is asked once a step, when the host has waited for it anyway. It is told of votes as a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.exchange.pieces import Extent
from shoal.exchange.vote import Record


class StepGuard:
    """In the order of a step; each may raise `UserError`. A guard has those methods in which it has something to do."""

    def before_batch(self, world: object, record: Record | None, /) -> None:
        """A batch is to be made in this world. `record`: the last step's."""

    def on_batch(self) -> None:
        """It is made, and the loop's body is about to run."""

    def before_backward(self, where: str, is_continued: bool, /) -> None:
        """`engine.backward` was called. `where`: the micro-batch in sentences, "step 3, lane 2"; `is_continued`: it has
        a part of its gradient already.
        """

    def after_backward(self, arriving: Iterable[Extent], /) -> None:
        """It has come to its end. `arriving`: where other workers' values may still come in."""

    def before_step(self) -> None:
        """`engine.step` was called."""

    def before_last_step(self, world: object, /) -> None:
        """It was called for the last micro-batch that this worker has of a step: the step is about to be made."""

    def before_vote(self) -> None:
        """All that the vote commits is here."""


class Guards:
    """Those of one state. Of each moment the methods of the guards that have something to do then, in their order: most
    have nothing to do at most moments, and each call costs a small model's step some time.
    """

    def __init__(self, *guards: StepGuard) -> None:
        def of(method: str) -> tuple[Callable[..., None], ...]:
            idle = getattr(StepGuard, method)
            return tuple(getattr(one, method) for one in guards if getattr(type(one), method) is not idle)

        self.before_batch, self.on_batch = of("before_batch"), of("on_batch")
        self.before_backward, self.after_backward = of("before_backward"), of("after_backward")
        self.before_step, self.before_last_step = of("before_step"), of("before_last_step")
        self.before_vote = of("before_vote")


Checksum = int | Tensor
"""`()` int64 on a device."""


def checksums(flats: list[Tensor]) -> list[int]:
    """Of the bits of each; waits for a device once."""
    return torch.stack([_sum(flat) for flat in flats]).tolist() if flats else []


def _sum(values: Tensor) -> Tensor:  # () int64
    return values.view(torch.int64).sum()


class Comparisons(StepGuard):
    """`at_once`: the host may ask for every checksum when it is made, which costs it nothing then."""

    def __init__(self, at_once: bool) -> None:
        self._at_once = at_once
        self._open: list[tuple[Tensor, str]] = []  # each () bool

    def checksum(self, values: Tensor) -> Checksum:
        """Of the bits of a flat, or of a part of it that begins and ends at a multiple of 8 bytes."""
        if not values.numel():  # also where there is none on the device
            return 0
        return int(_sum(values)) if self._at_once else _sum(values)

    def expect_equal(self, before: Checksum, now: Checksum, otherwise: str) -> None:
        """Raises `UserError(otherwise)` where they differ and that is known; what is not is for `before_vote`."""
        if isinstance(before, Tensor) or isinstance(now, Tensor):
            self._open.append((torch.as_tensor(before == now), otherwise))
        elif before != now:
            raise UserError(otherwise)

    def before_vote(self) -> None:
        """Raises `UserError` of the first that has turned out to differ. Waits for the device, once."""
        found = torch.stack([are_equal for are_equal, _ in self._open]).tolist() if self._open else []
        for are_equal, (_, otherwise) in zip(found, self._open, strict=True):
            if not are_equal:
                raise UserError(otherwise)
        self._open.clear()
