"""How REST's clients recognise a controller that serves HTTPS, and what they say where they do not.

The commands ask with it, and controllers ask each other. By default the authorities count that this system trusts;
those in the file of `SHOAL_CA` count instead.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from shoal_protos.pem import (
    AGAINST_RFC_5280,
    EXPIRED,
    NOT_YET_VALID,
    OTHER_NAMES,
    UNKNOWN_AUTHORITY,
    believed,
)
from shoal_protos.rest import causes

from shoal_controller.process.renewed_files import RenewedFiles

PROBE_SECONDS = 2.0
"""How long a port may take to show that it speaks TLS."""

NOT_TLS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNSUPPORTED_PROTOCOL"}
"""OpenSSL's reasons where the other side speaks something else."""

HUNG_UP = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
"""What a port that speaks TLS does to a request without it."""


class ClientTls:
    """The authorities of one client, read again when their file changes."""

    def __init__(self, ca: Path | None) -> None:
        """Raises `UserError` for a file that cannot be used. What the system trusts is read when it is needed."""
        self._ca = ca
        if ca is not None:
            _ = self._files

    @cached_property
    def _files(self) -> RenewedFiles[ssl.SSLContext]:
        return RenewedFiles([] if self._ca is None else [self._ca], lambda: believed(self._ca))

    def context(self) -> ssl.SSLContext:
        """For the next connection."""
        return self._files.latest()

    def trouble(self, error: BaseException, url: str) -> str:
        """What is wrong with the TLS of a controller, as a sentence; empty where the error is about something else."""
        for cause in causes(error):
            if isinstance(cause, ssl.SSLCertVerificationError):
                return self._about_certificate(cause, url)
            if isinstance(cause, ssl.SSLError) and cause.reason in NOT_TLS:
                return f"the controller at {url} does not speak TLS; its URL is {_with_scheme(url, 'http')}"
        return ""

    def _about_certificate(self, error: ssl.SSLCertVerificationError, url: str) -> str:
        code, host = error.verify_code, urlsplit(url).hostname
        if code == EXPIRED:
            return (
                f"the certificate of {url} has expired; renew the file of its SHOAL_HTTP_CERTIFICATE: it is read again"
            )
        if code == NOT_YET_VALID:
            return f"the certificate of {url} is not valid yet; look at the clocks of both machines"
        if code in OTHER_NAMES:
            return f"the certificate of {url} does not name {host}; use a name that it has, or issue one for {host}"
        if code in UNKNOWN_AUTHORITY:
            known, todo = "that this system trusts", "set SHOAL_CA to a PEM file with"
            if self._ca is not None:
                known, todo = f"in {self._ca} (SHOAL_CA)", "add"
            return f"the certificate of {url} is signed by no authority {known}; {todo} the one that signs it"
        todo = ""
        if code in AGAINST_RFC_5280:
            todo = (
                "; issue it and its authority's as RFC 5280 says, which Python expects from 3.13 on (docs/security.md)"
            )
        return f"the certificate of {url} is refused: {error.verify_message}{todo}"


def unverified() -> ssl.SSLContext:
    """For a look at whether a port speaks TLS: nothing is said there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def https_instead(error: httpx.TransportError, url: str) -> str:
    """A sentence where a controller that was asked by `http://` hung up because it speaks TLS; empty where not."""
    place = urlsplit(url)
    if place.scheme != "http" or not isinstance(error, HUNG_UP):
        return ""
    with suppress(OSError, TimeoutError, ssl.SSLError):
        async with asyncio.timeout(PROBE_SECONDS):
            _, writer = await asyncio.open_connection(place.hostname, place.port or 80, ssl=unverified())
        writer.close()
        return f"the controller at {url} speaks TLS; its URL is {_with_scheme(url, 'https')}"
    return ""


def _with_scheme(url: str, scheme: str) -> str:
    return urlsplit(url)._replace(scheme=scheme).geturl()
