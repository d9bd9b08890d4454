"""The port for workers where any may be taken (`HOST:0`): the last controller's of this folder, if it is free.

Workers of a controller that was killed look for the next one where they found it. Which port that was is a file in the
controller's data folder, with the file's own number: what a copy of the folder says is another controller's port.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
from shoal_protos.addresses import join_address, split_address
from shoal_protos.errors import UserError

from shoal_controller.process.private_files import for_this_user, make_private_folder

FILE = "worker-port"

log = structlog.get_logger("shoal.worker_port")


@dataclass(frozen=True, slots=True)
class WorkerPort:
    """What was taken."""

    port: int
    lost: int = 0
    """The last controller's port, where somebody else has it now: whoever looks for a controller there finds none."""


def bind_again(folder: Path, address: str, bind: Callable[[str], int], adopt: bool = False) -> WorkerPort:
    """What `bind` has taken of `HOST:PORT`. Raises its `UserError`. `adopt`: a copy's port is taken too."""
    host, port = split_address(address)
    if port != 0:
        return WorkerPort(bind(address))
    last = _last(folder / FILE, adopt)
    if last:
        with suppress(UserError):
            return WorkerPort(bind(join_address(host, last)))
        log.warning("the last port for workers is taken", port=last)
    return WorkerPort(bind(address), last)


def remember(folder: Path, address: str, port: int) -> None:
    """Write which port was taken where any may be; for starts that are not refused, for workers will look there."""
    if split_address(address)[1] != 0:
        return
    try:
        make_private_folder(folder)
        with open(folder / FILE, "w", opener=for_this_user) as file:
            file.write(f"{port} {_number(os.fstat(file.fileno()))}\n")
    except OSError as error:
        log.warning("the port for workers cannot be remembered", file=str(folder / FILE), error=str(error))


def _number(found: os.stat_result) -> str:
    """Of a file, which no copy of it has."""
    return f"{found.st_dev}:{found.st_ino}"


def _last(file: Path, adopt: bool) -> int:
    """0 where none is known. An older version's file has no number."""
    try:
        found, _, number = file.read_text().strip().partition(" ")
        if number not in ("", _number(file.stat())) and not adopt:
            return 0
    except (OSError, UnicodeDecodeError):
        return 0
    return int(found) if found.isascii() and found.isdigit() and 0 < int(found) < 1 << 16 else 0
