"""Who a controller is to those after it: the store that it led with, which no copy, backup or second mount of it is.

Records of workers name it (`launchers/process_records.py`), and `launchers/ownership.py` compares. Linux only.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from shoal_protos.living_runs import LOCK, is_locked


@dataclass(frozen=True, slots=True)
class Owner:
    """A controller's store. Who holds the lock file in its folder leads with it, and no copy of it is that file."""

    folder: str
    """Without links; of a store that is no folder: its name."""
    device: int = 0
    inode: int = 0

    @classmethod
    def of_folder(cls, folder: Path) -> Owner:
        """Raises `OSError`."""
        lock = (folder / LOCK).stat()
        return cls(str(folder.resolve()), lock.st_dev, lock.st_ino)

    @property
    def is_in_place(self) -> bool:
        """Whether its lock file is where it was; a store that is no folder cannot be moved with one."""
        try:
            return not self.inode or Owner.of_folder(Path(self.folder)) == self
        except OSError:
            return False

    @property
    def is_held(self) -> bool:
        """Whether a process of this machine holds its lock, wherever the file is, and be it deleted."""
        return is_locked(self.device, self.inode)

    def hold(self) -> int:
        """Take its lock where the file is; returns the descriptor. Raises `OSError`, where another has it too."""
        descriptor = os.open(Path(self.folder) / LOCK, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
