"""TLS of the REST port: its certificate and key, looked at before every handshake and read again when they change.

Connections that are open go on with the certificate that they began with. Called by `web.py`'s users.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from shoal_controller.renewed_files import RenewedFiles, load_pair

CERTIFICATE, KEY = "SHOAL_HTTP_CERTIFICATE", "SHOAL_HTTP_KEY"
"""The settings that name the files."""


def web_certificate(certificate: Path, key: Path) -> ssl.SSLContext:
    """What the port is served with. Raises `UserError` for files that cannot be used."""

    def made() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_pair(context, (CERTIFICATE, certificate), (KEY, key))
        return context

    files = RenewedFiles((certificate, key), made)

    def on_handshake(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = files.latest()

    context = files.made
    context.sni_callback = on_handshake  # called whether the client names a server or not
    return context
