"""Addresses of callers, as both doors count them: an IPv4 address, or the /64 that an IPv6 site usually has."""

from __future__ import annotations

import ipaddress

IPV6_NETWORK = 64
"""Bits that one site usually has: all of its addresses count as one."""


def network_of(address: str) -> str:
    """What counts as one caller. An IPv4 address stays one where a port for both kinds shows it as an IPv6 one."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, IPV6_NETWORK), strict=False))
