"""Which buckets the last backward of a step has filled: so that they leave for their owners while it still runs.

One hook per parameter, armed for one backward at a time. Buckets become ready in the layout's order only, the order in
which every worker sends and receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from shoal_protos.errors import UserError
from torch import Tensor, nn

from shoal.core.layout import Layout


class Readiness:
    """`arm` before the last backward of a step, `disarm` after it."""

    def __init__(self, layout: Layout, parameters: Sequence[nn.Parameter]) -> None:
        self._slots = [len(bucket.slots) for bucket in layout.buckets]
        self._tell: Callable[[int], None] | None = None
        self._missing: list[set[int]] = []
        self._next = 0
        owners = [(b, s) for b, count in enumerate(self._slots) for s in range(count)]
        for (bucket, slot), parameter in zip(owners, parameters, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, bucket, slot))

    def arm(self, tell: Callable[[int], None]) -> None:
        """Calls `tell(bucket)` for each bucket, in order, as soon as it and all before it are whole."""
        self._missing = [set(range(count)) for count in self._slots]
        self._next, self._tell = 0, tell

    def disarm(self) -> None:
        """Buckets with unused parameters were never told; whoever armed sees to them."""
        self._tell = None

    def _accumulated(self, bucket: int, slot: int, _: Tensor) -> None:
        if self._tell is None:
            return
        if bucket < self._next:
            raise UserError(
                "a parameter got its gradient twice in one backward (reentrant checkpointing does that); "
                "use torch.utils.checkpoint with use_reentrant=False."
            )
        self._missing[bucket].discard(slot)
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._next += 1
            self._tell(self._next - 1)
