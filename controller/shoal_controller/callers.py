"""Who asks: the roles that a token can have, and what is known of the caller of a request. Plain data.

`token_register.py` says whose a token is, `api/guard.py` what a request needs, `runner.py` writes down who did what.
"""

from __future__ import annotations

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
