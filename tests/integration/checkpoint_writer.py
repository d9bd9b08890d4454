"""A process that does nothing but save, one step after another, until it is killed; and one that cannot be stopped
from deleting. The tests fork it."""

from __future__ import annotations

from pathlib import Path


def save_for_ever(folder: str, keep: int) -> None:
    """A checkpoint of every step, and retention after each."""
    from checkpoints import save, train, trained
    from shoal.checkpoint.catalogue import Keep, prune
    from shoal.checkpoint.storage import LocalStorage

    storage, state = LocalStorage(Path(folder)), trained(1)
    while True:
        name, _ = save(state, storage)
        prune(storage, name, Keep(keep, None))
        train(state, 1)
