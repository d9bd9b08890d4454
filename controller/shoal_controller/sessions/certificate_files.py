"""The certificates of the gRPC port, read again when their files change: streams that are open go on.

gRPC asks before every handshake, on a thread of its own. Files that cannot be used (half written, a key of another
certificate) change nothing: the ones before stay in use, and the log says so once.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
import structlog
from shoal_protos.errors import UserError

Stamp = tuple[tuple[int, int, int], ...]
"""Inode, size and time of each file: what tells a new one."""

log = structlog.get_logger("shoal.certificates")


class CertificateFiles:
    """Certificate chain, private key and the workers' authorities of the gRPC port."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path) -> None:
        """Raises `UserError` for files that cannot be used."""
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._stamp = self._stamped()
        self.first = self._configuration()

    def newer(self) -> grpc.ServerCertificateConfiguration | None:
        """The configuration where files have changed since the last look; None where the last one stays."""
        try:
            stamp = self._stamped()
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            configuration = self._configuration()
        except UserError as error:
            log.error("certificates are not changed", why=str(error))
            return None
        log.info("certificates were read again", certificate=str(self._certificate))
        return configuration

    def _stamped(self) -> Stamp:
        files = {"certificate": self._certificate, "key": self._key, "client_ca": self._client_ca}
        stamp = []
        for part, path in files.items():
            try:
                found = path.stat()
            except OSError as error:
                raise _unreadable(part, path, error) from None
            stamp.append((found.st_ino, found.st_size, found.st_mtime_ns))
        return tuple(stamp)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        key, certificate = _read("key", self._key), _read("certificate", self._certificate)
        client_ca = _read("client_ca", self._client_ca)
        self._check()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)

    def _check(self) -> None:
        """gRPC would only refuse every handshake, and say nothing."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._certificate, self._key)
        except (ssl.SSLError, OSError) as error:
            raise UserError(
                f"certificate {self._certificate} and key {self._key} of the gRPC port cannot be used together "
                f"({error}); expected a PEM certificate chain and its private key"
            ) from None
        try:
            context.load_verify_locations(self._client_ca)
        except (ssl.SSLError, OSError) as error:
            raise UserError(
                f"client_ca of the gRPC port, {self._client_ca}, cannot be used ({error}); expected the PEM "
                "certificates of the authorities that sign the workers' certificates"
            ) from None


def _read(part: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(part, path, error) from None


def _unreadable(part: str, path: Path, error: OSError) -> UserError:
    return UserError(f"{part} of the gRPC port cannot be read from {path}: {error.strerror}")
