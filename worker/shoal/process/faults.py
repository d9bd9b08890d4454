"""Faults that a test plants in a worker: `SHOAL_FAULT=WORKER@STEP:POINT:kill|stop|abort`, several with commas.

Read once with the session's settings. Where none is planted for this worker, `at` is one comparison. Each fault happens
once in a process, the first time that it stands at its point in that step or a later one: the step that it broke is run
again, and nobody knows beforehand at which step a world changes.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from shoal_protos.errors import UserError

POINTS = (
    "forward", "arrival", "gather", "meet", "backward", "fill", "exchange", "mirror", "shape", "vote", "in_vote",
    "in_vote_to_begin", "optimizer", "hand_out", "after_last", "prepare", "group", "roll_forward", "promote", "opened",
    "begin", "join", "save", "restore",
)  # fmt: skip
"""Where the training side may be struck, in the order of a step, then of a change of the world.

`arrival`: where a parameter is used that is still being handed out, before it is waited for. `gather`: within the
forward or the backward, where a unit of sharded parameters has been asked for. `meet`: the other members of its cell
wait for it before a backward. `fill`: beside the exchange, where this
worker sends or receives a slice that is not the first. `mirror`: reduced gradients are here and not yet with their
mirrors. `shape`: before parts of tensors that are updated whole leave for their homes. `in_vote`: one member has this
worker's row, or will have if this worker stays, and the others have not (vote.py); `in_vote_to_begin`: likewise, where
all vote for the same next generation. `group`: it is about to meet the others. `save`: the copy is about to be made;
`restore`: a checkpoint has been read, and is not handed out.
"""

ACTIONS = ("kill", "stop", "abort")
FORM = re.compile(r"(?P<worker>[^@:,\s]+)@(?P<step>\d{1,18}):(?P<point>[^:,]+):(?P<action>[^:,]+)")


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """One line of `SHOAL_FAULT`."""

    worker: str
    step: int
    point: str
    action: str


class Faults:
    """The faults planted for one worker. `abort` is what aborts its current group."""

    def __init__(self, planted: list[PlantedFault], abort: Callable[[], None] | None = None) -> None:
        self._planted = planted
        self.abort = abort

    @classmethod
    def parse(cls, text: str, worker: str, abort: Callable[[], None] | None = None) -> Faults:
        """All parts are checked, those of other workers too."""
        faults = [_parsed(part.strip()) for part in text.split(",")] if text.strip() else []
        return cls([fault for fault in faults if fault.worker == worker], abort)

    def at(self, point: str, step: int) -> None:
        """The training side stands at `point` of `step`."""
        if self._planted:
            self._strike(point, step)

    def due(self, point: str, step: int) -> bool:
        """Whether `at` would strike."""
        return self._next(point, step) is not None

    def _next(self, point: str, step: int) -> PlantedFault | None:
        return next((fault for fault in self._planted if fault.point == point and fault.step <= step), None)

    def _strike(self, point: str, step: int) -> None:
        fault = self._next(point, step)
        if fault is not None:
            self._planted.remove(fault)
            self._act(fault.action)

    def _act(self, action: str) -> None:
        if action == "abort":
            if self.abort is None:
                raise UserError("SHOAL_FAULT asks for an abort where there is no group.")
            self.abort()
        else:
            os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


P = ParamSpec("P")
T = TypeVar("T")


class AtAStep(Protocol):
    """Whose methods are fault points."""

    faults: Faults
    number: int
    """The step at hand."""


S = TypeVar("S", bound=AtAStep)


def fault_point(point: str) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Decorate a method: a fault that is planted at `point` strikes before it runs."""
    assert point in POINTS

    def decorate(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        @wraps(method)
        def struck(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            self.faults.at(point, self.number)
            return method(self, *args, **kwargs)

        return struck

    return decorate


def _parsed(part: str) -> PlantedFault:
    match = FORM.fullmatch(part)
    if match is None:
        raise UserError(f'SHOAL_FAULT has "{part}"; expected WORKER@STEP:POINT:ACTION, as in w1@5:vote:kill.')
    worker, step, point, action = match.groups()
    for kind, found, allowed in (("point", point, POINTS), ("action", action, ACTIONS)):
        if found not in allowed:
            raise UserError(f'SHOAL_FAULT names the {kind} "{found}"; expected {", ".join(allowed)}.')
    return PlantedFault(worker, int(step), point, action)
