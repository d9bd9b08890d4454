"""The certificates of the gRPC port, read again when their files change: streams that are open go on.

gRPC asks before every handshake, on a thread of its own.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
from shoal_protos.errors import UserError
from shoal_protos.pem import read_pem

from shoal_controller.renewed_files import RenewedFiles, load_pair

CERTIFICATE, KEY, CLIENT_CA = "SHOAL_GRPC_CERTIFICATE", "SHOAL_GRPC_KEY", "SHOAL_GRPC_CLIENT_CA"
"""The settings that name the files."""


class CertificateFiles:
    """Certificate chain, private key and the workers' authorities of the gRPC port."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path) -> None:
        """Raises `UserError` for files that cannot be used."""
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._files = RenewedFiles((certificate, key, client_ca), self._configuration)
        self.first = self._files.made
        self.newer = self._files.newer

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        certificate, key = read_pem(CERTIFICATE, self._certificate), read_pem(KEY, self._key)
        client_ca = read_pem(CLIENT_CA, self._client_ca)
        self._check()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)

    def _check(self) -> None:
        """gRPC would only refuse every handshake, and say nothing."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_pair(context, (CERTIFICATE, self._certificate), (KEY, self._key))
        try:
            context.load_verify_locations(self._client_ca)
        except (ssl.SSLError, OSError) as error:
            raise UserError(
                f"{CLIENT_CA} ({self._client_ca}) cannot be used ({error}); expected the certificates of the "
                "authorities that sign the workers' certificates"
            ) from None
