"""What a worker's environment says about its controller. Parsed once, when the script calls `shoal.initialize`."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

import grpc
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError, field_validator, model_validator
from shoal_protos.errors import UserError

VARIABLES = {
    "controller": "SHOAL_CONTROLLER",
    "job": "SHOAL_JOB",
    "run": "SHOAL_RUN",
    "worker": "SHOAL_WORKER_ID",
    "token": "SHOAL_TOKEN",
    "domain": "SHOAL_FAILURE_DOMAIN",
    "host": "SHOAL_HOST",
    "launcher": "SHOAL_LAUNCHER",
    "tls_ca": "SHOAL_TLS_CA",
    "tls_certificate": "SHOAL_TLS_CERTIFICATE",
    "tls_key": "SHOAL_TLS_KEY",
    "fault": "SHOAL_FAULT",
}


class SessionSettings(BaseModel):
    """How this process finds and addresses its controller."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    controller: str = ""
    """`HOST:PORT` of the controller's gRPC side. Empty: the script trains alone, as a world of one."""
    job: str = ""
    """The job that this process works for. Needed with a controller."""
    run: str = ""
    """The run of the job that a launcher started this process for. Empty: the controller's welcome tells it."""
    worker: str = ""
    """This worker's id, as a launcher chose it. Empty: the controller gives one."""
    token: SecretStr | None = None
    """Shown as `authorization: Bearer TOKEN`."""
    domain: str = ""
    """Failure domain: copies of a block lie in different ones where possible. Default: the host's name."""
    host: str = ""
    """Where other workers reach this process. Default: loopback if the controller is there, else the address that
    the route to the controller starts from."""
    launcher: str = ""
    """What started this process, and would start another one in its place. Empty: it was started by hand."""
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
            raise UserError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None

    @field_validator("controller")
    @classmethod
    def _has_a_port(cls, controller: str) -> str:
        host, _, port = controller.rpartition(":")
        if controller and not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"SHOAL_CONTROLLER is {controller!r}; expected HOST:PORT, such as 127.0.0.1:7071")
        return controller

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
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every stream shows."""
        return () if self.token is None else (("authorization", f"Bearer {self.token.get_secret_value()}"),)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """For TLS; None where the channel is plain."""
        if self.tls_ca is None:
            return None
        return grpc.ssl_channel_credentials(
            _read("SHOAL_TLS_CA", self.tls_ca),
            _read("SHOAL_TLS_KEY", self.tls_key) if self.tls_key else None,
            _read("SHOAL_TLS_CERTIFICATE", self.tls_certificate) if self.tls_certificate else None,
        )

    def own_host(self) -> str:
        """The address at which others reach this process; see `host`."""
        if self.host:
            return self.host
        name, _, port = self.controller.rpartition(":")
        try:
            routes = socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_DGRAM)
            kind, *_, address = min(routes, key=lambda route: route[0] != socket.AF_INET)
            with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing; the kernel chooses the route
                return str(probe.getsockname()[0])
        except OSError as error:
            raise UserError(f"SHOAL_CONTROLLER is {self.controller}, and {name} cannot be routed to: {error}") from None


def _read(variable: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{variable} names {path}, which cannot be read: {error.strerror}") from None
