"""Takes the port for workers: at every address that its host stands for, as far as it is free there."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from errno import EADDRINUSE

from shoal_protos.addresses import split_address
from shoal_protos.errors import UserError

BACKLOG = 4096
"""Connections that wait in the kernel, for as long as the jobs are restored, say; it may allow fewer."""
Place = tuple[socket.AddressFamily, str]

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
