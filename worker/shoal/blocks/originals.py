"""The parameters' first values, as exact as the script made them: from `initialize` until this process trains.

Masters begin with them, so that nothing is lost by the rounding to half precision. Where parameters are not rounded
these are the parameters themselves and take no memory. Those of a model that was built within `shoal.deferred()` are
made a unit at a time, where they are asked for; those that are taken from a checkpoint by name are read so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Protocol

import torch
from shoal_protos.runs import Runs
from torch import Tensor, nn

from shoal.cells.marks import local_of
from shoal.core.layout import Bucket, Layout, Slot, Stretch
from shoal.first_values.deferred_values import DeferredValues


class GivenValues(Protocol):
    """Values of some parameters, by name, that are not in memory."""

    def __contains__(self, name: object) -> bool: ...

    def part(self, name: str, first: int, last: int) -> Tensor:  # (last - first,) of any dtype
        """Elements of a parameter, flat."""
        ...

    def forget(self) -> None:
        """What is kept in memory for the next part."""
        ...


class Originals:
    """`named`: those that the script made, by the parameter's name, each of its shape, in the wide dtype of its bucket.

    `deferred` has all others.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],  # each of its own shape, in the order of the slots
        before: Mapping[str, Tensor],  # each of its parameter's shape: values from before the parameters were rounded
        deferred: DeferredValues | None = None,
    ) -> None:
        self._layout, self._parameters, self.deferred = layout, parameters, deferred
        self._taken: GivenValues | None = None
        self.named: dict[str, Tensor] = {}
        for (bucket, slot), parameter in zip(self._slots(), parameters, strict=True):
            name = slot.parameter.name
            if deferred is None or name not in deferred:
                self.named[name] = before[name].to(bucket.wide_dtype) if name in before else local_of(parameter).data

    def _slots(self) -> Iterator[tuple[Bucket, Slot]]:
        return ((bucket, slot) for bucket in self._layout.buckets for slot in bucket.slots)

    def of(self, stretch: Stretch) -> Tensor:  # (elements,) of the bucket's wide dtype
        """A copy; zeros where no parameter lies."""
        return self._range(self._layout.buckets[stretch.bucket], *self._layout.elements(stretch))

    def _range(self, bucket: Bucket, start: int, stop: int) -> Tensor:  # (stop - start,) of the bucket's wide dtype
        found = torch.zeros(stop - start, dtype=bucket.wide_dtype, device=self._layout.device)
        for slot in bucket.slots:
            first, last = max(start, slot.start), min(stop, slot.start + slot.parameter.elements)
            if first < last:
                found[first - start : last - start] = self._part(slot, first - slot.start, last - slot.start)
        return found

    def _part(self, slot: Slot, first: int, last: int) -> Tensor:  # (last - first,)
        name = slot.parameter.name
        if self._taken is not None and name in self._taken:
            return self._taken.part(name, first, last)
        if name in self.named:
            return self.named[name].reshape(-1)[first:last]
        assert self.deferred is not None
        return self.deferred.part(name, first, last)

    def portions(self, runs: Runs) -> Iterator[Runs]:
        """These blocks in parts that need few values in memory at one time: of a unit each, where values are made."""
        if self.deferred is None and self._taken is None:
            yield runs
            return
        stretches = sorted(self._layout.stretches(runs), key=self._unit_of)
        for _, together in groupby(stretches, key=self._unit_of):
            yield self._layout.runs(together)
        self.forget()

    def forget(self) -> None:
        """What was made last; it is made again where it is asked for."""
        for values in (self.deferred, self._taken):
            if values is not None:
                values.forget()

    def take(self, values: GivenValues) -> None:
        """What these have comes from there, from now on."""
        self._taken = values

    def own(self) -> dict[str, Tensor]:  # each of its parameter's shape
        """Those that this worker's script has made, and that nothing stands in for."""
        return {name: value for name, value in self.named.items() if self._taken is None or name not in self._taken}

    def _unit_of(self, stretch: Stretch) -> int:
        return self._layout.buckets[stretch.bucket].slots[0].parameter.unit

    @torch.no_grad()
    def put_back(self) -> None:
        """The parameters are these values again, rounded. For parameters that are all here."""
        pairs, own = list(zip(self._slots(), self._parameters, strict=True)), self.own()
        for (_, slot), parameter in sorted(pairs, key=lambda pair: pair[0][1].parameter.unit):
            exact = own.get(slot.parameter.name)
            if exact is None:
                local_of(parameter).copy_(self._part(slot, 0, slot.parameter.elements).view(slot.parameter.shape))
            elif exact.data_ptr() != local_of(parameter).data_ptr():
                local_of(parameter).copy_(exact)
        self.forget()

    def fill(
        self,
        bucket: int,
        flat: Tensor,  # (elements,) of the bucket's dtype
    ) -> None:
        """Puts a bucket's values into its flat, rounded."""
        of = self._layout.buckets[bucket]
        flat.copy_(self._range(of, 0, of.elements))
