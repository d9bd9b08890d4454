"""Checksums of one memory at two moments, that are to be the same: the host knows at once, a device has its own time.

To ask a device for a number is to wait for all that it was given, and what it is given next comes late. So its
checksums stay there, and whether they differ is asked once a step, when the host has waited for it anyway. Used by
the other guards, and itself told of votes.
"""

from __future__ import annotations

import torch
from shoal_protos.errors import UserError
from torch import Tensor

from shoal.guards.step_guard import StepGuard

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
