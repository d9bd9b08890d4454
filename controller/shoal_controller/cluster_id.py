"""The store's own id: random, made once, sent to every worker.

A worker that trains believes that its run is over only where the store says so that it was welcomed with; an empty one
on the same port (a typo, a volume that is not mounted) knows nothing of its job. Read by the shell when it starts.
"""

from __future__ import annotations

import re
import secrets

from shoal_controller.store.store import Compare, Damaged, Put, Store

KEY = "/cluster"
FORM = re.compile(rb"[0-9a-f]{16}")


async def ensure_cluster_id(store: Store) -> str:
    """The id, made if there is none yet. Raises `StoreError`; `Damaged` where no waiting helps."""
    made = secrets.token_hex(8).encode()
    await store.transact([Compare(KEY)], [Put(KEY, made)])
    found = await store.get(KEY)
    if found is None:
        raise Damaged(f"the store has no {KEY} though it was just written; it loses what it is given")
    if not FORM.fullmatch(found.value):
        raise Damaged(f"the store's {KEY} is damaged ({found.value[:30]!r}); restore the store from a backup")
    return found.value.decode()
