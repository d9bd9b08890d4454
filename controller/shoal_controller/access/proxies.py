"""Proxies before the REST port: the addresses of their clients are believed, and nobody else's word is.

`settings.py` reads which they are, `api/guard.py` asks for the client of a request. Standard library only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

FORWARDED = "x-forwarded-for"
"""The header in which each proxy adds the address of the other end of its connection."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Proxies:
    """Networks of the proxies; none: nobody is believed."""

    networks: tuple[Network, ...] = ()

    @classmethod
    def named(cls, text: str) -> Proxies:
        """Read addresses and networks with commas between. Raises `ValueError` that names the one that is neither."""
        return cls(tuple(map(_network, filter(None, map(str.strip, text.split(","))))))

    def client(self, peer: str, forwarded: Iterable[str]) -> str:
        """Return the client of a request: the last address of the way that it came which is not a proxy's.

        `peer`: the other end of the connection. `forwarded`: values of the header, which anybody can have begun.
        """
        address, hops = peer, [hop.strip() for value in forwarded for hop in value.split(",")]
        while hops and self._is_proxy(address) and _is_address(hops[-1]):
            address = hops.pop()
        return address

    def _is_proxy(self, address: str) -> bool:
        if not self.networks or not _is_address(address):
            return False
        found = ipaddress.ip_address(address)
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        return any((mapped or found) in network for network in self.networks)


NO_PROXIES = Proxies()


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise ValueError(f"{text!r} is not an address or a network (expected 10.0.0.7 or 10.0.0.0/24)") from None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
