"""The store's own id: random, made once, sent to every worker.

A worker that trains believes that its run is over only where the store says so that it was welcomed with; an empty one
on the same port (a typo, a volume that is not mounted) knows nothing of its job. Read by the shell when it starts.
"""

from __future__ import annotations

from shoal_controller.store.made_once import made_once
from shoal_controller.store.store import Store

KEY = "/cluster"
SIZE = 8


async def ensure_cluster_id(store: Store) -> str:
    """The id, made if there is none yet. Raises `StoreError`; `Damaged` where no waiting helps."""
    return await made_once(store, KEY, SIZE)
