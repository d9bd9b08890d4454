"""The parameters' first values, as exact as the script made them: from `initialize` until this process trains.

Masters begin with them, so that nothing is lost by the rounding to half precision. Where parameters are not rounded
these are the parameters themselves and take no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.core.layout import Layout, Slot, Stretch


class Originals:
    """`named`: by the parameter's name, each of its shape, in the wide dtype of its bucket."""

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],  # each of its own shape, in the order of the slots
        before: Mapping[str, Tensor],  # each of its parameter's shape: values from before the parameters were rounded
    ) -> None:
        self._layout, self._parameters = layout, parameters
        self.named: dict[str, Tensor] = {}
        slots = [(bucket, slot) for bucket in layout.buckets for slot in bucket.slots]
        for (bucket, slot), parameter in zip(slots, parameters, strict=True):
            name = slot.parameter.name
            exact = before[name].to(bucket.wide_dtype) if bucket.has_masters else parameter.data
            self.named[name] = exact

    def of(self, stretch: Stretch) -> Tensor:  # (elements,) of the bucket's wide dtype
        """A copy; zeros where no parameter lies."""
        bucket = self._layout.buckets[stretch.bucket]
        start, stop = self._layout.elements(stretch)
        found = torch.zeros(stop - start, dtype=bucket.wide_dtype)
        for slot in bucket.slots:
            first, last = max(start, slot.start), min(stop, slot.start + slot.parameter.elements)
            if first < last:
                found[first - start : last - start] = self._part(slot, first, last)
        return found

    def _part(self, slot: Slot, first: int, last: int) -> Tensor:  # (last - first,)
        return self.named[slot.parameter.name].reshape(-1)[first - slot.start : last - slot.start]

    @torch.no_grad()
    def put_back(self) -> None:
        """The parameters are these values again, rounded."""
        for parameter, exact in zip(self._parameters, self.named.values(), strict=True):
            if exact.data_ptr() != parameter.data_ptr():
                parameter.copy_(exact)
