"""Which link a script gets: to the controller that its environment names, or none."""

from __future__ import annotations

import os
from collections.abc import Mapping

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
        return AloneLink(), settings.fault
    own = _says_nothing if only_gloo else own_device
    return ControllerLink(settings, groups_of(build_gloo, device, BULK, own)), settings.fault


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
