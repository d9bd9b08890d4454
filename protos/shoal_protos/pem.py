"""Files in PEM form (certificates, their authorities, private keys) that settings of the worker or the controller name.

gRPC says nothing of one that it cannot use: every handshake fails, and is tried again for ever.
"""

from __future__ import annotations

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


def unreadable(setting: str, path: Path, error: OSError) -> UserError:
    """The sentence for a file that is not there, or may not be read."""
    return UserError(f"{setting} names {path}, which cannot be read: {error.strerror}")
