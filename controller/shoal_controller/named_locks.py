"""A lock for each name, for as long as somebody has it or waits for it: what is slow for one name keeps nobody from
others. For `shell.py`; knows nothing of jobs.
"""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary


class NamedLocks:
    """Of one event loop."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def is_held(self, name: str) -> bool:
        return self.of(name).locked()
