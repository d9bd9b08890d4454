"""Which link a script gets: to the controller that its environment names, or none."""

from __future__ import annotations

import os
from collections.abc import Mapping

from shoal.session.alone import AloneLink
from shoal.session.client import ControllerLink
from shoal.session.seam import Link
from shoal.session.settings import SessionSettings


def open_link(environment: Mapping[str, str] = os.environ) -> tuple[Link, str]:
    """The link, and the faults that a test has planted (`SHOAL_FAULT`). Raises `UserError` for bad settings."""
    settings = SessionSettings.from_environment(environment)
    return (ControllerLink(settings) if settings.controller else AloneLink()), settings.fault
