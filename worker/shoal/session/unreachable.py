"""Why no session came about with a controller, in one sentence: the address, what was found there, what to do.

gRPC says "Socket closed" to most of it, so the connection is tried once more with the standard library, step by step:
name, port, TLS, certificates. Blocks for a few seconds at most; `thread.py` calls it on a thread of its own, after an
attempt has failed.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from typing import Any

from shoal_protos.addresses import split_address
from shoal_protos.errors import UserError
from shoal_protos.pem import EXPIRED, NOT_YET_VALID, OTHER_NAMES

from shoal.session.settings import WorkerCertificates, unverified

PROBE_SECONDS = 3.0
"""For each step."""
CHECK = "check SHOAL_CONTROLLER"


def why_unreachable(address: str, files: WorkerCertificates | None, details: str) -> str:
    """`files`: the worker's; None: it speaks plainly. `details`: what gRPC says, for what is not found out here."""
    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), PROBE_SECONDS) as connection:
            if files is None:
                return _why_not_plain(address, connection, details)
            return _why_not_secure(address, connection, files, details)
    except socket.gaierror as error:
        return f"the name of the controller at {address} is not known ({error.strerror}); {CHECK}"
    except ConnectionRefusedError:
        return f"nobody listens at {address} (connection refused); start the controller there, or {CHECK}"
    except TimeoutError:
        return f"{address} does not answer within {PROBE_SECONDS:g} s; {CHECK} and the network between"
    except OSError as error:
        return f"{address} cannot be reached ({error.strerror or error}); {CHECK} and the network between"


def _why_not_plain(address: str, connection: socket.socket, details: str) -> str:
    """A controller with certificates closes whatever is no TLS."""
    try:
        unverified().wrap_socket(connection, do_handshake_on_connect=True).close()
    except OSError:
        return _why_no_web_server(address) or _unexplained(address, details)
    return (
        f"the controller at {address} speaks TLS, and this worker has no certificates; set SHOAL_TLS_CA, "
        "SHOAL_TLS_CERTIFICATE and SHOAL_TLS_KEY"
    )


def _why_no_web_server(address: str) -> str:
    """A controller has two addresses that are easily mistaken for each other; empty where no web server answers."""
    with socket.create_connection(split_address(address), PROBE_SECONDS) as connection:
        try:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            if connection.recv(5) != b"HTTP/":
                return ""
        except OSError:
            return ""
    return (
        f"a web server answers at {address}, as a controller's REST does; name the controller's address for workers in "
        "SHOAL_CONTROLLER (its --grpc, and `grpc=` in its first line)"
    )


def _why_not_secure(address: str, connection: socket.socket, files: WorkerCertificates, details: str) -> str:
    host = split_address(address)[0]
    try:
        with files.context().wrap_socket(connection, server_hostname=host) as secure:
            return _unexplained(address, details) if _is_welcome(secure) else _why_refused(address, files)
    except UserError as error:
        return str(error)
    except ssl.SSLCertVerificationError as error:
        return _why_not_trusted(address, files, error)
    except (ssl.SSLError, ConnectionError):
        return (
            f"{address} does not speak TLS, and SHOAL_TLS_CA is set; unset it, or start the controller with "
            "SHOAL_GRPC_CERTIFICATE, SHOAL_GRPC_KEY and SHOAL_GRPC_CLIENT_CA"
        )


def _is_welcome(secure: ssl.SSLSocket) -> bool:
    """Whether the other end begins to speak HTTP/2: one that refuses a certificate closes without a word."""
    try:
        return bool(secure.recv(1))
    except (ssl.SSLError, ConnectionError):
        return False


def _why_not_trusted(address: str, files: WorkerCertificates, error: ssl.SSLCertVerificationError) -> str:
    """What is wrong with the controller's certificate."""
    whose = f"the certificate of the controller at {address}"
    match error.verify_code:
        case code if code in OTHER_NAMES:
            host = split_address(address)[0]
            return (
                f"{whose} is for {_names_of(address, files)}, not for {host}; name one of these in SHOAL_CONTROLLER, "
                f"or give the controller a certificate with {host} in its subjectAltName"
            )
        case code if code == EXPIRED:
            return f"{whose} has expired; replace the file of its SHOAL_GRPC_CERTIFICATE"
        case code if code == NOT_YET_VALID:
            return f"{whose} is not valid yet; compare the clocks of both machines"
    return (
        f"{whose} is not signed by an authority in {files.ca} ({error.verify_message}); set SHOAL_TLS_CA to the "
        "authority that signed it"
    )


def _names_of(address: str, files: WorkerCertificates) -> str:
    """The names in the controller's certificate, which is to be trusted but for its name."""
    context = files.context()
    context.check_hostname = False
    try:
        with (
            socket.create_connection(split_address(address), PROBE_SECONDS) as connection,
            context.wrap_socket(connection) as secure,
        ):
            certificate: Mapping[str, Any] = secure.getpeercert() or {}
    except OSError:
        return "other names"
    return ", ".join(name for _, name in certificate.get("subjectAltName", ())) or "no name"


def _why_refused(address: str, files: WorkerCertificates) -> str:
    """Why the controller has ended the handshake: it does not tell, but this worker's certificate may."""
    if files.certificate is None:
        return (
            f"the controller at {address} asks for a worker's certificate, and this worker has none; set "
            "SHOAL_TLS_CERTIFICATE and SHOAL_TLS_KEY"
        )
    whose = f"the controller at {address} refuses this worker's certificate {files.certificate}"
    fault = files.fault_of_own()
    if fault is not None and fault.verify_code == EXPIRED:
        return f"{whose}, which has expired; replace the file"
    if fault is not None and fault.verify_code == NOT_YET_VALID:
        return f"{whose}, which is not valid yet; compare the clocks of both machines"
    found = f" ({fault.verify_message})" if fault is not None else ""
    return f"{whose}{found}; expected one signed by an authority in the controller's SHOAL_GRPC_CLIENT_CA"


def _unexplained(address: str, details: str) -> str:
    return f"the controller at {address} answers, and opens no session ({details}); its log may say why"
