"""Whether another program listens at an address, asked before gRPC is: it would write lines of its own about it."""

from __future__ import annotations

import errno
import ipaddress
import socket

from shoal_protos.addresses import split_address


def is_taken(address: str) -> bool:
    """Whether all that `HOST:PORT` stands for is taken. False where that is not known: gRPC itself decides how it
    listens on all of a machine's addresses, and says what is wrong with others.
    """
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        places = {
            (family, place) for family, _, _, _, place in found if not ipaddress.ip_address(place[0]).is_unspecified
        }
    except (OSError, ValueError):
        return False
    return port > 0 and bool(places) and all(_is_taken(family, place) for family, place in places)


def _is_taken(family: int, place: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(place)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
