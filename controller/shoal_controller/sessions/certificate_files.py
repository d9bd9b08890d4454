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
from shoal_protos.pem import read_pem, unreadable

Stamp = tuple[tuple[int, int, int], ...]
"""Inode, size and time of each file: what tells a new one."""

CERTIFICATE, KEY, CLIENT_CA = "SHOAL_GRPC_CERTIFICATE", "SHOAL_GRPC_KEY", "SHOAL_GRPC_CLIENT_CA"
"""The settings that name the files."""

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
        files = {CERTIFICATE: self._certificate, KEY: self._key, CLIENT_CA: self._client_ca}
        stamp = []
        for setting, path in files.items():
            try:
                found = path.stat()
            except OSError as error:
                raise unreadable(setting, path, error) from None
            stamp.append((found.st_ino, found.st_size, found.st_mtime_ns))
        return tuple(stamp)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        key, certificate = read_pem(KEY, self._key), read_pem(CERTIFICATE, self._certificate)
        client_ca = read_pem(CLIENT_CA, self._client_ca)
        self._check()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)

    def _check(self) -> None:
        """gRPC would only refuse every handshake, and say nothing."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._certificate, self._key)
        except (ssl.SSLError, OSError) as error:
            raise UserError(
                f"{CERTIFICATE} ({self._certificate}) and {KEY} ({self._key}) cannot be used together ({error}); "
                "expected a certificate chain and its private key"
            ) from None
        try:
            context.load_verify_locations(self._client_ca)
        except (ssl.SSLError, OSError) as error:
            raise UserError(
                f"{CLIENT_CA} ({self._client_ca}) cannot be used ({error}); expected the certificates of the "
                "authorities that sign the workers' certificates"
            ) from None
