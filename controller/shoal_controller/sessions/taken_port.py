"""Whether another program listens at an address, asked before gRPC is: it would write lines of its own about it."""

from __future__ import annotations

import ipaddress
import socket
from errno import EADDRINUSE

from shoal_protos.addresses import split_address

Place = tuple[object, ...]

EVERYWHERE = ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0"))
"""Where gRPC listens for all of a machine's addresses: at the first that it can, which may be open to IPv4 too."""


def is_taken(address: str) -> bool:
    """Whether all that `HOST:PORT` stands for is taken. False where that is not known: gRPC says what else is wrong."""
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        places: set[tuple[int, Place]] = {(family, place) for family, _, _, _, place in found}
        if any(ipaddress.ip_address(place[0]).is_unspecified for *_, place in found):
            places = {(family, (everywhere, port)) for family, everywhere in EVERYWHERE}
    except (OSError, ValueError):
        return False
    faults = {_fault(family, place) for family, place in places} if port > 0 else {0}
    return EADDRINUSE in faults and 0 not in faults


def _fault(family: int, place: Place) -> int:
    """Why nothing can listen there, as a number of the system's; 0: it can."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, place[0] != "::")
            tried.bind(place)
    except OSError as error:
        return error.errno or -1
    return 0
