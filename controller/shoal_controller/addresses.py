"""Whether an address is reached from this machine only. Asked where doors are opened, guarded and knocked at."""

from __future__ import annotations

import ipaddress


def is_here(host: str) -> bool:
    """A name that anybody could give an address, such as 127.example.org, is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
