"""Which buckets the last backward of a step has filled: so that they leave for their owners while it still runs.

One hook per parameter, armed for one backward at a time. Buckets become ready in one order only, that in which every
worker sends and receives: the layout's, or one that was agreed on. Gradients that autograd does not add up where they
leave from are taken from their parameters here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from weakref import WeakMethod

from shoal_protos.errors import UserError
from torch import nn

from shoal.blocks.flat import refuse_hooks
from shoal.blocks.lane_sums import LaneSums
from shoal.blocks.shard_sums import ShardSums
from shoal.core.layout import Layout

OWN_HOOKS = 1
"""On each parameter's accumulated gradient: the one that is made here."""


class BucketHooks:
    """`armed` around a backward."""

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        sums: LaneSums | ShardSums,
        on_whole: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`on_whole`: called with a bucket when all its gradients are there, in whatever order backward makes them."""
        self._on_whole = on_whole
        self._slots, self._sums = [len(bucket.slots) for bucket in layout.buckets], sums
        self._names = [slot.parameter.name for bucket in layout.buckets for slot in bucket.slots]
        self._on_filled: Callable[[int], None] | None = None
        self._missing: list[set[int]] = []
        self._order: Sequence[int] = range(len(self._slots))
        self._next = 0
        owners = [(b, s) for b, count in enumerate(self._slots) for s in range(count)]
        on_gradient = _weakly(WeakMethod(self._on_gradient))
        for number, ((bucket, slot), parameter) in enumerate(zip(owners, parameters, strict=True)):
            parameter.register_post_accumulate_grad_hook(partial(on_gradient, number, bucket, slot))

    @contextmanager
    def armed(self, on_filled: Callable[[int], None], order: Sequence[int] | None = None) -> Iterator[None]:
        """Calls `on_filled(bucket)` for each bucket, in order, as soon as it and all before it are whole. Buckets with
        unused parameters never come; whoever arms sees to them. `order`: None: the layout's.
        """
        self._missing = [set(range(count)) for count in self._slots]
        self._order = range(len(self._slots)) if order is None else order
        self._next, self._on_filled = 0, on_filled
        try:
            yield
            self._note_used()
        finally:
            self._on_filled = None

    def _note_used(self) -> None:
        """The backward has come to its end: what it has made no gradient of, it has not used."""
        if self._sums.unused:
            left, first = 0, 0
            for slots, missing in zip(self._slots, self._missing, strict=True):
                left |= sum(1 << slot for slot in missing) << first
                first += slots
            self._sums.unused &= left

    def armed_to_take(self) -> AbstractContextManager[None]:
        """For a backward that fills no bucket for good: what is to be taken from parameters is so anyway."""
        return self.armed(lambda _: None)

    def _on_gradient(
        self,
        number: int,
        bucket: int,
        slot: int,
        parameter: nn.Parameter,  # of its own shape
    ) -> None:
        if self._on_filled is None:
            return
        if len(parameter._post_accumulate_grad_hooks or ()) > OWN_HOOKS:  # now: the others come after this one
            refuse_hooks(self._names[number], parameter, OWN_HOOKS)
        if slot not in self._missing[bucket]:  # also where its bucket has not left yet: that depends on the order
            raise UserError(
                "a parameter got its gradient twice in one backward (reentrant checkpointing does that); "
                "use torch.utils.checkpoint with use_reentrant=False."
            )
        if number in self._sums.live.taken:
            self._sums.live.take(number, parameter)
        missing = self._missing[bucket]
        missing.discard(slot)
        if missing:
            return
        self._on_whole(bucket)
        while self._next < len(self._order) and not self._missing[self._order[self._next]]:
            filled = self._order[self._next]
            self._next += 1
            self._on_filled(filled)


OnGradient = Callable[[int, int, int, nn.Parameter], None]


def _weakly(method: WeakMethod[OnGradient]) -> OnGradient:
    """Python sees no hook that torch keeps: one that keeps the model would be a cycle, and neither ever freed."""

    def on_gradient(
        number: int,
        bucket: int,
        slot: int,
        parameter: nn.Parameter,  # of its own shape
    ) -> None:
        here = method()
        if here is not None:
            here(number, bucket, slot, parameter)

    return on_gradient
