"""How a parameter is cut among the places of a cell's tensor dimension, and how its parts become the whole. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """All places have parts of one shape."""

    dim: int
    """Along which the parts follow each other."""
    stride: int = 1
    """So many pieces a place has of it: the first ones of all places come first, then the second ones, and so on. More
    than one where several matrices are fused, each of which is cut, as Megatron does.
    """

    def whole_shape(self, shape: tuple[int, ...], places: int) -> tuple[int, ...]:
        """Of the whole, whose parts have this shape."""
        return (*shape[: self.dim], shape[self.dim] * places, *shape[self.dim + 1 :])

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a part can have this shape."""
        return self.dim < len(shape) and shape[self.dim] % self.stride == 0

    def join(
        self,
        parts: Sequence[Tensor],  # by place, each of the part's shape
    ) -> Tensor:  # of the whole's shape
        """The whole."""
        pieces = [part.chunk(self.stride, self.dim) for part in parts]
        return torch.cat([of_place[number] for number in range(self.stride) for of_place in pieces], self.dim)
