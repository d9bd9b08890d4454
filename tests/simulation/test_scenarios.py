"""The transcripts in `scenarios/`: what each command leads to.

`SHOAL_REWRITE=1` writes them anew, to be read as a diff. Together they take every arrow of the table of phases, so
that docs/phases.md draws none that cannot happen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from shoal_controller.core.machine.spec import Phase
from shoal_controller.core.machine.transitions import ALLOWED
from shoal_controller.core.machine.turn import Turn

from .script import play

SCENARIOS = sorted(Path(__file__).with_name("scenarios").glob("*.txt"))


@pytest.fixture(scope="module")
def taken() -> Iterator[set[tuple[Phase, Phase]]]:
    """The arrows that the scenarios of this module have taken so far."""
    arrows: set[tuple[Phase, Phase]] = set()
    enter = Turn.enter

    def note_and_enter(self: Turn, phase: Phase, reason: str = "") -> None:
        arrows.add((self.durable.phase, phase))
        enter(self, phase, reason)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Turn, "enter", note_and_enter)
        yield arrows


@pytest.fixture(scope="module")
def played() -> set[Path]:
    """The scenarios of this module that were played so far."""
    return set()


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_a_scenario_goes_as_its_transcript_says(file: Path, taken: set[tuple[Phase, Phase]], played: set[Path]) -> None:
    before = file.read_text()
    after = play(before)
    played.add(file)
    if os.environ.get("SHOAL_REWRITE"):
        file.write_text(after)
    assert "!!" not in after, after
    assert after == before or os.environ.get("SHOAL_REWRITE"), after


def test_every_arrow_of_the_phases_is_taken_by_a_scenario(taken: set[tuple[Phase, Phase]], played: set[Path]) -> None:
    for file in SCENARIOS:
        if file not in played:
            play(file.read_text())
    assert ALLOWED.keys() - taken == set()
