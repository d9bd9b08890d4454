"""Random keys that a store has for itself: whoever needs one first makes it, everybody else finds it.

Nothing repeats the value of a key, because it may be a secret.
"""

from __future__ import annotations

import re
import secrets

from shoal_controller.store.store import Compare, Damaged, Put, Store


async def made_once(store: Store, key: str, size: int) -> str:
    """The key's value, so many random bytes in hexadecimal digits. Raises `StoreError`; `Damaged` where no waiting
    helps.
    """
    await store.transact([Compare(key)], [Put(key, secrets.token_hex(size).encode())])
    found = await store.get(key)
    if found is None:
        raise Damaged(f"the store has no {key} though it was just written; it loses what it is given")
    if not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * size), found.value):
        raise Damaged(
            f"the store's {key} is damaged ({len(found.value)} bytes; expected {2 * size} hexadecimal digits); restore "
            "the store from a backup"
        )
    return found.value.decode()
