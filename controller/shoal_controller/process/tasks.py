"""Guarded tasks, with locks and iterators that end cleanly: each task has a name, a listener, and an awaited end.

Used wherever the controller starts a task; a task whose unexpected end is not heard is a bug. `NamedLocks` keeps a lock
per name while it is held or awaited, so slow work for one name does not delay others. `Endable` ends an iteration from
outside, also during `__anext__`, where a generator cannot be closed ("asynchronous generator is already running") and
would hide the error that ended its reader; watches use it. Knows nothing of jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import structlog

END_SECONDS = 5.0
"""How long a cancelled task may take to end."""

Item = TypeVar("Item")

log = structlog.get_logger("shoal.tasks")


def guarded(
    name: str, work: Coroutine[object, object, None], failed: Callable[[BaseException], None]
) -> asyncio.Task[None]:
    """Start it. `failed` hears the exception that ends it; being cancelled and returning are its ordinary ends."""
    task = asyncio.get_running_loop().create_task(work, name=name)

    def ended(task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("a task ended unexpectedly", task=name, error=str(error), exc_info=error)
        failed(error)

    task.add_done_callback(ended)
    return task


def only_logged(_: BaseException) -> None:
    """Enough for a task that nobody waits for: `guarded` has logged what ended it."""


@contextmanager
def cancelled_when(future: asyncio.Future[Any], why: Callable[[], BaseException]) -> Iterator[None]:
    """Cancels the body when the future is done, unless that was cancelled itself, and raises `why()` for it."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()

    def cancel(future: asyncio.Future[Any]) -> None:
        if not future.cancelled():
            task.cancel()

    future.add_done_callback(cancel)
    try:
        yield
    except asyncio.CancelledError:
        if future.done() and not future.cancelled() and task.uncancel() <= before:
            error = why()
            raise error from error.__cause__
        raise
    finally:
        future.remove_done_callback(cancel)


async def first_of(*waits: Coroutine[object, object, object]) -> None:
    """Returns when the first of these has returned; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def end_task(task: asyncio.Task[None], seconds: float = END_SECONDS) -> None:
    """Cancel it and wait until it is gone. What it ended by has been heard by its guard."""
    task.cancel()
    _, running = await asyncio.wait([task], timeout=seconds)
    if running:
        log.error("a task did not end in time", task=task.get_name(), seconds=seconds)


async def with_pauses(items: AsyncGenerator[Item], seconds: float) -> AsyncGenerator[Item | None]:
    """What a generator yields, and None whenever it has yielded nothing for so long. It is closed with this one."""
    async with aclosing(items):
        while True:
            coming = asyncio.ensure_future(anext(items))
            try:
                while not (await asyncio.wait([coming], timeout=seconds))[0]:
                    yield None
                item = coming.result()
            except StopAsyncIteration:
                return
            finally:
                coming.cancel()
                await asyncio.wait([coming])
            yield item


class NamedLocks:
    """A lock for each name. Of one event loop."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def is_held(self, name: str) -> bool:
        return self.of(name).locked()


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
