"""The transcripts in `scenarios/`: what each command leads to.

`SHOAL_REWRITE=1` writes them anew, to be read as a diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .script import play

SCENARIOS = sorted(Path(__file__).with_name("scenarios").glob("*.txt"))


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_a_scenario_goes_as_its_transcript_says(file: Path) -> None:
    before = file.read_text()
    after = play(before)
    if os.environ.get("SHOAL_REWRITE"):
        file.write_text(after)
    assert "!!" not in after, after
    assert after == before or os.environ.get("SHOAL_REWRITE"), after
