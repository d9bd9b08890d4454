"""The settings of the gRPC port that decide who may open a session: its token and its certificates.

The controller's `settings.py` reads them from the environment; the service is given them. gRPC asks for the
certificates before every handshake, on a thread of its own; changed files are read again, and open streams go on.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
from pydantic import BaseModel, ConfigDict, SecretStr, model_validator
from shoal_protos.errors import UserError
from shoal_protos.pem import read_pem

from shoal_controller.access.worker_tokens import WorkerTokens
from shoal_controller.process.renewed_files import RenewedFiles, load_pair
from shoal_controller.sessions.stream_counts import StreamLimits


class SessionSettings(BaseModel):
    """How workers are let in. Without token and certificates everybody who reaches the port is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: SecretStr | None = None
    """The operators' token: workers must show it, or one that is derived from it."""
    certificate: Path | None = None
    """PEM file with the controller's certificate chain. With it, and the next two, the port speaks mutual TLS only."""
    key: Path | None = None
    """PEM file with the certificate's private key."""
    client_ca: Path | None = None
    """PEM file with the authorities that sign the workers' certificates."""
    limits: StreamLimits = StreamLimits()
    """How many streams one caller may have open."""
    hello_seconds: float = 10.0
    """A stream whose hello does not come in time is ended: it holds a place and says nothing."""

    @model_validator(mode="after")
    def _all_of_tls_or_nothing(self) -> SessionSettings:
        given = [name for name in ("certificate", "key", "client_ca") if getattr(self, name) is not None]
        if 0 < len(given) < 3:
            raise ValueError(f"mutual TLS needs certificate, key and client_ca; only {' and '.join(given)} given")
        return self

    def credentials(self) -> grpc.ServerCredentials | None:
        """Credentials for mutual TLS, read again when the files change; None without certificates."""
        if self.certificate is None or self.key is None or self.client_ca is None:
            return None
        files = CertificateFiles(self.certificate, self.key, self.client_ca)
        return grpc.dynamic_ssl_server_credentials(
            files.first,
            files.newer,  # type: ignore[arg-type]  # its None means unchanged, which the stubs leave out
            require_client_authentication=True,
        )

    def worker_tokens(self) -> WorkerTokens | None:
        """What makes and reads the workers' tokens; None where they need none."""
        return None if self.token is None else WorkerTokens(self.token.get_secret_value())


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
