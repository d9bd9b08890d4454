"""Opens the store that a URL names: `embedded:DIR` or `etcd://…`. The only place that knows which kinds there are."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from shoal_protos.errors import UserError

from shoal_controller.store.database import read_beside
from shoal_controller.store.embedded import FILE, EmbeddedStore
from shoal_controller.store.etcd_store import FORM, EtcdAccess, EtcdStore, parsed_etcd_url
from shoal_controller.store.store import Entry, Store, Timed


async def all_entries(url: str, etcd: EtcdAccess) -> tuple[Entry, ...]:
    """All keys of a store at one revision, beside a controller that has it too. Raises as `open_store` does, and
    `UserError` where there is no store.
    """
    kind, separator, rest = url.partition(":")
    if kind == "embedded" and separator and rest:
        return await asyncio.to_thread(read_beside, Path(rest) / FILE)
    store = await open_store(url, None, etcd)
    try:
        return (await store.list("/")).entries
    finally:
        await store.close()


async def open_store(url: str, timed: Timed | None = None, etcd: EtcdAccess | None = None) -> Store:
    """The open store. A `UserError` refuses the URL, or what etcd answers for good; a `StoreError` a directory that
    cannot be opened; an etcd that cannot be reached is waited for.
    """
    kind, separator, rest = url.partition(":")
    if kind == "embedded" and separator and rest:
        return await EmbeddedStore.open(Path(rest), timed)
    if url.startswith("etcd://"):
        return await EtcdStore.open(parsed_etcd_url(url), etcd or EtcdAccess(), timed)
    shown = re.sub(r"//.*@", "//…@", url)  # there may be a password
    raise UserError(f"store is {shown!r}; expected embedded:DIR or {FORM}")
