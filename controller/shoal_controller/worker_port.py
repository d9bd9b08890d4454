"""The port for workers where any may be taken (`HOST:0`): the last controller's of this folder, if it is free.

Workers of a controller that was killed look for the next one where they found it. Which port that was is a file in the
controller's data folder; nothing else is kept there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
from shoal_protos.addresses import join_address, split_address
from shoal_protos.errors import UserError

from shoal_controller.private_files import make_private_folder, write_private

FILE = "worker-port"

log = structlog.get_logger("shoal.worker_port")


@dataclass(frozen=True, slots=True)
class WorkerPort:
    """What was taken."""

    port: int
    lost: int = 0
    """The last controller's port, where somebody else has it now: whoever looks for a controller there finds none."""


def bind_again(folder: Path, address: str, bind: Callable[[str], int]) -> WorkerPort:
    """What `bind` has taken of `HOST:PORT`. Raises its `UserError`."""
    host, port = split_address(address)
    if port != 0:
        return WorkerPort(bind(address))
    last = _last(folder / FILE)
    if last:
        with suppress(UserError):
            return WorkerPort(bind(join_address(host, last)))
        log.warning("the last port for workers is taken by another program", port=last)
    taken = bind(address)
    try:
        make_private_folder(folder)
        write_private(folder / FILE, f"{taken}\n")
    except OSError as error:
        log.warning("the port for workers cannot be remembered", file=str(folder / FILE), error=str(error))
    return WorkerPort(taken, last)


def _last(file: Path) -> int:
    """0 where none is known."""
    try:
        found = file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return 0
    return int(found) if found.isascii() and found.isdigit() and 0 < int(found) < 1 << 16 else 0
