"""One value per element of the blocks that a worker keeps: parameters, or reduced gradients, read stretch by stretch.

What a worker keeps of a block whole and what only of its own blocks depends on the stage; update, norm, digests and
saves read by stretch and need not know.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shoal.core.layout import Layout, Stretch


class BlockValues(Protocol):
    """Values of the blocks that are kept here."""

    def of(self, stretch: Stretch) -> Tensor:  # (elements,)
        """A view of the values of blocks that are kept here and follow each other."""
        ...


class WholeValues:
    """Of all blocks, in one flat per bucket."""

    def __init__(
        self,
        layout: Layout,
        flats: list[Tensor],  # per bucket (elements,)
    ) -> None:
        self._layout, self.flats = layout, flats

    def of(self, stretch: Stretch) -> Tensor:  # (elements,)
        """A view."""
        start, stop = self._layout.elements(stretch)
        return self.flats[stretch.bucket][start:stop]

    @property
    def bytes(self) -> int:
        """What they take."""
        return sum(flat.nbytes for flat in self.flats)
