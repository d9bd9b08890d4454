"""What is made from files, and made again when they change: certificates that are renewed while they are in use.

Files that cannot be used (half written, a key of another certificate) change nothing: what was made before stays in
use, and the log says so once. Used by both ports and by the client of other controllers.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog
from shoal_protos.errors import UserError
from shoal_protos.pem import read_pem

Stamp = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and time of each file: what tells a new one. None for one that is not there."""

Made = TypeVar("Made")

log = structlog.get_logger("shoal.certificates")


class RenewedFiles(Generic[Made]):
    """Files, and what is made from them."""

    def __init__(self, files: Sequence[Path], make: Callable[[], Made]) -> None:
        """Raises the `UserError` of `make`, which reads the files."""
        self._files, self._make = files, make
        self._stamp = self._stamped()
        self.made = make()

    def newer(self) -> Made | None:
        """What is made of files that have changed since the last look; None where nothing is new."""
        stamp = self._stamped()
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            self.made = self._make()
        except UserError as error:
            log.warning("certificates are not changed", why=str(error))
            return None
        log.info("certificates were read again", file=str(self._files[0]))
        return self.made

    def latest(self) -> Made:
        """What is made of the files as they are now, or were when they could be used."""
        self.newer()
        return self.made

    def _stamped(self) -> Stamp:
        return tuple(map(_stamp_of, self._files))


def _stamp_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def load_pair(context: ssl.SSLContext, certificate: tuple[str, Path], key: tuple[str, Path]) -> None:
    """Give the context a certificate and its key, each a setting and the file that it names. Raises `UserError`; a key
    with a password is never asked about.
    """
    for setting, path in (certificate, key):
        read_pem(setting, path)
    try:
        context.load_cert_chain(certificate[1], key[1], password="")
    except (ssl.SSLError, OSError) as error:
        named = " and ".join(f"{setting} ({path})" for setting, path in (certificate, key))
        raise UserError(
            f"{named} cannot be used together ({error}); expected a certificate chain and its private key, without a "
            "password"
        ) from None
