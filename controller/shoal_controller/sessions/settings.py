"""Who may open a session: the token and the certificates of the gRPC side.

`settings.py` of the controller reads these from the environment; the service is given them.
"""

from __future__ import annotations

import hmac
from pathlib import Path

import grpc
from pydantic import BaseModel, ConfigDict, SecretStr, model_validator
from shoal_protos.errors import Refused, UserError


class SessionSettings(BaseModel):
    """How workers are let in. Without token and certificates everybody who reaches the port is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: SecretStr | None = None
    """Workers must show it as `authorization: Bearer TOKEN`."""
    certificate: Path | None = None
    """PEM file with the controller's certificate chain. With it, and the next two, the port speaks mutual TLS only."""
    key: Path | None = None
    """PEM file with the certificate's private key."""
    client_ca: Path | None = None
    """PEM file with the authorities that sign the workers' certificates."""
    hello_seconds: float = 10.0
    """A stream whose hello does not come in time is ended: it holds a place and says nothing."""

    @model_validator(mode="after")
    def _all_of_tls_or_nothing(self) -> SessionSettings:
        given = [name for name in ("certificate", "key", "client_ca") if getattr(self, name) is not None]
        if 0 < len(given) < 3:
            raise ValueError(f"mutual TLS needs certificate, key and client_ca; only {' and '.join(given)} given")
        return self

    def credentials(self) -> grpc.ServerCredentials | None:
        """For mutual TLS; None without certificates."""
        if self.certificate is None or self.key is None or self.client_ca is None:
            return None
        pair = (_read("key", self.key), _read("certificate", self.certificate))
        return grpc.ssl_server_credentials([pair], _read("client_ca", self.client_ca), require_client_auth=True)

    def check_token(self, authorization: str | bytes | None) -> None:
        """Raises `Refused` unless the header shows the token. Takes as long for a near miss as for nonsense."""
        if self.token is None:
            return
        shown = authorization.encode() if isinstance(authorization, str) else authorization or b""
        if not hmac.compare_digest(shown, b"Bearer " + self.token.get_secret_value().encode()):
            found = "another token" if shown else "no token"
            raise Refused(f"the worker showed {found}; set SHOAL_TOKEN to this controller's token")


def _read(what: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{what} of the gRPC port cannot be read from {path}: {error.strerror}") from None
