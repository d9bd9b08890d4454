"""The kinds of events: each is used somewhere, and has one sentence that says what it means."""

from __future__ import annotations

import re
from pathlib import Path

from shoal_controller.core.machine.event_kind import EventKind

CONTROLLER = Path(__file__).resolve().parents[2] / "controller"
NAMES_OF_PHASES = {"SUCCEEDED", "FAILED", "CANCELLED"}
"""Looked up by the phase that a job has ended in."""


def test_every_kind_of_event_is_recorded_somewhere() -> None:
    files = (CONTROLLER / "shoal_controller").rglob("*.py")
    recorded = {name for file in files for name in re.findall(r"\bEventKind\.([A-Z_]+)", file.read_text())}
    assert {kind.name for kind in EventKind} - recorded - NAMES_OF_PHASES == set()


def test_every_kind_of_event_has_a_meaning_of_one_sentence() -> None:
    assert [kind for kind in EventKind if not re.fullmatch(r"[A-Z0-9].*\.", kind.meaning)] == []
    assert EventKind("joined").__doc__ == "A worker connected for the first time."
