"""Files that this user alone may read: logs and records of workers, curves, locks. A log shows what its script knows.

Used by whatever writes into the data folder. What is there already keeps its mode, which somebody may have chosen.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone. Raises `OSError`."""
    for missing in [one for one in (*reversed(folder.parents), folder) if not one.exists()]:
        missing.mkdir(mode=0o700, exist_ok=True)
    if not folder.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))


def for_this_user(path: str, flags: int) -> int:
    """Open a file, made for this user alone: an `opener` for `open`."""
    return os.open(path, flags, 0o600)


def write_private(path: Path, text: str) -> None:
    """Write a whole file for this user alone. Raises `OSError`."""
    with open(path, "w", opener=for_this_user) as file:
        file.write(text)
