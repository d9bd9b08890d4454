"""What the routes are given: the jobs as far as this controller knows them, and of whoever leads.

A controller that does not lead has forwarded what it could (`forwarding.py`); what comes here nevertheless is read from
the store, or refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from shoal_controller.leadership.controller_state import ControllerState
from shoal_controller.shell import Shell


def controller_of(request: Request) -> ControllerState:
    """What `app.py` was given."""
    controller = request.app.state.controller
    assert isinstance(controller, ControllerState)
    return controller


async def shell_to_read(request: Request) -> Shell:
    """All jobs, as far as this controller knows them."""
    return await controller_of(request).readable()


def shell_to_change(request: Request) -> Shell:
    """All jobs, of the controller that leads."""
    return controller_of(request).leading()


@dataclass(frozen=True, slots=True)
class NamedWorker:
    """The worker that a path names."""

    job: str
    worker: str


Readable = Annotated[Shell, Depends(shell_to_read)]
Leading = Annotated[Shell, Depends(shell_to_change)]
AWorker = Annotated[NamedWorker, Depends(NamedWorker)]
