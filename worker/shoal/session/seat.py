"""The seat of this process: its place in a cell, which it asks its controller for before a model is built.

`shoal.cell` calls `take_seat`; `start.py` checks the config by it and gives the session what was taken, which says
hello as the worker that was seated. A process has one seat for its life: one that starts over keeps its coordinate. A
cell of one process asks for nothing.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal_protos.errors import UserError
from shoal_protos.limits import check_address_space
from shoal_protos.messages import AskSeat
from shoal_protos.shape import Shape

from shoal.session.controller_link import NEEDED_MEBIBYTES
from shoal.session.dialogue import Identity
from shoal.session.driver import SeatDriver
from shoal.session.link_choice import AloneLink, refuse_separate_trainings
from shoal.session.settings import SessionSettings
from shoal.session.thread import SessionThread


@dataclass(frozen=True, slots=True)
class TakenSeat:
    """The place of this process, and who it is from then on."""

    cell: Shape
    worker: str
    """Empty: a cell is one process, and the controller has not named it yet."""
    coordinate: int
    incarnation: str = ""
    """As which it was seated; empty: a cell is one process, and nothing was asked for."""


_taken: list[TakenSeat] = []
"""That of this process, once it has one."""


def take_seat(shape: Shape, environment: Mapping[str, str] = os.environ) -> TakenSeat:
    """The place of this process in a cell of this shape; the same one for as long as it lives.

    Waits for as long as no controller answers. The variables that other launchers set (`WORLD_SIZE`) have been looked
    at when it returns: they may be those of the cell from then on.
    Raises `UserError` where there is no place.
    """
    if not _taken:
        _taken.append(_take(shape, environment))
    taken = _taken[0]
    if taken.cell != shape:
        raise UserError(
            f"shoal.cell was called for cells of {taken.cell} before, and now for cells of {shape}; a process has one "
            "place for its life. Call it once."
        )
    return taken


def own_identity() -> Identity | None:
    """Who this process is for its controller since it was seated; None: it was not, or had no need to be."""
    taken = next(iter(_taken), None)
    return Identity(taken.worker, taken.incarnation, taken.coordinate) if taken and taken.incarnation else None


def check_seat(shape: Shape) -> None:
    """Raises `UserError` where a config has cells that this process has no place in."""
    if not _taken and shape.processes > 1:
        raise UserError(
            f"a cell has {shape.processes} processes by the config ({shape}), and this one has built its model without "
            "knowing which part of it is its own; call shoal.cell before the model is built."
        )
    if _taken and _taken[0].cell != shape:
        raise UserError(
            f"shoal.cell was called for cells of {_taken[0].cell}, and the config's are of {shape}; give shoal.cell "
            "the config, or say the same in its section `shoal.cell`."
        )


def _take(shape: Shape, environment: Mapping[str, str]) -> TakenSeat:
    settings = SessionSettings.from_environment(environment)
    if not settings.controller:
        refuse_separate_trainings(environment)
        if shape.processes > 1:
            script = Path(sys.argv[0]).name or "script.py"
            raise UserError(
                f"this script's cell has {shape.processes} processes ({shape}), and no controller has started this "
                f'one; start it with "shoal run --workers {shape.processes} {script}".'
            )
        return TakenSeat(shape, AloneLink.worker, 0)
    if shape.processes == 1:
        return TakenSeat(shape, settings.worker, 0)
    return _ask(settings, shape)


def _ask(settings: SessionSettings, shape: Shape) -> TakenSeat:
    check_address_space("the session with the controller", NEEDED_MEBIBYTES)
    ask = AskSeat(
        settings.job, settings.worker, secrets.token_hex(8), socket.gethostname(), os.getpid(), shape,
        settings.run, settings.coordinate,
    )  # fmt: skip
    driver = SeatDriver(ask, is_launched=bool(settings.launcher))
    thread = SessionThread(driver, settings, None)
    try:
        seat = driver.wait()
    finally:
        thread.close()
    return TakenSeat(shape, seat.worker, seat.coordinate, ask.incarnation)
