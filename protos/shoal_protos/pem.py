"""PEM files (certificates, authorities, private keys) that settings name, and OpenSSL's numbers for what is wrong.

gRPC reports nothing about a file that it cannot use: every handshake fails, and is tried again for ever. The numbers
are `verify_code` values that Python's `ssl` does not name (`X509_V_ERR_…` in x509_vfy.h); both sides make their own
sentences of them.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from shoal_protos.errors import UserError

MARK = b"-----BEGIN "


def read_pem(setting: str, path: Path) -> bytes:
    """What the file contains. A `UserError` names the setting that names a file of no use."""
    try:
        found = path.read_bytes()
    except OSError as error:
        raise unreadable(setting, path, error) from None
    if MARK not in found:
        raise UserError(f"{setting} names {path}, which is not a PEM file (no line begins with -----BEGIN)")
    return found


def believed(authorities: Path | None) -> ssl.SSLContext:
    """Return what a client trusts: the authorities in the file of SHOAL_CA; None: those of this system.

    Raises `UserError`.
    """
    try:
        return ssl.create_default_context(cafile=authorities)
    except (ssl.SSLError, OSError) as error:
        raise UserError(
            f"SHOAL_CA is {authorities}, which cannot be used ({error}); expected a PEM file with the authorities that "
            "sign the controllers' certificates"
        ) from None


def unreadable(setting: str, path: Path, error: OSError) -> UserError:
    """The sentence for a file that is not there, or may not be read."""
    return UserError(f"{setting} names {path}, which cannot be read: {error.strerror}")


NOT_YET_VALID, EXPIRED = 9, 10
OTHER_NAMES = (62, 64)
"""It is for other hosts, or for other addresses."""
UNKNOWN_AUTHORITY = (2, 18, 19, 20, 21)

AGAINST_RFC_5280 = range(80, 94)
"""Parts of it are missing or contradict each other. Looked at where the check is strict, as in Python from 3.13 on."""
