"""The store as a leader sees it: whatever it writes is written only while nobody else was elected.

Every write carries the fence of the leader's term beside its own conditions. While the lease has lapsed nothing is
written; what was written at the last moment, and heard of after it, counts as an unknown outcome, so that nothing is
done on the strength of it until the leader is sure again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager

from shoal_protos.errors import StoreError

from shoal_controller.leadership.election import Leadership
from shoal_controller.store.store import (
    Changes,
    Compare,
    Entry,
    Fenced,
    Lease,
    Listing,
    Operation,
    Outcome,
    Revision,
    Store,
    UnknownOutcome,
)


class FencedStore:
    """A `Store` for one term."""

    def __init__(self, store: Store, leadership: Leadership) -> None:
        self._store = store
        self._leadership = leadership

    async def get(self, key: str) -> Entry | None:
        return await self._store.get(key)

    async def list(self, prefix: str, *, after: str = "", limit: int = 0) -> Listing:
        return await self._store.list(prefix, after=after, limit=limit)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        """Raises `Fenced` where another controller was elected."""
        if self._leadership.trouble:
            raise StoreError(self._leadership.trouble)
        fence = self._leadership.fence
        outcome = await self._store.transact([fence, *compares], operations)
        if not outcome.succeeded:
            term = await self._store.get(fence.key)
            if term is None or term.modified != fence.modified:
                raise Fenced("another controller was elected; this one decides nothing any more")
        if self._leadership.trouble:
            raise UnknownOutcome(self._leadership.trouble)
        return outcome

    def lease(self, seconds: float) -> AbstractAsyncContextManager[Lease]:
        return self._store.lease(seconds)

    def watch(self, prefix: str, after: Revision) -> AbstractAsyncContextManager[AsyncIterator[Changes]]:
        return self._store.watch(prefix, after)

    async def close(self) -> None:
        """The store itself is others' too, and stays open."""
