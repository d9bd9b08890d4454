"""Opens the store that a URL names: `embedded:DIR`. The only place that knows which kinds of stores there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shoal_protos.errors import UserError

from shoal_controller.store.embedded import EmbeddedStore
from shoal_controller.store.store import Store

Timed = Callable[[str, float], None]
"""Called with the kind of each request and the seconds that it took."""


async def open_store(url: str, timed: Timed | None = None) -> Store:
    """The open store. A `UserError` refuses the URL, a `StoreError` a store that cannot be opened."""
    kind, separator, rest = url.partition(":")
    if kind == "embedded" and separator and rest:
        return await EmbeddedStore.open(Path(rest), timed)
    if kind == "etcd":
        raise UserError(f"store {url}: etcd is not supported yet; use embedded:DIR")
    raise UserError(f"store is {url!r}; expected embedded:DIR or etcd://HOST:PORT,HOST:PORT/PREFIX")
