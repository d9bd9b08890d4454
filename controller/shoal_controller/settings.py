"""The controller's settings: `SHOAL_*` in the environment, or given by the command's flags, which win. Parsed once.

Nothing inside reads the environment. What is wrong with a setting is said in one sentence that names it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from shoal_protos.addresses import is_here, split_address
from shoal_protos.bearer import UNSENDABLE, is_sendable
from shoal_protos.errors import UserError
from shoal_protos.validation import every_sentence

from shoal_controller.access.proxies import Proxies
from shoal_controller.core.machine.spec import LAUNCHER_TRAITS
from shoal_controller.launchers.kubernetes.job_defaults import JobDefaults
from shoal_controller.process.devices import cuda_devices
from shoal_controller.store.etcd_store import EtcdAccess

DEFAULT_WORKERS = 2
"""Wanted by a job that does not say, on a machine without CUDA devices."""


class Settings(BaseSettings):
    """Everything that can be set for a controller."""

    model_config = SettingsConfigDict(
        env_prefix="SHOAL_", frozen=True, extra="forbid", use_attribute_docstrings=True, populate_by_name=True
    )

    http: str = "127.0.0.1:7070"
    """Address of the REST API, `HOST:PORT`; port 0 picks a free port."""
    grpc: str = "127.0.0.1:7071"
    """Address that workers connect to, `HOST:PORT`; port 0 picks a free port, the last one where it is free."""
    advertise: str | None = None
    """Host at which other controllers of the store, and workers, reach this one. Default: the host that it listens on,
    or this machine's name where it listens on all."""
    store: str = "embedded:.shoal"
    """Store for the controller's state: `embedded:DIR` or `etcd://[USER@]HOST:PORT,HOST:PORT/PREFIX`."""
    etcd_password: SecretStr | None = None
    """Password of the user that an etcd URL names."""
    etcd_ca: Path | None = None
    """PEM file with the authorities that sign the certificates of etcd's servers. Default: no TLS to etcd."""
    etcd_certificate: Path | None = None
    """PEM file with the controller's certificate for etcd, where its servers ask for one."""
    etcd_key: Path | None = None
    """PEM file with that certificate's private key."""
    data: Path = Path(".shoal")
    """Folder for workers' logs and process records, and for the token that `run` and `demo` create."""
    log_dir: Path | None = None
    """Folder for logs of local workers, `DIR/JOB/WORKER.log`, which stay when a job is forgotten. Default: in the data
    folder."""
    adopt: bool = False
    """Take over the local workers that a controller elsewhere has left: for a data folder that was moved or restored.
    Default: false."""
    token: SecretStr | None = None
    """Bearer token for REST and workers; workers may use one of their run instead (`shoal token JOB`). Default: no
    authentication; `run` and `demo` create a token."""
    open: bool = False
    """Listen beyond this machine without a token or certificates. Default: false."""
    page: bool = True
    """Whether the controller shows its page at `/`; REST stays as it is. Default: true."""
    launchers: str = "local,none"
    """Launchers that jobs may use to start processes, separated by commas."""
    warm_start: bool = True
    """Whether a local job keeps a process that has imported torch, from which its later workers are forked. Default:
    true."""
    kubernetes_namespace: str = ""
    """Namespace of the pods of launcher `kubernetes`. Default: the controller's own, or the kubeconfig's."""
    kubernetes_controllers: str = ""
    """Addresses `HOST:PORT` at which pods reach the controllers, separated by commas. Default: those that controllers
    tell each other."""
    kubernetes_defaults: str = ""
    """Defaults of the section `kubernetes` of jobs, as JSON: `image`, `imagePullSecrets`, `nodeSelector`,
    `tolerations`, `volumes`, `volumeMounts` and `checkpointRoot`. Default: none."""
    kubernetes_nodes: bool = True
    """Whether launcher `kubernetes` reads nodes. Without it no taint, cordon or lost node is seen. Default: true."""
    kubernetes_taints: str = ""
    """Taints of nodes that are to go, besides those that are known, separated by commas."""
    kubeconfig: Annotated[str, Field(validation_alias="KUBECONFIG")] = ""
    """Kubeconfig of the cluster of launcher `kubernetes`. Default: the cluster that the controller runs in."""
    http_certificate: Path | None = None
    """PEM file with REST's certificate chain. With its key the port speaks HTTPS only. Read again when it changes."""
    http_key: Path | None = None
    """PEM file with that certificate's private key."""
    proxies: str = ""
    """Addresses or networks of proxies before REST, separated by commas: the client of a request is the one that their
    `X-Forwarded-For` names. Default: no header is believed."""
    ca: Path | None = None
    """PEM file with the authorities that sign REST's certificates, for the commands and for controllers that ask each
    other. Default: those that this system trusts."""
    grpc_certificate: Path | None = None
    """PEM file with the gRPC port's certificate chain. With key and client CA the port accepts mutual TLS only."""
    grpc_key: Path | None = None
    """PEM file with the certificate's private key."""
    grpc_client_ca: Path | None = None
    """PEM file with the authorities that sign the workers' certificates."""
    forget_after_seconds: Annotated[float, Field(gt=0)] = 7 * 86_400.0
    """Time after which a finished job is forgotten, with its events and logs; its checkpoints stay. Default: 7 days."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged to standard error."""
    visible_devices: Annotated[str | None, Field(validation_alias="CUDA_VISIBLE_DEVICES")] = None
    """CUDA devices that local workers can use; each worker is given one that fewest others have. Default: all of this
    machine."""

    def __init__(self, **given: Any) -> None:
        """Raises `UserError` for what is wrong."""
        try:
            super().__init__(**given)
        except ValidationError as error:
            faults = [{**fault, "loc": tuple(map(_variable, fault["loc"]))} for fault in error.errors()]
            raise UserError(every_sentence(faults, "the controller's configuration")) from None

    @field_validator("http", "grpc")
    @classmethod
    def _an_address(cls, address: str, info: ValidationInfo) -> str:
        try:
            split_address(address)
        except ValueError as error:
            raise ValueError(f"--{info.field_name} ({_variable(str(info.field_name))}): {error}") from None
        return address

    @field_validator("token")
    @classmethod
    def _a_token_with_something_in_it(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and not is_sendable(token.get_secret_value()):
            raise ValueError(UNSENDABLE)
        return token if token is not None and token.get_secret_value() else None

    @field_validator("launchers")
    @classmethod
    def _launchers_that_exist(cls, launchers: str) -> str:
        for name in launchers.split(","):
            if name.strip() not in LAUNCHER_TRAITS:
                *others, last = sorted(LAUNCHER_TRAITS)
                known = f"{', '.join(others)} or {last}"
                raise ValueError(f"SHOAL_LAUNCHERS names {name.strip()!r}; expected {known}")
        return launchers

    @field_validator("proxies")
    @classmethod
    def _proxies_with_addresses(cls, proxies: str) -> str:
        try:
            Proxies.named(proxies)
        except ValueError as error:
            raise ValueError(f"SHOAL_PROXIES: {error}") from None
        return proxies

    @model_validator(mode="after")
    def _nobody_comes_in_unasked(self) -> Settings:
        """● What is reached from elsewhere asks for a token (gRPC: or certificates), unless it is to be open."""
        if self.open or self.token is not None:
            return self
        doors = [("http", self.http)] + ([] if self.grpc_client_ca else [("grpc", self.grpc)])
        for name, address in doors:
            if not is_here(split_address(address)[0]):
                raise ValueError(
                    f"--{name} {address} can be reached from other machines without a token: set "
                    "SHOAL_TOKEN (gRPC: or certificates), listen on 127.0.0.1, or use --open to admit everybody"
                )
        return self

    @model_validator(mode="after")
    def _both_files_of_rest_or_none(self) -> Settings:
        if (self.http_certificate is None) != (self.http_key is None):
            raise ValueError("SHOAL_HTTP_CERTIFICATE and SHOAL_HTTP_KEY go together; only one of them is set")
        return self

    @property
    def job_defaults(self) -> JobDefaults:
        """Raises `UserError`."""
        return JobDefaults.of(self.kubernetes_defaults)

    @property
    def http_scheme(self) -> str:
        """What REST is served with."""
        return "http" if self.http_certificate is None else "https"

    @property
    def allowed_launchers(self) -> frozenset[str]:
        return frozenset(name.strip() for name in self.launchers.split(","))

    @property
    def etcd(self) -> EtcdAccess:
        """As whom an etcd is asked."""
        return EtcdAccess(self.etcd_ca, self.etcd_certificate, self.etcd_key, self.etcd_password)

    @property
    def folder(self) -> Path:
        """Where logs, process records and the token are."""
        return self.data.resolve()

    @property
    def log_folder(self) -> Path | None:
        """Where local workers' logs are; None: beside their records."""
        return self.log_dir.resolve() if self.log_dir is not None else None

    @property
    def default_workers(self) -> int:
        """Workers wanted by a job that does not say: one per CUDA device."""
        return len(self.devices) or DEFAULT_WORKERS

    @property
    def devices(self) -> tuple[str, ...]:
        """CUDA devices that local workers can use, as CUDA_VISIBLE_DEVICES names them."""
        return cuda_devices(self.visible_devices)


def _variable(field: str | int) -> str:
    return f"SHOAL_{field}".upper()


def data_folder(data: Path | None) -> Path:
    """The folder of `Settings.data`; its default for None."""
    default: Path = Settings.model_fields["data"].default
    return (data or default).resolve()


def inherited_environment() -> Mapping[str, str]:
    """The controller's own environment, which local workers inherit, without what is the controller's alone, which it
    reads in capitals and in small letters.
    """
    own = {f"SHOAL_{name.upper()}" for name in Settings.model_fields} | {"SHOAL_URL"}
    return {name: value for name, value in os.environ.items() if name.upper() not in own}
