"""The choice of a script's link: to the controller that its environment names, or to none.

Without one it is an `AloneLink`: a world of one, which never changes. It says what a controller would that starts a job
with one worker, and nothing else; the engine cannot tell. No thread, no socket, no signal handler.
"""

from __future__ import annotations

import copy
import os
import secrets
import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path

import torch
from shoal_protos.checkpoint import CheckpointRef
from shoal_protos.description import Description
from shoal_protos.errors import UserError
from shoal_protos.messages import Inventory, Result, Status, Telemetry
from shoal_protos.plan import Member, Plan, Reason, Recovery, Share, check_plan
from shoal_protos.runs import NO_BLOCKS, Runs, every

from shoal.core.membership import Membership
from shoal.exchange.traffic import BULK
from shoal.group.device_group import groups_of
from shoal.group.gloo import build_gloo
from shoal.group.group import Group, SoloGroup
from shoal.group.nccl import own_device
from shoal.process.device import HOST, Device
from shoal.process.gpu_watch import GpuWatch
from shoal.session.controller_link import ControllerLink
from shoal.session.dialogue import Identity
from shoal.session.link import Inbox, Item, JobInfo, Link, Opened, Prepared, Recover, Stopped
from shoal.session.settings import SessionSettings


def open_link(
    environment: Mapping[str, str] = os.environ,
    device: Device = HOST,
    only_gloo: bool = False,
    identity: Identity | None = None,
) -> tuple[Link, str]:
    """The link, with groups for tensors of `device`, and the faults that a test has planted (`SHOAL_FAULT`).

    `only_gloo`: whatever devices could do. `identity`: who this process is, where it has been seated.
    Raises `UserError` for bad settings.
    """
    settings = SessionSettings.from_environment(environment)
    if not settings.controller:
        refuse_separate_trainings(environment)
        return AloneLink(), settings.fault
    own = _says_nothing if only_gloo else own_device
    groups = groups_of(build_gloo, device, BULK, own)
    return ControllerLink(settings, groups, identity, GpuWatch.of(device)), settings.fault


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


def refuse_separate_trainings(environment: Mapping[str, str]) -> None:
    """Raises `UserError` for a process without a controller that is one of several of its script."""
    _refuse_other_launchers(environment)
    _refuse_taken_out(environment)


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


def _nothing() -> None:
    """There is nobody to meet."""


class AloneLink:
    """A `Link`."""

    alone = True
    worker = "w0"

    def __init__(self) -> None:
        self.incarnation = secrets.token_hex(8)
        self.job = JobInfo(name="", run=self.incarnation)
        self._checkpoint: CheckpointRef | None = None
        self._highest_saved = 0
        self._number = 0
        self._membership = Membership(self.worker, self.incarnation)
        self._inbox = Inbox()
        self._description: Description | None = None
        self.before_building: Callable[[], None] = _nothing

    def introduce(self, description: Description, status: Status) -> None:
        del status  # there is nobody to tell
        self._description = description

    def end_warm_up(self) -> None:
        self._membership.end_warm_up()
        self._stop()

    def _stop(self) -> None:
        """A new number: of the first generation, or of the next after all that were saved."""
        known = self._checkpoint.generation if self._checkpoint is not None else 0
        self._number = 1 + max(self._number, known, self._highest_saved)
        self._membership.on_prepare(self._number)
        self._inbox.put(Stopped(self._number))

    @property
    def stopping(self) -> bool:
        return self._inbox.waiting

    def take(self, seconds: float | None = None) -> Item | None:
        assert self.stopping or seconds is not None, "alone, nothing that one could wait for ever comes"
        return self._inbox.take(0.0)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def answer(self, inventory: Inventory) -> None:
        plan = self._plan(inventory)
        check_plan(plan)
        self._membership.on_recovery(plan)
        self._inbox.put(Recover(plan, SoloGroup(), 0.0))

    def _plan(self, inventory: Inventory) -> Plan:
        assert self._description is not None, "introduce comes first"
        lanes, blocks = self._description.lanes, self._description.blocks
        return Plan(
            generation=self._number,
            base=0,
            reason=Reason.START,
            lanes=lanes,
            blocks=blocks,
            members=(Member(self.worker, self.incarnation, address=""),),
            shares=(Share(tuple(range(lanes)), owned=every(blocks)),),
            fills=(),
            fill_blocks_per_step=0,
            builder=0,
            steps=True,
            recovery=self._recovery(inventory),
        )

    def _recovery(self, inventory: Inventory) -> Recovery:
        found = self._checkpoint
        if found is None:
            return Recovery(max(0, inventory.step), inventory.record, counted=(True,), stale=(NO_BLOCKS,))
        return Recovery(found.step, b"", counted=(False,), stale=(NO_BLOCKS,), checkpoint=found.path)

    def report_ready(self, generation: int) -> bool:
        is_ready = self._membership.report_ready(generation)
        if is_ready:
            self._inbox.put(Opened(generation))
        return is_ready

    def enter_vote(self, holds: Runs) -> int:
        return self._membership.enter_vote(holds)

    def leave_vote(self, voted: list[int]) -> Prepared | None:
        self._membership.leave_vote(voted)
        return None

    def begin(self, plan: Plan, group: Group | None) -> None:
        del group
        self._membership.begin(plan)

    def membership(self) -> Membership:
        return copy.copy(self._membership)

    def publish(self, status: Status, telemetry: Telemetry) -> None:
        """There is nobody to tell; but a checkpoint that cannot be read means to begin from another one."""
        del telemetry
        unreadable = status.unreadable_checkpoint.path if status.unreadable_checkpoint is not None else ""
        again = bool(unreadable) and self._checkpoint is not None and self._checkpoint.path == unreadable
        if not self._membership.generation:
            self._checkpoint, self._highest_saved = status.checkpoint, status.highest_saved
        if again:
            self._stop()

    def result(self, result: Result) -> None:
        """Do nothing: the script's own status says how it ended."""

    def close(self) -> None:
        """Nothing is open."""
