"""The controller's settings: `SHOAL_*` in the environment, or given by the command's flags, which win. Parsed once.

Nothing inside reads the environment. What is wrong with a setting is said in one sentence that names it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from shoal_protos.errors import UserError

from shoal_controller.addresses import is_here
from shoal_controller.api.sentences import sentence_for

DEFAULT_WORKERS = 2
"""Wanted by a job that does not say, on a machine without CUDA devices."""


class Settings(BaseSettings):
    """Everything that can be set for a controller."""

    model_config = SettingsConfigDict(
        env_prefix="SHOAL_", frozen=True, extra="forbid", use_attribute_docstrings=True, populate_by_name=True
    )

    http: str = "127.0.0.1:7070"
    """Where REST is served, `HOST:PORT`; port 0 picks a free one."""
    grpc: str = "127.0.0.1:7071"
    """Where workers connect to, `HOST:PORT`; port 0 picks a free one."""
    store: str = "embedded:.shoal"
    """Where state is kept: `embedded:DIR`."""
    data: Path | None = None
    """Folder of workers' logs and process records, and of the token that `run` and `demo` make. Default: the embedded
    store's, else `.shoal`."""
    token: SecretStr | None = None
    """Operators' bearer token: REST asks for it; workers show it, or one of their job's that `shoal token` derives from
    it. Default: none is asked for; `run` and `demo` make one."""
    open: bool = False
    """Serve addresses beyond this machine although nobody has to show a token or a certificate. Default false."""
    launchers: str = "local,none"
    """Which launchers jobs may name, separated by commas: what may start processes."""
    grpc_certificate: Path | None = None
    """PEM file of the gRPC port's certificate chain; with key and client_ca the port speaks mutual TLS only."""
    grpc_key: Path | None = None
    """PEM file of the certificate's private key."""
    grpc_client_ca: Path | None = None
    """PEM file of the authorities that sign the workers' certificates."""
    forget_after_seconds: Annotated[float, Field(gt=0)] = 7 * 86_400.0
    """How long a job that is over stays visible, with its events and logs; its checkpoints stay for good. Default: 7
    days."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Entries of this level and above are logged to standard error."""
    visible_devices: Annotated[str | None, Field(validation_alias="CUDA_VISIBLE_DEVICES")] = None
    """The CUDA devices that local workers can use. Default: all of this machine."""

    def __init__(self, **given: Any) -> None:
        """Raises `UserError` for what is wrong."""
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise UserError(sentence_for(error.errors(), "the settings", Settings)) from None

    @field_validator("http", "grpc")
    @classmethod
    def _an_address(cls, address: str) -> str:
        split_address(address)
        return address

    @field_validator("token")
    @classmethod
    def _a_token_with_something_in_it(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and not token.get_secret_value().isprintable():
            raise ValueError("SHOAL_TOKEN has characters that no HTTP header can carry; use printable ones")
        return token if token is not None and token.get_secret_value() else None

    @field_validator("launchers")
    @classmethod
    def _launchers_that_exist(cls, launchers: str) -> str:
        for name in launchers.split(","):
            if name.strip() not in ("local", "none"):
                raise ValueError(f"SHOAL_LAUNCHERS names {name.strip()!r}; allowed are local and none")
        return launchers

    @model_validator(mode="after")
    def _nobody_comes_in_unasked(self) -> Settings:
        """● What is reached from elsewhere asks for a token (gRPC: or certificates), unless it is to be open."""
        if self.open or self.token is not None:
            return self
        doors = [("http", self.http)] + ([] if self.grpc_client_ca else [("grpc", self.grpc)])
        for name, address in doors:
            if not is_here(split_address(address)[0]):
                raise ValueError(
                    f"--{name} {address} is reached from other machines and nobody would have to show a token: set "
                    "SHOAL_TOKEN (gRPC: or certificates), listen on 127.0.0.1, or say --open to let everybody in"
                )
        return self

    @property
    def allowed_launchers(self) -> frozenset[str]:
        return frozenset(name.strip() for name in self.launchers.split(","))

    @property
    def folder(self) -> Path:
        """Where logs, process records and the token are."""
        return data_folder(self.store, self.data)

    @property
    def default_workers(self) -> int:
        """Workers wanted by a job that does not say: one per CUDA device."""
        if self.visible_devices is not None:
            devices = len([device for device in self.visible_devices.split(",") if device.strip() not in ("", "-1")])
        else:
            devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
        return devices or DEFAULT_WORKERS


def split_address(address: str) -> tuple[str, int]:
    """`HOST:PORT` or `[HOST]:PORT`. Raises `ValueError` with a sentence."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise ValueError(f"{address!r} is no address; expected HOST:PORT, such as 127.0.0.1:7070 (port 0: a free one)")
    return host, int(port)


def joined_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def data_folder(store: str | None, data: Path | None) -> Path:
    """See `Settings.data`."""
    kind, _, folder = (store or Settings.model_fields["store"].default).partition(":")
    return (data or Path(folder if kind == "embedded" and folder else ".shoal")).resolve()


def inherited_environment() -> Mapping[str, str]:
    """The controller's own environment, which local workers inherit, without what is the controller's alone."""
    own = {f"SHOAL_{name.upper()}" for name in Settings.model_fields} | {"SHOAL_URL"}
    return {name: value for name, value in os.environ.items() if name not in own}
