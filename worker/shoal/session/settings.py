"""A worker's settings for its controller, as its environment has them, and its certificates.

Parsed once, when the script calls `shoal.initialize`. gRPC takes any bytes as certificates and then fails every
handshake without a word; so `WorkerCertificates` reads them with the standard library's TLS first and says what is
wrong; `unreachable.py` asks it when a controller could not be reached.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError, field_validator, model_validator
from shoal_protos.addresses import is_connectable, split_address
from shoal_protos.bearer import UNSENDABLE, is_sendable
from shoal_protos.errors import UserError
from shoal_protos.messages import GRACE_SECONDS
from shoal_protos.pem import read_pem
from shoal_protos.shape import MOST_PROCESSES
from shoal_protos.validation import every_sentence

LONGEST_GRACE_SECONDS = 7 * 24 * 3600.0

VARIABLES = {
    "controller": "SHOAL_CONTROLLER",
    "job": "SHOAL_JOB",
    "run": "SHOAL_RUN",
    "worker": "SHOAL_WORKER_ID",
    "token": "SHOAL_TOKEN",
    "domain": "SHOAL_FAILURE_DOMAIN",
    "host": "SHOAL_HOST",
    "launcher": "SHOAL_LAUNCHER",
    "coordinate": "SHOAL_COORDINATE",
    "grace_seconds": "SHOAL_GRACE_SECONDS",
    "tls_ca": "SHOAL_TLS_CA",
    "tls_certificate": "SHOAL_TLS_CERTIFICATE",
    "tls_key": "SHOAL_TLS_KEY",
    "fault": "SHOAL_FAULT",
}


class SessionSettings(BaseModel):
    """How this process finds and addresses its controller."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    controller: str = ""
    """`HOST:PORT` of the controller's gRPC side; several, separated by commas, are tried in turn. Empty: the script
    trains alone, as a world of one."""
    job: str = ""
    """The job that this process works for. Needed with a controller."""
    run: str = ""
    """The run of the job that a launcher started this process for. Empty: the controller's welcome tells it."""
    worker: str = ""
    """This worker's id, as a launcher chose it. Empty: the controller gives one."""
    token: SecretStr | None = None
    """What opens the first stream: the join token of its run, from a launcher or `shoal token JOB`."""
    domain: str = ""
    """Failure domain: copies of a block lie in different ones where possible, and partial sums are added up before they
    leave one. Default: the host's name."""
    host: str = ""
    """Where other workers reach this process. Default: loopback if the controller is there, else the address that
    the route to the controller starts from."""
    launcher: str = ""
    """What started this process, and would start another one in its place. Empty: it was started by hand."""
    coordinate: int = -1
    """The coordinate of the process whose place this one takes: its wish, where a cell has several. -1: it has none."""
    grace_seconds: float = GRACE_SECONDS
    """How long this process has after SIGTERM, which it asks its controller for."""
    tls_ca: Path | None = None
    """PEM file with the authority that signed the controller's certificate. With it the channel speaks TLS."""
    tls_certificate: Path | None = None
    """PEM file with this worker's certificate, where the controller asks for one (mutual TLS)."""
    tls_key: Path | None = None
    """PEM file with the certificate's private key."""
    fault: str = ""
    """Faults that a test plants; see faults.py."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> SessionSettings:
        """Raises `UserError` naming the variable."""
        given = {field: environment[name] for field, name in VARIABLES.items() if environment.get(name)}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise UserError(every_sentence(error.errors(), "the environment")) from None

    @field_validator("controller")
    @classmethod
    def _has_a_port(cls, controller: str) -> str:
        for address in controller.split(",") if controller else ():
            if not is_connectable(address.strip()):
                raise ValueError(
                    f"SHOAL_CONTROLLER is {controller!r}; expected HOST:PORT, such as 127.0.0.1:7071, or several "
                    "separated by commas"
                )
        return controller

    @field_validator("token")
    @classmethod
    def _a_token_that_can_be_sent(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and not is_sendable(token.get_secret_value()):
            raise ValueError(UNSENDABLE)
        return token

    @field_validator("coordinate", mode="before")
    @classmethod
    def _a_place(cls, coordinate: object) -> int:
        text = str(coordinate)
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) < MOST_PROCESSES):
            raise ValueError(
                f"SHOAL_COORDINATE is {coordinate!r}; expected a whole number from 0 to {MOST_PROCESSES - 1}"
            )
        return int(text)

    @field_validator("grace_seconds", mode="before")
    @classmethod
    def _a_time(cls, seconds: object) -> float:
        try:
            given = float(str(seconds))
        except ValueError:
            given = -1.0
        if not 0 <= given <= LONGEST_GRACE_SECONDS:
            raise ValueError(
                f"SHOAL_GRACE_SECONDS is {seconds!r}; expected a number of seconds from 0 to {LONGEST_GRACE_SECONDS:g}"
            )
        return given

    @model_validator(mode="after")
    def _belong_together(self) -> SessionSettings:
        if self.controller and not self.job:
            raise ValueError("SHOAL_CONTROLLER is set and SHOAL_JOB is not; set it to the name of the job")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("SHOAL_TLS_CERTIFICATE and SHOAL_TLS_KEY are needed together; only one is set")
        if self.tls_certificate is not None and self.tls_ca is None:
            raise ValueError("SHOAL_TLS_CERTIFICATE is set and SHOAL_TLS_CA is not; mutual TLS needs both")
        return self

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the controller, in the order in which they are tried."""
        return tuple(address.strip() for address in self.controller.split(","))

    @property
    def certificates(self) -> WorkerCertificates | None:
        """The files for TLS; None for a plain channel."""
        return None if self.tls_ca is None else WorkerCertificates(self.tls_ca, self.tls_certificate, self.tls_key)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials for TLS; None for a plain channel. Raises `UserError` for files that cannot be used."""
        if self.tls_ca is None or self.certificates is None:
            return None
        credentials = grpc.ssl_channel_credentials(
            read_pem("SHOAL_TLS_CA", self.tls_ca),
            read_pem("SHOAL_TLS_KEY", self.tls_key) if self.tls_key else None,
            read_pem("SHOAL_TLS_CERTIFICATE", self.tls_certificate) if self.tls_certificate else None,
        )
        self.certificates.context()  # gRPC takes any bytes, and then says nothing but that no handshake succeeds
        return credentials

    def own_host(self) -> str:
        """The address at which others reach this process; see `host`."""
        if self.host:
            return self.host
        failures = []
        for controller in self.addresses:
            try:
                return _own_end_of_the_route_to(controller)
            except OSError as error:
                failures.append(f"{split_address(controller)[0]} cannot be routed to: {error}")
        raise UserError(f"SHOAL_CONTROLLER is {self.controller}, and {'; '.join(failures)}")


def _own_end_of_the_route_to(controller: str) -> str:
    """Raises `OSError`."""
    traffic = socket.getaddrinfo(*split_address(controller), type=socket.SOCK_DGRAM)
    kind, *_, address = min(traffic, key=lambda route: route[0] != socket.AF_INET)
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing; the kernel chooses the route
        return str(probe.getsockname()[0])


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
