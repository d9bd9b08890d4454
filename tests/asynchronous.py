"""Tests that await: each runs in an event loop of its own, so that what it leaves running is seen."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

Given = ParamSpec("Given")

TEST_SECONDS = 100.0


def asynchronous(test: Callable[Given, Coroutine[Any, Any, None]]) -> Callable[Given, None]:
    """Make a plain test of a coroutine function; its fixtures stay."""

    @functools.wraps(test)
    def run(*args: Given.args, **given: Given.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **given), TEST_SECONDS))

    return run


def jump(seconds: float) -> None:
    """Has the running loop's clock go on by so much at once: what is due by then happens now, and nothing before it,
    however slow the machine is. `TEST_SECONDS` goes on, too.
    """
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]
