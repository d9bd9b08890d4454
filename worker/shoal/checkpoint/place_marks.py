"""Marks: small files in a place for checkpoints by which workers see whether they look into one and the same place.

A path alone does not tell: the same one is a disk of its own on another host. Each worker says in its hello which marks
it sees, and leaves one where there is none; the job takes the first one's, and every other worker must see one of them
(training/checkpoint_loading.py). Two workers in one place have a mark in common, for one that leaves a mark looks once
more afterwards. Nothing is ever read from a mark but its name.
"""

from __future__ import annotations

import re
import secrets
import socket

from shoal.checkpoint.manifest import safe_name
from shoal.checkpoint.storage import Storage, open_storage
from shoal.core.checkpoint_errors import StorageFull

MARK = re.compile(r"place-(?P<host>[A-Za-z0-9_]{1,64})-[0-9a-f]{8}")
MOST_MARKS = 16
CONTENT = b"Shoal's workers leave this file to see that all of them save to one place.\n"


def leave_mark(path: str) -> tuple[str, ...]:
    """Return the names of the marks in a place, of which there is one at least afterwards; none where it is full.

    Raises `StorageFailed` where the place cannot be listed or written.
    """
    storage = open_storage(path)
    storage.prepare()
    if found := marks_in(storage):
        return found
    mark = f"place-{safe_name(socket.gethostname())}-{secrets.token_hex(4)}"
    try:
        storage.publish(mark, CONTENT)
    except StorageFull:
        return ()  # it says so with every save
    return marks_in(storage)


def marks_in(storage: Storage) -> tuple[str, ...]:
    """Return the names of the marks in a place."""
    return tuple(sorted(name for name in storage.list() if MARK.fullmatch(name)))[:MOST_MARKS]


def host_of(mark: str) -> str:
    """Return the host of the worker that has left a mark, as far as its name tells."""
    match = MARK.fullmatch(mark)
    return match["host"] if match is not None else "another host"
