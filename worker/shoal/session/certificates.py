"""A worker's certificates, as TLS of the standard library reads them: whether they can be used, and what is wrong.

gRPC takes any bytes and then fails every handshake without a word. `settings.py` looks here before it hands files to
gRPC, `unreachable.py` when a controller could not be reached.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from shoal_protos.errors import UserError


@dataclass(frozen=True, slots=True)
class WorkerCertificates:
    """PEM files of a worker: the controller's authority, and its own certificate with the key, where it has one."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """For a connection to a controller. Raises `UserError` for files that cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols(["h2"])
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does
        try:
            context.load_verify_locations(self.ca)
        except (ssl.SSLError, OSError) as error:
            raise UserError(
                f"SHOAL_TLS_CA names {self.ca}, which cannot be used ({error}); expected the PEM certificate of the "
                "authority that signed the controller's"
            ) from None
        self._load_own(context)
        return context

    def fault_of_own(self) -> ssl.SSLCertVerificationError | None:
        """What is wrong with this worker's own certificate, as far as it can be told here: a handshake in memory, in
        which it is checked by the authority of the controller's; None where nothing is, or it has none.
        """
        if self.certificate is None:
            return None
        judge = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        judge.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        judge.verify_mode = ssl.CERT_REQUIRED
        judge.load_verify_locations(self.ca)
        shown = unverified()
        for context in (judge, shown):
            self._load_own(context)
        try:
            _shake_hands(judge, shown)
        except ssl.SSLCertVerificationError as error:
            return error
        return None

    def _load_own(self, context: ssl.SSLContext) -> None:
        if self.certificate is None or self.key is None:
            return
        try:
            context.load_cert_chain(self.certificate, self.key, password="")  # or OpenSSL asks for it in the terminal
        except (ssl.SSLError, OSError) as error:
            raise UserError(
                f"SHOAL_TLS_CERTIFICATE {self.certificate} and SHOAL_TLS_KEY {self.key} cannot be used together "
                f"({error}); expected a PEM certificate chain and its private key, without a password"
            ) from None


def unverified() -> ssl.SSLContext:
    """A client that shows nothing, sends nothing, and only finds out whether TLS is spoken."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """All flights of one handshake. Raises what the server finds."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
