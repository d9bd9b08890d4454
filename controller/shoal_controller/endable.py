"""An iteration that is ended from outside, also while somebody waits for its next item.

A generator alone cannot be closed then ("asynchronous generator is already running"), which would hide the error for
which a context that reads from it was left. Used for watches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Endable(AsyncIterator[Item], Generic[Item]):
    """Hands on what a generator yields, to one reader at a time, until `end`: then it is over for whoever waits."""

    def __init__(self, items: AsyncGenerator[Item]) -> None:
        self._items = items
        self._next: asyncio.Task[Item] | None = None
        self._ended = False

    async def __anext__(self) -> Item:
        if self._ended:
            raise StopAsyncIteration
        task = self._next = asyncio.create_task(self._step(), name="the next item")
        try:
            await asyncio.wait([task])
        finally:
            await self._stop(task)
        if self._ended and task.cancelled():
            raise StopAsyncIteration
        return task.result()

    async def _step(self) -> Item:
        return await anext(self._items)

    async def _stop(self, task: asyncio.Task[Item]) -> None:
        task.cancel()
        await asyncio.wait([task])
        self._next = None

    async def end(self) -> None:
        """Returns when nothing of it runs any more."""
        self._ended = True
        if self._next is not None:
            await self._stop(self._next)
        await self._items.aclose()
