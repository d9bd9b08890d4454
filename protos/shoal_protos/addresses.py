"""Addresses, `HOST:PORT`: taken apart, put together, and whether a host is this machine. For both sides.

Whoever shows a refusal to a person names the setting or field first; what is allowed beyond the form (port 0, several
of them) is its business too.
"""

from __future__ import annotations

import ipaddress
import re

MOST_PORT = 65_535
_ADDRESS = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>[0-9]{1,5})", re.ASCII
)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, or of `[HOST]:PORT` where the host has colons. Raises `ValueError`."""
    matched = _ADDRESS.fullmatch(address)
    if matched is None or int(matched["port"]) > MOST_PORT:
        raise ValueError(f"{address!r} is not a valid address; expected HOST:PORT, such as 127.0.0.1:7070")
    return matched["six"] or matched["host"], int(matched["port"])


def is_connectable(address: str) -> bool:
    """Whether its form is that of an address to connect to: port 0 is none."""
    try:
        return split_address(address)[1] > 0
    except ValueError:
        return False


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_here(host: str) -> bool:
    """Whether a host is reached from this machine only. A name that anybody could give an address, such as
    127.example.org, is not.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
