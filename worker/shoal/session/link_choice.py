"""Which link a script gets: to the controller that its environment names, or none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

import torch
from shoal_protos.errors import UserError

from shoal.device import HOST, Device
from shoal.exchange.traffic import BULK
from shoal.group.gloo import build_gloo
from shoal.group.nccl import own_device
from shoal.group.of_device import groups_of
from shoal.session.alone import AloneLink
from shoal.session.controller_link import ControllerLink
from shoal.session.link import Link
from shoal.session.settings import SessionSettings


def open_link(
    environment: Mapping[str, str] = os.environ, device: Device = HOST, only_gloo: bool = False
) -> tuple[Link, str]:
    """The link, with groups for tensors of `device`, and the faults that a test has planted (`SHOAL_FAULT`).

    `only_gloo`: whatever devices could do.
    Raises `UserError` for bad settings.
    """
    settings = SessionSettings.from_environment(environment)
    if not settings.controller:
        _refuse_other_launchers(environment)
        _refuse_taken_out(environment)
        return AloneLink(), settings.fault
    own = _says_nothing if only_gloo else own_device
    return ControllerLink(settings, groups_of(build_gloo, device, BULK, own)), settings.fault


def is_worker(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a controller has started this process."""
    return bool(environment.get("SHOAL_CONTROLLER"))


def has_peers_on_host_alone(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether others reach this worker by an address that no other host can use: its peers are all on this one then."""
    try:
        settings = SessionSettings.from_environment(environment)
        return not settings.controller or ip_address(settings.own_host()).is_loopback
    except (UserError, ValueError):  # bad settings are refused when the link is opened; a name may be anybody's
        return False


def _says_nothing(_: torch.device) -> bytes:
    return b""


STARTERS = {"WORLD_SIZE": "torchrun", "SLURM_NTASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun"}
"""The variable by which each tells its processes how many there are."""


def _refuse_other_launchers(environment: Mapping[str, str]) -> None:
    """● N processes that know of no controller would be N separate trainings, each for itself."""
    for variable, starter in STARTERS.items():
        count = environment.get(variable, "")
        if count.isdecimal() and int(count) > 1:
            raise UserError(
                f"{variable} is {count}: {starter} has started this script {count} times, and each would train by "
                "itself, since there is no SHOAL_CONTROLLER. Start it with `shoal run`, or each process with `shoal "
                "worker --controller HOST:PORT --job NAME -- python …`; to train alone, unset the variable."
            )


def _refuse_taken_out(environment: Mapping[str, str]) -> None:
    """Workers that forget their controller (`os.environ.clear()`) would be separate trainings, each for itself."""
    controller = _at_start("SHOAL_CONTROLLER")
    if controller and "SHOAL_CONTROLLER" not in environment:
        raise UserError(
            f"SHOAL_CONTROLLER was {controller} when this process started, and the script has taken it out of "
            "os.environ, without which this worker would train by itself. Leave the variables SHOAL_* where they are "
            "until shoal.initialize has returned; to train alone, set SHOAL_CONTROLLER to an empty text."
        )


def _at_start(variable: str) -> str:
    """As this process was given it, whatever its script has done since; empty where it was not, or nothing tells."""
    try:
        variables = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    before = f"{variable}=".encode()
    return next((os.fsdecode(one.removeprefix(before)) for one in variables if one.startswith(before)), "")
