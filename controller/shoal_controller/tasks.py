"""Guarded tasks: every one has a name, someone who hears when it ends unexpectedly, and an end that waits for it.

Used by every room of the controller that starts a task. A task that nobody hears of is a bug.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

END_SECONDS = 5.0
"""How long a cancelled task may take to end."""

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
