"""The port for workers where any may be taken (`HOST:0`): the last controller's of this folder, if it is free.

Workers of a controller that was killed look for the next one where they found it. Which port that was is a file in the
controller's data folder; nothing else is kept there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog
from shoal_protos.addresses import join_address, split_address
from shoal_protos.errors import UserError

FILE = "worker-port"

log = structlog.get_logger("shoal.worker_port")


def bind_again(folder: Path, address: str, bind: Callable[[str], int]) -> int:
    """The port that `bind` has taken of `HOST:PORT`. Raises its `UserError`."""
    host, port = split_address(address)
    if port != 0:
        return bind(address)
    last = _last(folder / FILE)
    if last:
        with suppress(UserError):
            return bind(join_address(host, last))
        log.warning("the last port for workers is taken; those that still run there are not heard", port=last)
    taken = bind(address)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(f"{taken}\n")
    except OSError as error:
        log.warning("the port for workers cannot be remembered", file=str(folder / FILE), error=str(error))
    return taken


def _last(file: Path) -> int:
    """0 where none is known."""
    try:
        found = file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return 0
    return int(found) if found.isascii() and found.isdigit() and 0 < int(found) < 1 << 16 else 0
