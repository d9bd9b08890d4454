"""What `etcd://[USER@]HOST:PORT[,HOST:PORT…]/PREFIX` says, and what is not for a URL: password and certificates.

A URL is shown by `ps`, in logs and in errors, so a password in it is refused, and no error repeats it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr
from shoal_protos.addresses import is_connectable
from shoal_protos.errors import UserError

FORM = "etcd://[USER@]HOST:PORT,HOST:PORT/PREFIX"
PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)+")
LONGEST_PREFIX = 128


@dataclass(frozen=True, slots=True)
class EtcdUrl:
    """A cluster, as whom it is asked, and the prefix of all keys."""

    addresses: tuple[str, ...]
    user: str
    """Empty: nobody in particular."""
    prefix: str

    def __str__(self) -> str:
        return f"etcd://{','.join(self.addresses)}{self.prefix}"


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """`SHOAL_ETCD_…`: files and the password with which etcd is asked."""

    authorities: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    password: SecretStr | None = None


def parsed_etcd_url(url: str) -> EtcdUrl:
    """Raises `UserError` with what is wrong."""
    rest, _, query = url.removeprefix("etcd://").partition("?")
    if query:
        raise UserError("the store's URL has a query (what comes after its `?`), which means nothing; leave it out")
    user, separator, place = rest.rpartition("@")
    if ":" in user:
        raise UserError("the store's URL has a password in it, where everybody can read it; set SHOAL_ETCD_PASSWORD")
    if separator and not user:
        raise UserError(f"store etcd://@{place} has an empty user; expected {FORM}")
    hosts, _, path = place.partition("/")
    prefix = f"/{path}"
    shown = f"store etcd://{place}"
    addresses = tuple(hosts.split(","))
    for address in addresses:
        if not is_connectable(address):
            raise UserError(f"{shown}: {address!r} is not a valid address (expected HOST:PORT); expected {FORM}")
    if not PREFIX.fullmatch(prefix) or len(prefix) > LONGEST_PREFIX:
        raise UserError(
            f"{shown}: {prefix!r} is not a valid prefix of keys; expected a path such as /shoal, of at most "
            f"{LONGEST_PREFIX} letters, digits, '.', '_', '-' and '/', without an empty part"
        )
    return EtcdUrl(addresses, user, prefix)
