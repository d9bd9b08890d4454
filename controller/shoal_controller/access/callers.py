"""The caller of a request: the role that its token has, who it is, and the network that its address counts as.

Plain data. `token_register.py` finds the role of a token, `api/guard.py` the role that a request needs, and
`jobs/audit.py` records who did what. Both ports count addresses by `network_of`.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus

from shoal_protos.error_codes import ErrorCode
from shoal_protos.errors import Refused


class Role(StrEnum):
    """What a token may do; each role includes those before it."""

    VIEW = "view"
    OPERATE = "operate"
    ADMIN = "admin"

    def includes(self, other: Role) -> bool:
        roles = list(Role)
        return roles.index(self) >= roles.index(other)


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request."""

    token: str
    """Name of the token that it showed; empty where none is asked for."""
    role: Role
    address: str = ""
    """Where it came from; a proxy's where one stands between that `SHOAL_PROXIES` does not name."""


class Unauthorized(Refused):
    """The request does not show a token that is known and valid."""

    http_status = HTTPStatus.UNAUTHORIZED
    grpc_status = "UNAUTHENTICATED"
    problem_code = ErrorCode.UNAUTHORIZED


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
