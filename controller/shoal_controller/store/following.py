"""Follows all keys below a prefix, whatever becomes of the store meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog
from shoal_protos.errors import StoreError

from shoal_controller.store.store import Compacted, Store

PAUSE_SECONDS = 1.0
"""Between two attempts to watch a store that fails."""

log = structlog.get_logger("shoal.store")


async def follow(store: Store, prefix: str, found: Callable[[Mapping[str, bytes]], None]) -> None:
    """Call `found` with all keys below the prefix and their values: at once, and after every change. For ever."""
    while True:
        try:
            listing = await store.list(prefix)
            entries = {entry.key: entry.value for entry in listing.entries}
            found(entries)
            async with store.watch(prefix, listing.revision) as watch:
                async for changes in watch:
                    for change in changes.changes:
                        entries.pop(change.key, None)
                        if change.value is not None:
                            entries[change.key] = change.value
                    found(entries)
        except Compacted:
            continue
        except StoreError as error:
            log.warning("changes in the store are not heard of", prefix=prefix, error=str(error))
            await asyncio.sleep(PAUSE_SECONDS)
