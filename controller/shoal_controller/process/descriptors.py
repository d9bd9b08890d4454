"""Settings of the controller's process: its limit of open files, its garbage collector, its writable folders.

Shells and service managers begin with 1,024 open files, so a stranger's connections could keep a controller from its
store and its workers; commands that serve raise the limit at their start. Some 200,000 imported objects take 0.1 s to
look through, in which no heartbeat is heard, every few seconds with a thousand workers; `controller` exempts them once
it serves. `check_writable` asks whether files can be written before anything begins that needs them at its end.
"""

from __future__ import annotations

import gc
import resource
import tempfile
from contextlib import suppress
from pathlib import Path

from shoal_protos.errors import UserError

from shoal_controller.process.private_files import make_private_folder


def raise_descriptor_limit() -> None:
    """Raise the limit of open files to the hard limit. Where that is refused (it has no end, say) it stays as it is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


THRESHOLDS = (5_000, 20, 100)
"""New objects that are not gone again, and rounds, before new, young and old ones are looked through. What workers say
takes the place of what they said before, and is gone without a search.
"""


def spare_what_lasts() -> None:
    """Exempt all live objects from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def check_writable(folder: Path, content: str, setting: str, is_private: bool = True) -> None:
    """Make the folder if need be, for this user alone where it is private. Raises `UserError` where no file can be made
    in it. `content`: what is to be written there; `setting`: what says where.
    """
    try:
        if is_private:
            make_private_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{content} cannot be written to {folder}: {error.strerror}; name another folder with {setting}"
        ) from error
