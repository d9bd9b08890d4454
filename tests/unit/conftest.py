"""A warm process for the tests that run `shoal` (forked_command.py), once per test session where one asks for it, and a
controller for its commands (told_controller.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import forked_command
import pytest
from integration import cluster
from told_controller import controller as controller


@pytest.fixture(scope="session")
def commands(temporary: Path) -> Iterator[None]:
    """Started before the first test that asks for it, so that nobody takes it for something left behind."""
    if cluster.is_warm():  # tests of other folders run in this session, too
        yield
        return
    with cluster.warmed(forked_command.MODULES, usual=()):
        yield


@pytest.fixture
def unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No job's curve has a point but those of the test."""
    monkeypatch.setattr("shoal_controller.observe.curves.EVERY_SECONDS", 3600.0)
