"""The check that gradients that are said to be equal over a cell are: in the first steps of every world.

A parameter that is common to a cell and has no mark is trained with the gradient of one member; where a layer divides a
sequence, say, that would be a part of the sum, and nothing else would notice it. The checksums of a step's lanes are
compared over the cell before the step's exchange ends. Called by reducing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from shoal_protos.errors import JobFailed
from torch import Tensor

from shoal.cells.hub import CellHub
from shoal.core.layout import Layout

STEPS = 2
"""Of a world: more would cost without finding more."""
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
GradientsOf = Callable[[int], Mapping[int, Tensor]]
"""The gradients of a bucket by place, each of its parameter's shape; those of zeros may be left out."""


class EqualGradients:
    """Of one process. `note` is called with what a lane's backward has left of each bucket, before it is added up."""

    def __init__(self, layout: Layout, hub: CellHub) -> None:
        self._hub = hub
        self._first: dict[int, int] = {}
        """By bucket, the place of its first parameter among those that are compared."""
        self._names: list[str] = []
        for bucket in layout.buckets:
            names = [slot.parameter.name for slot in bucket.slots]
            if not (bucket.division.by_tensor or layout.part.summed.intersection(names)):
                self._first[bucket.index] = len(self._names)
                self._names += names
        self._noted: set[int] = set()
        self.begin_world()

    def begin_world(self) -> None:
        """Its first step is to be compared."""
        self._left = STEPS
        self._begin_step()

    def _begin_step(self) -> None:
        self._sums = torch.zeros(len(self._names), dtype=torch.int64, device="cpu")
        self._noted.clear()

    def note(self, bucket: int, gradients_of: GradientsOf) -> None:
        """The lane's gradient of a bucket is whole."""
        if self._left and bucket in self._first:
            self._noted.add(bucket)
            words, places = [], []
            for place, one in gradients_of(bucket).items():
                kind = WORDS[one.itemsize]  # added up as what it is: a tenth of the time that wider sums take
                words.append(one.reshape(-1).view(kind).sum(dtype=kind))
                places.append(self._first[bucket] + place)
            if words:
                self._sums[places] += torch.stack(words).cpu()

    def end_lane(self, gradients_of: GradientsOf) -> None:
        """Its backwards are over, and what was not noted has not left."""
        for bucket in self._first.keys() - self._noted if self._left else ():
            self.note(bucket, gradients_of)
        self._noted.clear()

    def compare(self) -> None:
        """All lanes of a step are done. Raises `WorldChanged`, and `JobFailed` on all members of a cell that differ."""
        if self._left and self._names:
            rows = self._hub.gather(self._sums)
            self._left -= 1
            if differing := (rows != rows[0]).any(0).nonzero().flatten().tolist():
                self._refuse(self._names[one] for one in differing)
            self._begin_step()

    def _refuse(self, names: Iterable[str]) -> None:
        size = self._hub.shape.tensor
        places = "both" if size == 2 else f"all {size}"
        raise JobFailed(
            f'parameter "{next(iter(names))}" is said to have equal gradients on {places} tensor coordinates, and they '
            'differ: mark it sequence_parallel (or shoal.common(p, gradient="sum")).'
        )
