"""The port for workers: at which addresses it is taken, and which one where any may be.

Its host may stand for several addresses; it is taken at each, as far as it is free there. Where any port may be taken
(`HOST:0`) it is the last controller's of this folder, if that is free: workers of a controller that was killed look for
the next one where they found it. Which port that was is a file in the controller's data folder, with the file's own
number: what a copy of the folder says is another controller's port.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import EADDRINUSE
from pathlib import Path

import structlog
from shoal_protos.addresses import join_address, split_address
from shoal_protos.errors import UserError

from shoal_controller.process.private_files import for_this_user, make_private_folder

BACKLOG = 4096
"""Connections that wait in the kernel, for as long as the jobs are restored, say; it may allow fewer."""
Place = tuple[socket.AddressFamily, str]
FILE = "worker-port"

log = structlog.get_logger("shoal.worker_port")

EVERYWHERE: tuple[Place, ...] = ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0"))
"""Where all of a machine's addresses are listened at: at the first that can be, which may be open to IPv4 too."""


def listen(address: str) -> list[socket.socket]:
    """Sockets that listen at `HOST:PORT`, all at one port. Raises `UserError` where none can."""
    host, port = split_address(address)
    listening: list[socket.socket] = []
    faults: list[OSError] = []
    try:
        places, enough = _places_of(host)
    except OSError as error:
        raise UserError(_refusal(address, [error])) from error
    for family, place in places:
        try:
            listening.append(_listening(family, place, port or (listening[0].getsockname()[1] if listening else 0)))
        except OSError as error:
            faults.append(error)
        if len(listening) == enough:
            break
    if not listening:
        raise UserError(_refusal(address, faults)) from faults[0]
    return listening


def _places_of(host: str) -> tuple[Sequence[Place], int]:
    """Where to listen, and at how many of these at most."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    places = list(dict.fromkeys((family, str(place[0])) for family, _, _, _, place in found))
    if any(ipaddress.ip_address(place).is_unspecified for _, place in places):
        return EVERYWHERE, 1
    return places, len(places)


def _listening(family: socket.AddressFamily, place: str, port: int) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, place != "::")
        listening.bind((place, port))
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def _refusal(address: str, faults: list[OSError]) -> str:
    taken = any(fault.errno == EADDRINUSE for fault in faults)
    why = "it is in use" if taken else f"{faults[0].strerror or faults[0]}"
    return f"cannot listen for workers on {address}: {why}; give another --grpc HOST:PORT"


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
